"""How a model runs: loops, recomputation, which attention. None of it changes what the model is, so that a run may
resume with other values, and every family takes the same ones."""

import dataclasses
from typing import Annotated, Literal

from megajax.mesh import MeshConfig
from megajax.ops.attention import Backend
from megajax.parallel.context import ContextMethod
from megajax.parallel.expert import Dispatch
from megajax.ranges import PositiveInt, Range

MAX_UNROLLED_LAYERS = 40  # beyond this, compile time grows more than the step shrinks

Recompute = Literal["none", "selective", "full"]


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    scan_layers: bool | None = None
    """Compile one layer and loop (fast compile) or all layers (fast step); None = loop beyond 40 layers, and
    with offload, which needs it."""
    recompute: Recompute = "none"
    """What the backward pass computes again: nothing, the modules of recompute_modules (selective), or whole layers."""
    recompute_modules: tuple[str, ...] = ("norm", "activation")
    """With recompute=selective: modules of the layers; those of a transformer layer are norm, qkv, core_attention,
    attention, activation and mlp, with experts also dispatch (docs/memory.md)."""
    recompute_every: PositiveInt = 1
    """Of each n consecutive layers the first is recomputed, the others are not."""
    offload: tuple[str, ...] = ()
    """Activations of the layers kept in host memory between forward and backward pass; those of a transformer layer
    are residual, normed, qkv, attention_out, residual_mid, mlp_wide and mlp_hidden, with experts also routing and
    expert_rows (docs/memory.md)."""
    attention_backend: Backend = "auto"
    """cudnn, pallas (pallas_kernels/flash_attention) or reference, where it can do what is asked; auto: the fastest
    that was measured. The log says which one it is."""
    context_attention: ContextMethod = "ring"
    """Where mesh.context splits the sequence: keys and values in a ring, gathered (all_gather), or the heads split
    instead (all_to_all)."""
    expert_dispatch: Dispatch = "auto"
    """Where mesh.expert splits the experts of a layer: what tokens travel in, all_to_all or all_gather; auto: by size.
    The log says which one it is."""
    expert_buffer: Annotated[float, Range(at_least=1)] = 1.5
    """With all_to_all: room for the rows that go from one device to another, over an even load. What does not fit goes
    in further rounds, so more room costs memory and less costs time; the result is the same."""
    deterministic: bool = False
    """On a GPU too, a step gives the same bits each time, after a restart as well; it takes longer, and several GPUs
    were not tried (docs/reliability.md). On CPU this is always so."""
    compiler_options: str = ""
    """XLA options of the train step beside or instead of the chosen ones: "xla_gpu_a=1 xla_gpu_b=x,y"."""

    def scans(self, num_layers: int) -> bool:
        """Whether a stack of so many layers runs as a loop."""
        if self.scan_layers is not None:
            return self.scan_layers
        return num_layers > MAX_UNROLLED_LAYERS or bool(self.offload)

    def recompute_of(self, number: int) -> Recompute:
        """Of the layer with this number."""
        return self.recompute if number % self.recompute_every == 0 else "none"

    def check(self, mesh: MeshConfig) -> None:
        """Raises ValueError for what contradicts itself or the mesh."""
        if self.offload and self.scan_layers is False:
            raise ValueError(
                f"execution.offload={','.join(self.offload)} needs layers that run as a loop, whose turns wait for "
                "their copies: leave out --execution.scan_layers=False"
            )
        if self.recompute == "selective" and not self.recompute_modules:
            raise ValueError(
                "execution.recompute=selective with no execution.recompute_modules computes nothing again; "
                "name some, or use --execution.recompute=none"
            )
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(
                f"execution.recompute_every={self.recompute_every} needs something to recompute: set "
                "--execution.recompute=full or selective, or leave it out"
            )
        if mesh.pipeline > 1 and self.scan_layers:
            raise ValueError(
                "execution.scan_layers=True: the layers of a stage of a pipeline run one after the other, the loop is "
                "over microbatches; leave it out"
            )
        if mesh.pipeline > 1 and self.offload:
            raise ValueError(
                f"execution.offload={','.join(self.offload)} is not supported with a pipeline; use "
                "--execution.recompute=full"
            )

    def check_names(self, modules: tuple[str, ...], activations: tuple[str, ...]) -> None:
        """Raises ValueError for names that the layers of a model do not have."""
        recomputed = self.recompute_modules if self.recompute == "selective" else ()
        for name, words, known in (("recompute_modules", recomputed, modules), ("offload", self.offload, activations)):
            for word in words:
                if word not in known:
                    raise ValueError(
                        f"execution.{name}: {word!r} is unknown; the layers of this model have "
                        f"{', '.join(known) or 'none'}"
                    )
