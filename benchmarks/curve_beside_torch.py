"""The loss of a run beside PyTorch's, from the same weights on the same batches of real text:

    python -m benchmarks.curve_beside_torch [--config=gpt2_124m] [--section.field=value ...]
        --output=FILE.json     the losses
        --plot=FILE.svg        both curves, and below them their difference

PyTorch trains the plain model of the peers (benchmarks/peers/torch_model.py) with its own fused AdamW, clipping and
autocast; only the initial weights, the batches and the learning rates come from megajax. 600 steps of 16 x 1,024 bytes
of Python's standard library, which every machine has, unless other fields say otherwise. Each trains in a process of
its own, so that it has the GPU to itself, and on one device.
"""

import dataclasses
import json
import multiprocessing
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np

import megajax
from benchmarks import figures
from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, jax_versions
from megajax.parameters import named

SETTINGS = (
    "--task.cross_document_attention=True",
    "--data.source=text",
    "--data.text=stdlib",
    "--data.tokenizer=bytes",
    "--model.vocab_size=257",
    "--optimizer.warmup_steps=100",
    "--training.steps=600",
    "--training.global_batch_size=16",
    "--training.microbatch_size=None",
    "--training.eval_every_steps=0",
    "--mesh.data=1",
    "--mesh.fsdp=1",
)
LAST = 50  # losses that are averaged for the final one


def train(arguments: list[str], folder: str) -> None:
    """Writes what PyTorch begins with and reads, and losses.json."""
    config = dataclasses.replace(read_config(arguments[0], arguments[1:]), run_dir=f"{folder}/run")
    training = megajax.Run(config, devices=jax.devices()[:1])
    state = training.init()
    np.savez(f"{folder}/weights.npz", **{name: np.asarray(a) for name, a in named(state.weights).items()})
    losses = []
    rates = []
    for step in range(config.training.steps):
        batch = training.batch(step)
        np.savez(f"{folder}/batch{step}.npz", tokens=batch["tokens"], labels=batch["labels"])
        state, metrics = training.step(state, batch)
        losses.append(metrics["loss"])
        rates.append(metrics["learning_rate"])
    Path(folder, "rates.json").write_text(json.dumps(rates))
    about = {"device": devices(), "versions": jax_versions()}
    Path(folder, "megajax.json").write_text(json.dumps({"losses": losses} | about))


def train_peer(arguments: list[str], folder: str) -> None:
    # not at the top: it needs torch, and must not take the GPU from the process that has JAX
    from benchmarks.peers.torch_curve import train as train_torch

    found = train_torch(read_config(arguments[0], arguments[1:]), Path(folder))
    Path(folder, "torch.json").write_text(json.dumps(found))


def compare(arguments: list[str]) -> dict:
    """arguments: recipe, then overrides -> {"megajax": {"losses", ...}, "torch": {...}}."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for target in (train, train_peer):
            process = processes.Process(target=target, args=(arguments, folder))
            process.start()
            process.join()
            if process.exitcode:
                raise ValueError(f"{target.__name__} ended with exit status {process.exitcode}, as said above")
        return {name: json.loads(Path(folder, f"{name}.json").read_text()) for name in ("megajax", "torch")}


def summary(found: dict) -> str:
    ours, theirs = (found[name]["losses"] for name in ("megajax", "torch"))
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    ends = [statistics.mean(losses[-LAST:]) for losses in (ours, theirs)]
    return (
        f"loss {ours[0]:.4f} and {theirs[0]:.4f} (PyTorch) at first, mean of the last {LAST} {ends[0]:.4f} and "
        f"{ends[1]:.4f}; they differ by {statistics.mean(gaps):.4f} on average and by at most {max(gaps):.4f}"
    )


def main(arguments: list[str]) -> None:
    values, overrides = split(arguments, {"config": "gpt2_124m", "output": "", "plot": ""})
    chosen = [values["config"], *SETTINGS, *overrides]
    read_config(chosen[0], chosen[1:]).check()
    found = {"command": f"--config={' '.join(chosen)}"} | compare(chosen)
    print(summary(found))
    if values["output"]:
        Path(values["output"]).write_text(json.dumps(found) + "\n")
    if values["plot"]:
        curves = {"PyTorch": found["torch"]["losses"], "megajax": found["megajax"]["losses"]}
        figures.losses(values["plot"], range(1, len(curves["PyTorch"]) + 1), curves)


if __name__ == "__main__":
    run(main)
