"""Parses the text of a compiled program: the instructions of each computation, in execution order.

XLA prints one instruction per line, `%name = shape opcode(%operand, ...), attribute=value, ...`, and with
`is_scheduled=true` the lines of a computation are its schedule (https://openxla.org/xla/hlo_dumps).
"""

import dataclasses
import re
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
ITEM_BITS = {"pred": 8, "bf16": 16, "token": 0}  # elsewhere the digits of the name say it: f32, s8, f8e4m3fn

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(, .*)?$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of the result, including all parts of a tuple."""
        return shape_bytes(self.shape)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        return tuple(re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(self.attributes))))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one computation; start and end are line numbers in it, equal if it is not asynchronous."""

    kind: str
    operands: tuple[Instruction, ...]
    bytes: int
    """The larger of input and output, per device."""
    start: int
    end: int


class Program:
    def __init__(self, text: str):
        """text: from `jax.stages.Compiled.as_text()`."""
        self.scheduled = "is_scheduled=true" in text.split("\n", 1)[0]
        self.computations: dict[str, list[Instruction]] = {}
        lines: list[Instruction] = []
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                lines = self.computations[head[2]] = []
                if head[1]:
                    self.entry = head[2]
            elif found := _INSTRUCTION.match(line):
                name, shape, opcode, operands, attributes = found.groups()
                lines.append(
                    Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", operands)), attributes or "")
                )

    def run_computations(self) -> list[str]:
        """Computations whose instructions are launched one by one: the entry, loop bodies, and what these call."""
        found = []
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found.append(name)
            for instruction in self.computations[name]:
                if instruction.opcode in ("while", "call", "conditional"):
                    waiting += instruction.called
        return found

    def instructions(self) -> Iterator[Instruction]:
        """Everything that is launched; the body of a loop counts once."""
        for name in self.run_computations():
            yield from self.computations[name]

    def collectives(self, computation: str) -> list[Collective]:
        lines = self.computations[computation]
        by_name = {line.name: line for line in lines}
        ends = {operand: number for number, line in enumerate(lines) for operand in line.operands
                if line.opcode.endswith("-done")}  # fmt: skip
        found = []
        for number, line in enumerate(lines):
            kind = self._collective_kind(line)
            if kind:
                operands = tuple(by_name[name] for name in line.operands if name in by_name)
                end = ends.get(line.name, number)
                size = max(sum(operand.bytes for operand in operands), lines[end].bytes)
                found.append(Collective(kind, operands, size, number, end))
        return found

    def _collective_kind(self, line: Instruction) -> str | None:
        if line.opcode == "async-start":  # the collective is wrapped in a computation of its own
            inside = (self._collective_kind(inner) for name in line.called for inner in self.computations[name])
            return next(filter(None, inside), None)
        kind = line.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def matmuls_under(self, computation: str, collective: Collective) -> list[Instruction]:
        """The matmuls that run while the collective is in flight."""
        lines = self.computations[computation][collective.start + 1 : collective.end]
        return [line for line in lines if self.multiplies(line)]

    def multiplies(self, line: Instruction) -> bool:
        """Whether the instruction is a matmul or an attention kernel, or a loop or call around one."""
        if line.opcode == "custom-call":
            return re.search(r'custom_call_target="__(cublas|cudnn)', line.attributes) is not None
        return line.opcode == "dot" or any(
            self.multiplies(inner) for name in line.called for inner in self.computations[name]
        )


def shape_bytes(shape: str) -> int:
    """'(bf16[8,128]{1,0}, s32[])' -> 2052."""
    total = 0
    for kind, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape):
        bits = ITEM_BITS.get(kind) if kind in ITEM_BITS else int(re.search(r"\d+", kind)[0])
        size = 1
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size * bits // 8
    return total
