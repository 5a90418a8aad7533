"""Starts train.py as real processes on a very small model, and ends them whatever happens."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120
TINY = [
    "--config=gpt_tiny", "--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=2", "--model.mlp_dim=64",
    "--model.vocab_size=128", "--data.source=mock", "--data.text=", "--data.tokenizer=null:127",
    "--data.num_threads=1", "--training.sequence_length=32", "--training.global_batch_size=8",
    "--training.log_every_steps=1", "--training.eval_every_steps=0", "--training.sample_prompt=",
    "--checkpoint.every_steps=0", "--optimizer.warmup_steps=2", "--logging.tensorboard=False",
]  # fmt: skip


class Process:
    """One python train.py with 2 or 4 virtual CPU devices, its output in a file."""

    def __init__(self, run_dir: Path, log: Path, num_devices: int, variables: dict[str, str], arguments: list[str]):
        environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "MASTER_ADDR")}
        environment |= variables | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        # Compiling is what these processes spend their time on: the code need not be fast.
        devices = f"--xla_force_host_platform_device_count={num_devices}"
        environment["XLA_FLAGS"] = f"{devices} --xla_backend_optimization_level=0"
        cache = f"--data.cache_dir={run_dir.parent / 'cache'}"
        command = [sys.executable, ROOT / "train.py", *TINY, f"--run_dir={run_dir}", cache, *arguments]
        self._log = log
        with log.open("w") as file:
            self.popen = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

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
            if any(argument.startswith("--training.max_restarts") for argument in arguments):
                process.popen.terminate()  # a supervisor that is killed leaves the run behind
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(20)
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


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
