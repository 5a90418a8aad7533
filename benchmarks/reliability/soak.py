"""Compares a run that is killed repeatedly with one that is not:

    python -m benchmarks.reliability.soak [--minutes=20] [--config=gpt_tiny] [--kill_seconds=20,60] [--output=FILE]

Trains a very small model, made of gpt_tiny or moe_tiny, on the CPU under the supervisor (launch.max_restarts) and kills
the training process with SIGKILL, 20 to 60 s after it has started to train, until `minutes` have passed; then trains
the same undisturbed. Every loss and every digest of the last checkpoint must be the same, bit for bit; otherwise the
exit status is 1. Also recorded: kills, and how many of them hit a save; repeated steps; goodput; resident memory and
open files of the processes.
"""

import datetime
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import only, run
from benchmarks.records import ROOT, commit, save

MODEL = (
    "--data.source=mock", "--data.text=", "--data.tokenizer=null:511", 
    "--model.num_layers=4", "--model.embed_dim=64", "--model.num_heads=4", "--model.mlp_dim=256",
    "--model.vocab_size=512", "--model.dropout=0.1", "--training.sequence_length=128", "--mesh.data=1",
    "--training.global_batch_size=8", "--training.log_every_steps=1", "--training.eval_every_steps=0",
    "--training.sample_prompt=", "--optimizer.schedule=constant", "--checkpoint.every_steps=20",
    "--logging.tensorboard=False",
)  # fmt: skip
SPEED_STEPS = 400
# Share of the minutes; the rest is spent on starts, waits between them and repeated steps.
TRAINING_SHARE = 0.6


def command(recipe: str, run_dir: Path, steps: int, *more: str) -> list[str]:
    where = (f"--run_dir={run_dir}", f"--data.cache_dir={run_dir.parent / 'cache'}", f"--training.steps={steps}")
    return [sys.executable, str(ROOT / "train.py"), f"--config={recipe}", *MODEL, *where, *more]


def start(words: list[str], log: Path) -> subprocess.Popen:
    with log.open("a") as file:
        return subprocess.Popen(
            words, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=file, stderr=subprocess.STDOUT
        )


def metrics(run_dir: Path) -> list[dict]:
    """The complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def usage(pid: int) -> dict[str, int] | None:
    """Resident bytes and open files of a process; None if it is gone."""
    try:
        kibibytes = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return {"resident_bytes": 1024 * int(kibibytes[1]), "open_files": len(os.listdir(f"/proc/{pid}/fd"))}
    except (OSError, TypeError):  # TypeError: it has died and has no memory any more
        return None


def child_of(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


class Sampler:
    """The usage of each process over time, from the first step after its start."""

    def __init__(self):
        self.samples: dict[int, list[dict]] = {}

    def look(self, pid: int) -> None:
        if found := usage(pid):
            self.samples.setdefault(pid, []).append(found)

    def summary(self, pid: int) -> dict[str, list[int]]:
        """Usage of a process at ten times, evenly spaced from its first step on."""
        found = self.samples.get(pid, [])
        spread = [found[len(found) * tenth // 10] for tenth in range(10)] if found else []
        return {name: [sample[name] for sample in spread] for name in ("resident_bytes", "open_files")}


def disturb(
    recipe: str, run_dir: Path, steps: int, seconds: float, kill_seconds: tuple[float, float], rng: random.Random
) -> dict:
    """Trains under the supervisor with kills for `seconds` -> what happened."""
    log = run_dir.with_suffix(".log")
    sampler = Sampler()
    kills = []
    begin = time.monotonic()
    highest = 0
    supervisor = start(command(recipe, run_dir, steps, "--launch.max_restarts=100000"), log)
    try:
        while supervisor.poll() is None and time.monotonic() - begin < seconds:
            child = _until_it_trains(supervisor, run_dir, highest)
            end = time.monotonic() + rng.uniform(*kill_seconds)
            while supervisor.poll() is None and time.monotonic() < end:
                sampler.look(supervisor.pid)
                sampler.look(child)
                time.sleep(1)
            if supervisor.poll() is not None or time.monotonic() - begin >= seconds:
                break
            # Half of the kills wait for a save to begin.
            saving = _wait_for_save(run_dir, seconds=5) if rng.random() < 0.5 else False
            os.kill(child, signal.SIGKILL)
            highest = max(line["step"] for line in metrics(run_dir))
            kills.append({"after_seconds": round(time.monotonic() - begin, 1), "step": highest, "while_saving": saving})
            print(f"killed after step {highest} of {steps}{', while it saved' if saving else ''}", flush=True)
        status = supervisor.wait()
    finally:
        supervisor.kill()
    text = log.read_text(errors="replace")
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "exit_status": status,
        "kills": kills,
        "restarts": len(re.findall(r"start \d+ of \d+ in", text)),
        "steps_done_again": sum(died - resumed for died, resumed in resumptions(text) if resumed is not None),
        "goodput": metrics(run_dir)[-1].get("goodput"),
        "supervisor": sampler.summary(supervisor.pid),
        "last_child": sampler.summary(next((pid for pid in reversed(sampler.samples) if pid != supervisor.pid), 0)),
    }


def resumptions(log: str) -> list[tuple[int, int | None]]:
    """(step after which the run died, step from which the next start resumed, None if it did not get that far) of each
    death."""
    pieces = re.split(r"the run ended with .* after step (\d+)", log)
    found = []
    for died, after in zip(pieces[1::2], pieces[2::2], strict=True):
        resumed = re.search(r"resuming from step (\d+)", after)
        found.append((int(died), int(resumed[1]) if resumed else None))
    return found


def _until_it_trains(supervisor: subprocess.Popen, run_dir: Path, highest: int) -> int:
    """Waits for a step that had not been reached before, or for the end -> the process that trains.

    A kill before that would count towards a crash loop.
    """
    while supervisor.poll() is None:
        child = child_of(supervisor.pid)
        if child and any(line["step"] > highest for line in metrics(run_dir)):
            return child
        time.sleep(1)
    return 0


def _wait_for_save(run_dir: Path, seconds: float) -> bool:
    """Waits until a save is in progress, at most `seconds` -> whether one is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp")):
            return True
        time.sleep(0.001)
    return False


def train_undisturbed(recipe: str, run_dir: Path, steps: int) -> dict:
    sampler = Sampler()
    begin = time.monotonic()
    log = run_dir.with_suffix(".log")
    process = start(command(recipe, run_dir, steps), log)
    try:
        while not metrics(run_dir) and process.poll() is None:
            time.sleep(0.2)
        while process.poll() is None:
            sampler.look(process.pid)
            time.sleep(1)
    finally:
        process.kill()
    if process.wait():
        raise RuntimeError(f"the undisturbed run failed: {log.read_text(errors='replace')[-2000:]}")
    seconds = round(time.monotonic() - begin, 1)
    return {"seconds": seconds, "goodput": metrics(run_dir)[-1].get("goodput"), "process": sampler.summary(process.pid)}


def losses(run_dir: Path) -> dict[int, str]:
    return {line["step"]: float(line["loss"]).hex() for line in metrics(run_dir) if line.get("loss") is not None}


def last_digests(run_dir: Path, steps: int) -> dict:
    """{item: {array: [dtype, digest]}} of parameters and optimizer state (checkpoint/verify.py)."""
    return json.loads((run_dir / "checkpoints" / str(steps) / "meta" / "metadata").read_text())["digests"]


def compare(disturbed: Path, undisturbed: Path, steps: int) -> dict:
    got = losses(disturbed)
    want = losses(undisturbed)
    return {
        "steps": steps,
        "equal_losses": sum(got.get(step) == loss for step, loss in want.items()),
        "steps_with_other_losses": [step for step in range(1, steps + 1) if got.get(step) != want.get(step)][:20],
        "equal_digests": last_digests(disturbed, steps) == last_digests(undisturbed, steps),
        "arrays": sum(len(arrays) for arrays in last_digests(undisturbed, steps).values()),
    }


def measure_speed(recipe: str, run_dir: Path) -> float:
    """Seconds per step: the median of a short run."""
    train_undisturbed(recipe, run_dir, SPEED_STEPS)
    return statistics.median(line["step_seconds"] for line in metrics(run_dir) if "step_seconds" in line)


def measure(values: dict[str, str]) -> dict:
    import jax

    recipe = values["config"]
    seconds = 60 * float(values["minutes"])
    (first, last) = map(float, values["kill_seconds"].split(","))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step_seconds = measure_speed(recipe, folder / "speed")
        steps = max(int(TRAINING_SHARE * seconds / step_seconds), SPEED_STEPS)
        print(f"{1000 * step_seconds:.1f} ms per step: {steps} steps", flush=True)
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.reliability.soak", *sys.argv[1:]]),
            "arguments": list(MODEL),
            "device": "cpu",
            "versions": {"jax": jax.__version__},
            "date": datetime.date.today().isoformat(),
            "commit": values["commit"] or commit(),
            "step_seconds": step_seconds,
        }
        result["disturbed"] = disturb(
            recipe, folder / "disturbed", steps, seconds, (first, last), random.Random(int(values["seed"]))
        )
        save(values["output"], result)
        print(f"{len(result['disturbed']['kills'])} kills; now undisturbed", flush=True)
        result["undisturbed"] = train_undisturbed(recipe, folder / "undisturbed", steps)
        result["comparison"] = compare(folder / "disturbed", folder / "undisturbed", steps)
    save(values["output"], result)
    return result


def main(arguments: list[str]) -> int:
    options = {
        "minutes": "20", "config": "gpt_tiny", "kill_seconds": "20,60", "seed": "0", "output": "", "commit": "",
    }  # fmt: skip
    result = measure(only(arguments, options))
    found = result["comparison"]
    equal = found["equal_losses"] == found["steps"] and found["equal_digests"]
    print(json.dumps(result | {"arguments": None}, indent=1))
    equal = equal and result["disturbed"]["exit_status"] == 0
    print("bit-equal" if equal else "NOT equal")
    return 0 if equal else 1


if __name__ == "__main__":
    run(main)
