"""The states of gated delta nets between chunks, for Hopper (Pallas, Mosaic GPU).

    written_j = x_j + S_j first_j,    S_(j+1) = decay_j S_j + written_j second_j^T + added_j

Dimensions: J chunks of Q tokens; M sequences times heads; S [P, N]. bfloat16; states and sums are float32, and a state
is rounded for its product. The backward pass is the same recurrence from the last chunk to the first.

Rows of a state do not depend on each other: a warpgroup computes 64 of them over all chunks with the state in
registers. What the next chunk needs is in flight (TMA), with N = 128 and Q = 64 up to 56 KB. The limit is memory
bandwidth; both tiles of a head read first and second, one of them from the cache.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registers import load_as
from pallas_kernels.shared_memory import swizzled

TILE = 64
STAGES = 2
CHUNKS = (32, 64)
WIDTHS = (64, 128)
# commit_smem and the waits for copies are the only barriers that are needed.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def problem(rows: int, width: int, chunk: int, dtype: jnp.dtype) -> str:
    """Why this kernel cannot be used for states [rows, width], or an empty string."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}"
    if rows % TILE or width not in WIDTHS:
        return f"states of {rows} x {width}"
    return "" if chunk in CHUNKS else f"chunks of {chunk} tokens"


@functools.partial(jax.jit, static_argnames=("reverse", "interpret"))  # lowered once for all layers
def recurrence(
    x_JMPQ: jax.Array, first_JMNQ: jax.Array, second_JMNQ: jax.Array, decay_JM: jax.Array, added_JMPN: jax.Array | None,
    start_MPN: jax.Array, *, reverse: bool = False, interpret: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """-> (written [J, M, P, Q], the state before each chunk [J, M, P, N], the last state [M, P, N] float32).

    decay, start: float32. reverse: from the last chunk to the first; the last state is then that of the first chunk.
    """
    num_chunks, num_heads, num_rows, chunk_size = x_JMPQ.shape
    width = first_JMNQ.shape[2]
    dtype = x_JMPQ.dtype
    stages = min(STAGES, num_chunks)
    # Those of a tile of rows first: their copies are parts of arrays.
    of_rows = [array for array in (x_JMPQ, added_JMPN) if array is not None]
    of_heads = [first_JMNQ, second_JMNQ]
    num_sources = len(of_rows) + len(of_heads)

    def body(*refs):
        sources, refs = refs[:num_sources], refs[num_sources:]
        decay_ref, start_ref, written_ref, before_ref, last_ref, full, *targets, written_smem, before_smem = refs
        x_smem, *added_smem, first_smem, second_smem = targets
        head, tile = (lax.axis_index(name) for name in ("head", "tile"))
        rows = pl.ds(tile * TILE, TILE)

        def copy(step):
            stage = lax.rem(step, stages)
            of_chunk = [ref.at[place(step), head] for ref in sources]
            of_chunk[: len(of_rows)] = [ref.at[rows] for ref in of_chunk[: len(of_rows)]]
            for source, target in zip(of_chunk, targets, strict=True):
                plgpu.copy_gmem_to_smem(source, target.at[stage], full.at[stage])

        def place(step):
            return num_chunks - 1 - step if reverse else step

        def one_chunk(step, state):
            stage = lax.rem(step, stages)
            chunk = place(step)
            decay = decay_ref[chunk, head]
            plgpu.barrier_wait(full.at[stage])
            before = state.astype(dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            before_smem[...] = before
            written = _sum(_load(x_smem.at[stage]), before, first_smem.at[stage]).astype(dtype)
            written_smem[...] = written
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(before_smem, before_ref.at[chunk, head, rows])
            plgpu.copy_smem_to_gmem(written_smem, written_ref.at[chunk, head, rows])
            state = state * decay
            for smem in added_smem:
                state += _load(smem.at[stage])
            state = _sum(state, written, second_smem.at[stage].transpose((1, 0)))
            plgpu.commit_smem()  # all threads have read this stage
            pl.when(step + stages < num_chunks)(lambda: copy(step + stages))
            return state

        for step in range(stages):
            copy(step)
        start = load_as(start_ref.at[head, rows], plgpu.Layout.WGMMA, optimized=False)
        last_ref.at[head, rows][...] = lax.fori_loop(0, num_chunks, one_chunk, start)
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(x_JMPQ.shape, dtype),
            jax.ShapeDtypeStruct((num_chunks, num_heads, num_rows, width), dtype),
            jax.ShapeDtypeStruct((num_heads, num_rows, width), jnp.float32),
        ),
        scratch_types=[
            plgpu.Barrier(num_arrivals=num_sources, num_barriers=stages),
            *[swizzled((stages, TILE, array.shape[-1]), dtype) for array in of_rows],
            *[swizzled((stages, *array.shape[2:]), dtype) for array in of_heads],
            swizzled((TILE, chunk_size), dtype),
            swizzled((TILE, width), dtype),
        ],
        grid=(num_heads, num_rows // TILE),
        grid_names=("head", "tile"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return run(*of_rows, *of_heads, decay_JM, start_MPN)


def _load(ref):
    return load_as(ref, plgpu.Layout.WGMMA).astype(jnp.float32)


def _sum(initial, a, b_ref):
    """initial + a b, float32."""

    def product(ref):
        ref[...] = initial
        plgpu.wgmma(ref, a, b_ref)
        return ref[...]

    return pl.run_scoped(product, plgpu.ACC(initial.shape, jnp.float32))
