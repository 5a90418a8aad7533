"""A plan as an object, for notebooks."""

import dataclasses
import html

from megajax.mesh.allocators import USABLE_MEMORY
from megajax.mesh.devices import Device
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import plan_rows
from megajax.training.config import TrainingConfig
from megajax.training.program import Program


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and speed of a run; print it, or draw its memory with megajax.figures.memory."""

    title: str
    rows: list[tuple[str, str]]
    """(name, value), as --plan prints them."""
    memory_bytes: dict[str, int]
    """Memory per device, by use."""
    usable_bytes: int
    """Usable memory per device."""

    @staticmethod
    def of(title: str, program: Program, training: TrainingConfig, gpu: Device) -> "Plan":
        """Without compiling anything; activations are estimated."""
        memory, _ = memory_per_device(program, training)
        rows = plan_rows(program, training, gpu, compiles=False)
        return Plan(title, rows, memory, usable_bytes=int(USABLE_MEMORY * gpu.memory_bytes))

    @property
    def fits(self) -> bool:
        return dict(self.rows)["verdict"].startswith("fits")

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join([self.title, *(f"  {name:<{width}}  {value}" for name, value in self.rows)])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self.rows
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"
