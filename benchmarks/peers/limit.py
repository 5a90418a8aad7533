"""The limit of a train step: its matmuls and its attention, nothing else, at the clocks of sustained operation.

    python -m benchmarks.peers.limit --config=NAME [--seconds=10] [--windows=1] [--section.field=value ...]

Repeats one step's worth of both, forward and backward, in order, on one GPU: the work of one device of the mesh without
communication. Attention is that of whole sequences, even if the recipe keeps documents apart. Timed separately, the
operations would be too fast: a GPU that idles in between has higher clocks. Prints one line of JSON; `parts` has the
time of each operation alone, measured right after the windows.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.command_line import print_measured, run
from benchmarks.records import devices, jax_versions, record
from benchmarks.sustained import windows
from megajax.config import Config
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.feed_forward.moe import ExpertsConfig
from megajax.mesh.config import MeshConfig


@dataclasses.dataclass(frozen=True)
class Gemm:
    """[m, k] @ [k, n] in the forward pass, and the two matmuls of its backward pass; `times` times per step.

    groups: of an expert each, in one batched matmul."""

    name: str
    m: int
    k: int
    n: int
    times: int
    groups: int = 1

    @property
    def flops(self) -> float:
        """Per step."""
        return 3 * 2 * self.groups * self.m * self.k * self.n * self.times


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    times: int

    @property
    def flops(self) -> float:
        """Per step, counted in full as in Model.flops_per_token."""
        return 3 * 2 * 2 * self.batch * self.length**2 * self.num_heads * self.head_dim * self.times


def work(config: Config) -> tuple[list[Gemm], AttentionShape]:
    """The work of one device of the config's mesh, whose sizes must be resolved, in a step."""
    model = config.model
    mesh = config.mesh
    training = config.training
    if config.lora.rank:
        raise ValueError(f"lora.rank={config.lora.rank}: the limit of adapters is unknown; use --peers=torch")
    if mesh.context > 1:
        raise ValueError(f"mesh.context={mesh.context}: the limit of split sequences is unknown; use --peers=torch")
    if model.moe.num_experts is not None and mesh.expert * mesh.tensor > 1:
        raise ValueError(
            f"mesh.expert={mesh.expert}, mesh.tensor={mesh.tensor}: the limit of split experts is unknown; use "
            "--peers=torch"
        )
    if model.latent.kv_rank is not None:
        raise ValueError(
            f"model.latent.kv_rank={model.latent.kv_rank}: the limit of latent attention is unknown; use --peers=loop"
        )
    batch = training.global_batch_size // mesh.batch_shards
    length = training.sequence_length
    heads = model.num_heads // mesh.tensor
    kv_heads = model.kv_heads // mesh.tensor
    tokens = batch * length
    width = model.embed_dim
    layers = model.num_layers
    gemms = [
        Gemm("query, key, value", tokens, width, (heads + 2 * kv_heads) * model.width_of_head, layers),
        Gemm("attention out", tokens, heads * model.width_of_head, width, layers),
        Gemm("output layer", tokens, width, model.padded_vocab_size // mesh.tensor, 1),
    ]
    for mlp, times in collections.Counter(layer.mlp for layer in model.layers(config.execution)).items():
        gemms += of_experts(mlp, tokens, times) if isinstance(mlp, ExpertsConfig) else of_mlp(mlp, tokens, times, mesh)
    return gemms, AttentionShape(batch, length, heads, kv_heads, model.width_of_head, layers)


def of_mlp(mlp: MlpConfig, tokens: int, times: int, mesh: MeshConfig) -> list[Gemm]:
    wide = mlp.mlp_dim // mesh.tensor
    return [
        Gemm("mlp up", tokens, mlp.embed_dim, wide, times * mlp.wide_dim // mlp.mlp_dim),
        Gemm("mlp down", tokens, wide, mlp.embed_dim, times),
    ]


def of_experts(mlp: ExpertsConfig, tokens: int, times: int) -> list[Gemm]:
    """As if each expert had the same number of tokens."""
    rows = tokens * mlp.top_k // mlp.num_experts
    gemms = [
        Gemm("router", tokens, mlp.embed_dim, mlp.num_experts, times),
        Gemm("experts up", rows, mlp.embed_dim, mlp.wide_dim, times, mlp.num_experts),
        Gemm("experts down", rows, mlp.mlp_dim, mlp.embed_dim, times, mlp.num_experts),
    ]
    return gemms + (of_mlp(mlp.shared, tokens, times, MeshConfig()) if mlp.shared else [])


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    function: Callable
    arguments: tuple[jax.Array, ...]
    times: int

    def run(self) -> jax.Array:
        for _ in range(self.times):
            out = self.function(*self.arguments)
        return out


def operations(gemms: list[Gemm], attention: AttentionShape) -> list[Operation]:
    directions = {
        "": jax.jit(lambda x, w, g: x @ w),
        ", d input": jax.jit(lambda x, w, g: g @ w.mT),
        ", d weight": jax.jit(lambda x, w, g: x.mT @ g),
    }
    found = []
    for gemm in gemms:
        group = (gemm.groups,) if gemm.groups > 1 else ()
        shapes = (gemm.m, gemm.k), (gemm.k, gemm.n), (gemm.m, gemm.n)
        arrays = tuple(_normal(*group, *shape) for shape in shapes)
        for direction, function in directions.items():
            found.append(Operation(gemm.name + direction, function, arrays, gemm.times))
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def forward_and_backward(q, k, v, d_out):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
        return jax.vjp(attend, q, k, v)[1](d_out)

    queries = (attention.batch, attention.length, attention.num_heads, attention.head_dim)
    keys = (*queries[:2], attention.num_kv_heads, attention.head_dim)
    arrays = tuple(_normal(*shape) for shape in (queries, keys, keys, queries))
    return [*found, Operation("attention", jax.jit(forward_and_backward), arrays, attention.times)]


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    config = config.check_on(jax.device_count())
    gemms, attention = work(config)
    steps = operations(gemms, attention)

    def run_steps(count: int) -> None:
        for _ in range(count):
            for operation in steps:
                out = operation.run()
            jax.block_until_ready(out)

    found = windows(run_steps, seconds=seconds, num_windows=num_windows)
    parts = {operation.name: _seconds(operation) for operation in steps}
    return record("limit", found, devices(1), jax_versions(), parts=parts)


def _seconds(operation: Operation) -> float:
    start = time.perf_counter()
    jax.block_until_ready(operation.run())
    return time.perf_counter() - start


def main(arguments: list[str]) -> None:
    print_measured(arguments, measure)


if __name__ == "__main__":
    run(main)
