"""Maps each instruction of a compiled program to the function of megajax that it comes from.

XLA records a stack frame for each instruction (`stack_frame_id` in its metadata) and prints the tables of files,
functions, locations and frames above the program. A fusion has the frame of its root, or of the kernel in it.
"""

import dataclasses
import re

from benchmarks.hlo import Instruction, Program

_TABLE = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
_OURS = re.compile(r".*/((?:megajax|pallas_kernels)/.*\.py)$")
# Skipped in favour of their callers, which are more informative.
PASSED_THROUGH = (
    "megajax/ops/matmul.py",
    "megajax/ops/mailboxes.py",
    "megajax/mesh/sharding.py",
    "megajax/mesh/compat.py",
)


@dataclasses.dataclass(frozen=True)
class Place:
    file: str
    """For example megajax/layers/feed_forward/mlp.py."""
    function: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.file} {self.function}{', backward' if self.backward else ''}"


def places(text: str) -> dict[str, Place]:
    """text: from `jax.stages.Compiled.as_text()` -> {name of a launched instruction: its innermost Place}."""
    frames = _frames(text)
    program = Program(text)
    found = {}
    for instruction in program.instructions():
        if place := _place(frames, _recorded(program, instruction)):
            found[instruction.name] = place
    return found


def _recorded(program: Program, instruction: Instruction) -> Instruction:
    """The instruction that has the frame. A fusion of a kernel (a library's or Pallas's) with the slices that it reads
    has none of its own: then the kernel."""
    if "stack_frame_id=" in instruction.attributes:
        return instruction
    inside = (inner for name in instruction.called for inner in program.computations.get(name, ()))
    return next((inner for inner in inside if inner.opcode == "custom-call"), instruction)


def _place(frames: dict[str, tuple[str, str, str]], instruction: Instruction) -> Place | None:
    frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    place = frame and _innermost(frames, frame[1])
    return Place(*place, backward=name is not None and "transpose(" in name[1]) if place else None


def _innermost(frames: dict[str, tuple[str, str, str]], number: str) -> tuple[str, str] | None:
    """-> (file, function) of the innermost frame in megajax that is not in PASSED_THROUGH."""
    seen = set()
    while number in frames and number not in seen:
        seen.add(number)
        file, function, parent = frames[number]
        ours = _OURS.match(file)
        if ours and ours[1] not in PASSED_THROUGH:
            return ours[1], function.split(".")[-1]
        number = parent
    return None


def _frames(text: str) -> dict[str, tuple[str, str, str]]:
    """{frame number: (file, function, number of the calling frame)}; empty if the text has no tables."""
    tables: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables[line] = {}
        elif found := _TABLE.match(line):
            rows[found[1]] = found[2] if found[2] is not None else found[3]
        elif line.startswith(("%", "ENTRY")):
            break
    locations = {number: _fields(row) for number, row in tables.get("FileLocations", {}).items()}
    rows = {number: _fields(row) for number, row in tables.get("StackFrames", {}).items()}
    # jaxlib 0.10.2 prints the number of the caller plus one: the first frame, which has no caller, has 1, not 0.
    offset = int(rows["1"].get("parent_frame_id", 0)) if "1" in rows else 0
    frames = {}
    for number, frame in rows.items():
        location = locations.get(frame.get("file_location_id", ""), {})
        file = tables["FileNames"].get(location.get("file_name_id", ""), "")
        function = tables["FunctionNames"].get(location.get("function_name_id", ""), "")
        frames[number] = (file, function, str(int(frame.get("parent_frame_id", 0)) - offset))
    return frames


def _fields(row: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", row))
