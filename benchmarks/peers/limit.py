"""The limit of a train step: its matmuls and its attention, nothing else, at the clocks of sustained operation.

    python -m benchmarks.peers.limit --config=NAME [--seconds=10] [--windows=1] [--section.field=value ...]

Repeats one step's worth of both, forward and backward, in order, on one GPU: the work of one device of the mesh without
communication. Attention is that of whole sequences, even if the recipe keeps documents apart. Timed separately, the
operations would be too fast: a GPU that idles in between has higher clocks. Prints one line of JSON; `parts` has the
time of each operation alone, measured right after the windows.
"""

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


@dataclasses.dataclass(frozen=True)
class Gemm:
    """[m, k] @ [k, n] in the forward pass, and the two matmuls of its backward pass; `times` times per step."""

    name: str
    m: int
    k: int
    n: int
    times: int

    @property
    def flops(self) -> float:
        """Per step."""
        return 3 * 2 * self.m * self.k * self.n * self.times


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
    if model.moe.num_experts is not None:
        raise ValueError(
            f"model.moe.num_experts={model.moe.num_experts}: the limit of experts is unknown; leave it out"
        )
    batch = training.global_batch_size // mesh.batch_shards
    length = training.sequence_length
    heads = model.num_heads // mesh.tensor
    kv_heads = model.kv_heads // mesh.tensor
    wide = model.width_of_mlp // mesh.tensor
    tokens = batch * length
    width = model.embed_dim
    layers = model.num_layers
    mlp = model.layers(config.execution)[0].mlp
    num_wide = mlp.wide_dim // mlp.mlp_dim
    gemms = [
        Gemm("query, key, value", tokens, width, (heads + 2 * kv_heads) * model.width_of_head, layers),
        Gemm("attention out", tokens, heads * model.width_of_head, width, layers),
        Gemm("mlp up", tokens, width, wide, layers * num_wide),
        Gemm("mlp down", tokens, wide, width, layers),
        Gemm("output layer", tokens, width, model.padded_vocab_size // mesh.tensor, 1),
    ]
    return gemms, AttentionShape(batch, length, heads, kv_heads, model.width_of_head, layers)


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
        ", d input": jax.jit(lambda x, w, g: g @ w.T),
        ", d weight": jax.jit(lambda x, w, g: x.T @ g),
    }
    found = []
    for gemm in gemms:
        arrays = _normal(gemm.m, gemm.k), _normal(gemm.k, gemm.n), _normal(gemm.m, gemm.n)
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
