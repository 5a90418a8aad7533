"""Where the time of a step goes: python -m benchmarks.profile FOLDER [--num_steps=1]

Reads a profile that jax.profiler (or --launch.profile_steps) wrote and sums the GPU kernels of the first GPU by kind
and by name. `python -m benchmarks.train_step --profile` writes one and has the compiled program as well: each kernel
carries the name of its instruction, and the program shows which function of megajax that comes from
(benchmarks/places.py).
"""

import contextlib
import dataclasses
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from benchmarks.command_line import run, split
from benchmarks.places import Place, places

COMMUNICATION = "communication"
# The first pattern found in the names of kernel and instruction decides; the remaining kernels are decided by place.
KINDS_BY_NAME = (
    (COMMUNICATION, r"nccl|all-(gather|reduce|to-all)|reduce-scatter|collective-|AllReduce|ragged"),
    ("attention", r"sdpa|fmha|flash|dot_product_attention|dot_do_o|convert_dq"),
    ("matmul", r"nvjet|gemm|cublas|cutlass|xmma|splitK"),
)
KINDS_BY_PLACE = (
    ("attention", r"/flash_attention/|ops/attention(_backends)?\.py"),
    ("norm", r"/norm\.py"),
    ("optimizer", r"^megajax/optim/"),
    ("cross-entropy", r"/cross_entropy\.py"),
    ("embedding", r"/embedding\.py"),
)
KINDS_OF_THE_REST = (
    ("Pallas", r"mosaic|mpmd_map"),  # attention or norm; only the program shows which
    ("copy", r"memcpy|memset|copy|slice|concatenate|transpose|broadcast"),
    ("reduction", r"reduce"),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    instruction: str
    """Name of the instruction in the program, "" if the profile does not have it."""
    start: float
    end: float
    """Nanoseconds."""


def read_kernels(folder: str | Path) -> list[Kernel]:
    """All kernels and copies on the first GPU. Raises ValueError if the folder holds no profile of one."""
    path = next(Path(folder).rglob("*.xplane.pb"), None)
    data = jax.profiler.ProfileData.from_file(str(path)) if path else None
    plane = next((p for p in data.planes if re.search(r"GPU:0$", p.name, re.IGNORECASE)), None) if data else None
    if plane is None:
        raise ValueError(f"{folder}: no profile of a GPU is there; write one with --launch.profile_steps=10,12")
    kernels = []
    for line in plane.lines:
        if "stream" not in line.name.lower():  # other lines summarise the streams
            continue
        for event in line.events:
            instruction = str(dict(event.stats).get("hlo_op", ""))
            kernels.append(Kernel(event.name, instruction, event.start_ns, event.start_ns + event.duration_ns))
    return kernels


@contextlib.contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """Profiles the block, which must wait for its results -> a list that holds the kernels of read_kernels after it."""
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield kernels
        kernels += read_kernels(folder)


def kind_of(kernel: Kernel, place: Place | None) -> str:
    names = f"{kernel.name} {kernel.instruction}"
    file = place.file if place else ""
    searches = ((KINDS_BY_NAME, names), (KINDS_BY_PLACE, file), (KINDS_OF_THE_REST, names))
    found = (kind for table, text in searches for kind, pattern in table if re.search(pattern, text, re.IGNORECASE))
    return next(found, "element-wise")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def breakdown(kernels: list[Kernel], num_steps: int, program: str = "") -> dict:
    """Milliseconds per step. program: text of the compiled step, for the places; "" if unknown.

    Kernels on several streams overlap, so kinds may add up to more than the step. Communication is exposed while
    nothing else runs.
    """
    known = places(program) if program else {}
    kinds = Counter()
    where = Counter()
    names = Counter()
    calls = Counter()
    intervals = {COMMUNICATION: [], "else": []}

    def per_step(nanoseconds: float) -> float:
        """Milliseconds per step."""
        return nanoseconds / 1e6 / num_steps

    for kernel in kernels:
        place = known.get(kernel.instruction)
        kind = kind_of(kernel, place)
        name = re.sub(r"[._]?\d+$", "", kernel.name)
        time = per_step(kernel.end - kernel.start)
        kinds[kind] += time
        where[kind, str(place or "")] += time
        names[name] += time
        calls[name] += 1
        intervals[kind if kind == COMMUNICATION else "else"].append((kernel.start, kernel.end))
    both = [interval for some in intervals.values() for interval in some]
    span = max(end for _, end in both) - min(start for start, _ in both) if both else 0.0
    communicating = covered(intervals[COMMUNICATION])
    computing = covered(intervals["else"])
    busy = covered(both)
    return {
        "step": per_step(span),
        "idle": per_step(span - busy),
        "communication": {"exposed": per_step(busy - computing), "hidden": per_step(communicating + computing - busy)},
        "kinds": dict(kinds.most_common()),
        "places": [{"kind": kind, "place": place, "time": time} for (kind, place), time in where.most_common()],
        "kernels": [{"name": name, "time": time, "calls": calls[name] / num_steps}
                    for name, time in names.most_common()],
        "with_place": sum(time for (_, place), time in where.items() if place) / (sum(where.values()) or 1.0),
    }  # fmt: skip


def as_text(found: dict, most: int = 25) -> str:
    step = found["step"]
    communication = found["communication"]
    lines = [f"one step: {step:.1f} ms, idle {found['idle']:.2f} ms (under the profiler; streams may overlap)"]
    lines += [f"  {time:8.2f} ms  {time / step:6.1%}  {kind}" for kind, time in found["kinds"].items()]
    if any(communication.values()):
        lines.append(f"communication: {communication['exposed']:.2f} ms exposed, {communication['hidden']:.2f} hidden")
    if found["with_place"]:
        lines.append(f"by place ({found['with_place']:.0%} of the time has one):")
        lines += [f"  {row['time']:8.2f} ms  {row['kind']:<13}  {row['place']}" for row in found["places"][:most]]
    lines.append("by kernel:")
    lines += [f"  {row['time']:8.2f} ms  x{row['calls']:6.1f}  {row['name'][:100]}" for row in found["kernels"][:most]]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    values, folders = split(arguments, {"num_steps": "1"})
    if len(folders) != 1:
        raise ValueError("give one folder that holds a profile: python -m benchmarks.profile runs/NAME/profile")
    print(as_text(breakdown(read_kernels(folders[0]), num_steps=int(values["num_steps"]))))


if __name__ == "__main__":
    run(main)
