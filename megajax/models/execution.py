"""How a model is executed: loops, recomputation, attention backend. These settings do not change what the model is, so
a run may resume with other values, and they are the same for every family."""

import dataclasses
from typing import Annotated, Literal

from megajax.fields.ranges import PositiveInt, Range
from megajax.mesh.config import MeshConfig
from megajax.ops import transformer_engine
from megajax.ops.attention_backends import BackendName
from megajax.parallel.context import ContextMethod
from megajax.parallel.expert import Dispatch

MAX_UNROLLED_LAYERS = 40  # beyond this, unrolling costs more compile time than it saves step time

Recompute = Literal["none", "selective", "full"]
SELECTIVE = ("norm", "activation")


@dataclasses.dataclass(frozen=True)
class ExecutionConfig:
    scan_layers: bool | None = None
    """Run the layers as a loop (compiles faster) or unroll them (runs faster); None: loop beyond 40 layers and with
    offload, which needs it."""
    recompute: str = "none"
    """What the backward pass recomputes: none, full (whole layers), or modules, as in norm,mlp; selective is
    norm,activation. A transformer layer has norm, qkv, core_attention, attention, activation and mlp, one with experts
    also dispatch (docs/memory.md)."""
    recompute_every: PositiveInt = 1
    """Recompute only every n-th layer."""
    offload: tuple[str, ...] = ()
    """Activations to keep in host memory between forward and backward pass; a transformer layer has residual, normed,
    qkv, attention_out, residual_mid, mlp_wide and mlp_hidden, one with experts also routing and expert_rows,
    with latent attention also latents, with cross-attention also residual_cross (docs/memory.md)."""
    attention_backend: BackendName = "auto"
    """cudnn, pallas (pallas_kernels/flash_attention), transformer_engine (if it is installed; docs/low_precision.md) or
    reference, where it supports the model; auto: the fastest as measured. The log says which one is used."""
    context_attention: ContextMethod = "ring"
    """Attention when mesh.context splits the sequence: pass keys and values around a ring, gather them (all_gather), or
    split the heads instead (all_to_all)."""
    expert_dispatch: Dispatch = "auto"
    """How tokens get to experts when mesh.expert splits them: all_to_all or all_gather; auto: the one that sends less.
    The log says which one is used."""
    expert_buffer: Annotated[float, Range(at_least=1, at_most=1e6)] = 1.5
    """Buffer size relative to an even load. Tokens for which there is no room are sent in further
    rounds, so a larger buffer costs memory and a smaller one time; results are the same."""
    deterministic: bool = False
    """Make steps bitwise reproducible on a GPU too, also after a restart; slower, and not tried on several GPUs
    (docs/reliability.md). On CPU they always are."""
    compiler_options: str = ""
    """XLA options of the train step, added to or replacing the defaults: "xla_gpu_a=1 xla_gpu_b=x,y"."""

    @property
    def of_attention(self) -> dict:
        """The fields of an AttentionConfig that say how it is executed."""
        return dict(context=self.context_attention, backend=self.attention_backend, deterministic=self.deterministic)

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """The modules to recompute where `recompute_of` is selective."""
        return SELECTIVE if self.recompute == "selective" else tuple(self.recompute.split(","))

    def scans(self, num_layers: int) -> bool:
        """Whether a stack of this many layers runs as a loop."""
        if self.scan_layers is not None:
            return self.scan_layers
        return num_layers > MAX_UNROLLED_LAYERS or bool(self.offload)

    def recompute_of(self, number: int) -> Recompute:
        """The policy of the layer with this number."""
        policy = self.recompute if self.recompute in ("none", "full") else "selective"
        return policy if number % self.recompute_every == 0 else "none"

    def check(self, mesh: MeshConfig) -> None:
        """Raises ValueError for fields that contradict each other or the mesh."""
        if self.offload and self.scan_layers is False:
            raise ValueError(
                f"execution.offload={','.join(self.offload)} needs layers that run as a loop, in which each "
                "layer waits for its copies: remove --execution.scan_layers=False"
            )
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(
                f"execution.recompute_every={self.recompute_every} has no effect without recomputation: set "
                "--execution.recompute=full or selective, or remove it"
            )
        if self.attention_backend == "transformer_engine" and (problem := transformer_engine.problem()):
            raise ValueError(
                f"execution.attention_backend=transformer_engine: {problem}; install it (docs/low_precision.md), or "
                "use --execution.attention_backend=auto"
            )
        if self.attention_backend == "transformer_engine" and mesh.context > 1:
            raise ValueError(
                f"execution.attention_backend=transformer_engine with mesh.context={mesh.context}: attention to parts "
                "of a sequence needs a log-sum-exp, which Transformer Engine does not return; use "
                "--execution.attention_backend=auto"
            )
        if mesh.pipeline > 1 and self.scan_layers:
            raise ValueError(
                "execution.scan_layers=True: in a pipeline the loop is over microbatches and the layers of a stage are "
                "unrolled; remove it"
            )
        if mesh.pipeline > 1 and self.offload:
            raise ValueError(
                f"execution.offload={','.join(self.offload)} is not supported with a pipeline; use "
                "--execution.recompute=full"
            )

    def check_names(self, modules: tuple[str, ...], activations: tuple[str, ...]) -> None:
        """Raises ValueError for names that the layers of a model do not have."""
        if self.recompute_of(0) == "selective":
            for word in self.recompute_modules:
                if word not in modules:
                    raise ValueError(
                        f"execution.recompute={self.recompute}: {word!r} is unknown; use none, selective, full or, of "
                        f"the modules of this model, some of {', '.join(modules)}"
                    )
        for word in self.offload:
            if word not in activations:
                raise ValueError(
                    f"execution.offload: {word!r} is unknown; the layers of this model have "
                    f"{', '.join(activations) or 'none'}"
                )
