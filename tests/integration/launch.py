"""Starts train.py as real processes on a very small model, and ends them whatever happens."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import configs
from megajax.config import Config
from megajax.overrides import override

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120
# A script that has begun to read with two worker processes; a test goes on in its main block.
READER = """
import multiprocessing
import numpy as np
from megajax.data.config import DataConfig
from megajax.data.loader import step_batches

class Numbers:
    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        return {"tokens": np.full(4, i)}

def schedule(step):
    return 8 * step, 1, 8

if __name__ == "__main__":
    config = DataConfig(source="mock", num_workers=2)
    batches = step_batches(Numbers(), schedule, np.arange, start_step=0, num_steps=10**5, config=config)
"""
TINY = [
    "--config=gpt_tiny", "--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=2", "--model.mlp_dim=64",
    "--model.vocab_size=128", "--data.source=mock", "--data.text=", "--data.tokenizer=null:127",
    "--training.sequence_length=32", "--training.global_batch_size=8",
    "--training.log_every_steps=1", "--training.eval_every_steps=0", "--training.sample_prompt=",
    "--checkpoint.every_steps=0", "--optimizer.name=adamw", "--optimizer.learning_rate=3e-3",
    "--optimizer.warmup_steps=2", "--logging.tensorboard=False",
]  # fmt: skip
# So long that it is never finished before a signal; the learning rate is the same whatever the length.
ENDLESS = ["--training.steps=100000", "--optimizer.schedule=constant"]
# What runs of two processes and of one are compared by.
STEPS = 12
END = f"--launch.exit_at_step={STEPS}"
EVALUATE = ["--training.eval_every_steps=4", "--training.eval_steps=2"]
MESH = ["--mesh.data=2", "--mesh.fsdp=2"]
TWO = dict(num_processes=2, devices_each=2)
# train.py whose supervisor pauses for half a second before it starts a run again.
RESTARTS_AT_ONCE = """
import sys
from megajax.cli import train
from megajax.training.faults import supervisor
from megajax.training.reporting.console import log_to_stderr
supervisor.FIRST_WAIT_SECONDS = 0.5
log_to_stderr()
train.main(sys.argv[1:])
"""


def tiny_config(run_dir: Path, *overrides: str) -> Config:
    """What train.py makes of TINY and these arguments."""
    config = override(configs.recipe("gpt_tiny"), [*TINY[1:], *overrides])
    data = dataclasses.replace(config.data, cache_dir=str(run_dir.parent / "cache"))
    return dataclasses.replace(config, run_dir=str(run_dir), data=data)


class Process:
    """One python train.py with virtual CPU devices, its output in a file."""

    def __init__(self, run_dir: Path, log: Path, num_devices: int, variables: dict[str, str], arguments: list[str]):
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "MASTER_ADDR")}
        environment |= variables | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        # The flags of tests/conftest.py.
        environment["XLA_FLAGS"] = re.sub(r"(device_count)=\d+", rf"\1={num_devices}", os.environ["XLA_FLAGS"])
        cache = f"--data.cache_dir={run_dir.parent / 'cache'}"
        program = ["-c", RESTARTS_AT_ONCE] if supervised(arguments) and "RANK" not in variables else [ROOT / "train.py"]
        command = [sys.executable, *program, *TINY, f"--run_dir={run_dir}", cache, *arguments]
        self._log = log
        with log.open("w") as file:
            self.popen = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)

    @property
    def child(self) -> int:
        """The process that a supervisor has started."""
        (child,) = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(child)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """-> exit code. Fails the test after TIMEOUT_SECONDS."""
        try:
            return self.popen.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {TIMEOUT_SECONDS} s:\n{self.output}") from None

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        """Until metrics.jsonl shows that the step is done."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while not any(line["step"] >= step for line in metrics(run_dir)):
            assert time.monotonic() < end and self.popen.poll() is None, self.output
            time.sleep(0.05)


def supervised(arguments: Iterable[str]) -> bool:
    return any(argument.startswith("--launch.max_restarts") for argument in arguments)


@contextmanager
def started(run_dir: Path, *arguments: str, num_processes: int = 1, devices_each: int = 1) -> Iterator[list[Process]]:
    """The processes of one run, as torchrun would start them; killed on the way out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    try:
        for rank in range(num_processes):
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            world = {"RANK": str(rank), "WORLD_SIZE": str(num_processes)}
            log = run_dir.parent / f"{run_dir.name}.{rank}.log"
            variables = address | world if num_processes > 1 else {}
            processes.append(Process(run_dir, log, devices_each, variables, list(arguments)))
        yield processes
    finally:
        for process in processes:
            if supervised(arguments):
                process.popen.terminate()  # a supervisor that is killed leaves the run behind
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(120)
            process.popen.kill()
            process.popen.wait()


def run(run_dir: Path, *arguments: str, num_processes: int = 1, devices_each: int = 1) -> str:
    """Runs to the end -> what process 0 printed. Fails unless every process exits with 0."""
    with started(run_dir, *arguments, num_processes=num_processes, devices_each=devices_each) as processes:
        for process in processes:
            code = process.wait()
            assert code == 0, process.output
        return processes[0].output


def metrics(run_dir: Path) -> list[dict]:
    """Whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss; fails if a step has two lines."""
    lines = [line for line in metrics(run_dir) if "loss" in line]
    found = {line["step"]: line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found


def evaluations(run_dir: Path) -> dict[int, float]:
    """Step -> loss of the evaluation."""
    return {line["step"]: line["eval_loss"] for line in metrics(run_dir) if "eval_loss" in line}


def assert_close(got: dict[int, float], want: dict[int, float]) -> None:
    """The same steps, and their losses but for rounding: float32 sums of the same numbers in another order."""
    assert list(got) == list(want)
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-5)


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
