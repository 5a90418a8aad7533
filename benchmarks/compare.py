"""megajax, the PyTorch peer and the limit, measured alternately in one run:

    python -m benchmarks.compare --config=NAME [--section.field=value ...]
        --rounds=3  --seconds=10      of each window; the median over the rounds counts
        --peers=loop,torch,limit      what is measured in addition to the bare step
        --output=FILE.json            saves all results; written after each measurement
        --commit=HASH                 needed if the files are not a git checkout
    python -m benchmarks.compare --table FILE.json ... [--plot=FILE.svg]
                                      the table of several such runs, and a bar chart; a file may hold a list of them

Each contender runs in a separate process, so that it has the GPU to itself; overrides go to all of them. The training
loop runs in the first round only. On several GPUs the peer is torch_fsdp, and the limit is the work of one of them.
"""

import datetime
import importlib.util
import json
import shlex
import subprocess
import sys

from benchmarks import results
from benchmarks.command_line import read_config, run, split
from benchmarks.records import ROOT, commit, save, saved
from megajax.config import Config

KNOWN = {"config": "", "rounds": "3", "seconds": "10", "peers": "loop,torch,limit", "output": "", "commit": "",
         "table": "", "plot": ""}  # fmt: skip


def command(contender: str, arguments: list[str], num_devices: int) -> list[str]:
    """Command of a process that prints one record. arguments: --config, --seconds and overrides."""
    start = [sys.executable]
    if contender == "torch" and num_devices > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_devices}"]
    peer = "benchmarks.peers.torch_gpt" if num_devices == 1 else "benchmarks.peers.torch_fsdp"
    modules = {"megajax": "benchmarks.train_step", "loop": "benchmarks.loop", "limit": "benchmarks.peers.limit"}
    return [*start, "-m", modules.get(contender, peer), *arguments]


def parse(output: str) -> dict:
    """The last record in the output of a contender. Raises ValueError if there is none."""
    for line in reversed(output.splitlines()):
        if '"step_seconds"' in line:
            return json.loads(line[line.index("{") :])
    raise ValueError("it printed no result")


def order(peers: list[str], num_rounds: int) -> list[str]:
    """The contenders in the order in which they run; the loop runs once."""
    once = ["megajax", *peers]
    return once + [name for name in once if name != "loop"] * (num_rounds - 1)


def describe(config: Config, values: dict[str, str], arguments: list[str]) -> dict:
    """The result record before any measurement."""
    training = config.training
    measuring = [word for word in arguments if not word.startswith(("--output=", "--plot=", "--commit="))]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.compare", *measuring]),
        "config": values["config"],
        "work": f"{training.global_batch_size} x {training.sequence_length}",
        "tokens_per_step": training.global_batch_size * training.sequence_length,
        "flops_per_token": config.make_model().flops_per_token(training.sequence_length, causal=False),
        "date": datetime.date.today().isoformat(),
        "commit": values["commit"] or commit(),
        "device": "",
        "num_devices": 1,
        "versions": {},
        "measurements": {},
        "problems": {},
    }


def compare(result: dict, turns: list[str], arguments: list[str], output: str) -> dict:
    """Fills in the result; a contender that fails is not run again."""
    for contender in turns:
        if contender in result["problems"]:
            continue
        words = command(contender, arguments, result["num_devices"])
        print(f"{contender}: {shlex.join(words[1:])}", file=sys.stderr, flush=True)
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            measured = parse(done.stdout)
        except ValueError as error:
            result["problems"][contender] = f"exit status {done.returncode}, {error}"
        else:
            _add(result, contender, measured)
            print(f"{contender}: {1000 * measured['step_seconds']:.2f} ms", file=sys.stderr, flush=True)
        save(output, result)
        if "megajax" in result["problems"]:
            break
    return result


def _add(result: dict, contender: str, measured: dict) -> None:
    if contender == "megajax":
        count, _, result["device"] = measured["device"].partition(" x ")
        result["num_devices"] = int(count)
        result["device"] = measured["device"]
    result["versions"] |= measured["versions"]
    result["measurements"].setdefault(contender, []).append(measured)


def main(arguments: list[str]) -> int:
    values, overrides = split(arguments, KNOWN)
    if values["table"]:
        found = [record for word in (values["table"], *overrides) if word != "yes" for record in saved(word)]
    else:
        config = read_config(values["config"], overrides)
        peers = [name for name in values["peers"].split(",") if name]
        if unknown := [name for name in peers if name not in ("torch", "limit", "loop")]:
            raise ValueError(f"--peers={values['peers']}: {unknown[0]} is unknown; use any of loop,torch,limit")
        if "torch" in peers and importlib.util.find_spec("torch") is None:
            raise ValueError("--peers=torch needs PyTorch, which is not installed; use --peers=loop,limit")
        contender_arguments = [f"--config={values['config']}", f"--seconds={values['seconds']}", *overrides]
        turns = order(peers, int(values["rounds"]))
        found = [compare(describe(config, values, arguments), turns, contender_arguments, values["output"])]
    print(results.table(found))
    if values["plot"]:
        results.plot(found, values["plot"])
    problems = {name: problem for result in found for name, problem in result["problems"].items()}
    for name, problem in problems.items():
        print(f"not measured: {name} ({problem})")
    return 1 if problems else 0


if __name__ == "__main__":
    run(main)
