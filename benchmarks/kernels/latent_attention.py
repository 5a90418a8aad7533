"""Speed of attention to latents in pages on one Hopper GPU:

    python -m benchmarks.kernels.latent_attention [--output=FILE]

First compares the kernel with the reference in float32: random tables, lengths that are not multiples of a page or a
step, NaN in every page and slot that must not be read. Then prints GB/s of latents read and TFLOP/s of decoding, with
sequences of 4,096 tokens, for several numbers of heads and batches, next to a copy on the device in the same run, and
TFLOP/s of prompts. A call is the whole operation, with combining; small batches cycle through all pages, so that none
remain in the L2 cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run
from benchmarks.kernels.paged_attention import NOWHERE, largest_errors
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.ops.attention_backends import Options
from megajax.ops.attention_mask import CAUSAL
from megajax.ops.paged_attention import PagedLatents
from pallas_kernels.latent_attention import BLOCK, DIMS, SLOTS, attend
from pallas_kernels.parts import num_parts

KEY_DIM, VALUE_DIM = DIMS
TOKENS = 4096
PAGE_SIZE = 64
ROWS = 128
SCALE = 192**-0.5
DECODING = [(heads, batch, None) for heads in (16, 64, 128) for batch in (1, 8, 32, 128)]
DECODING += [(16, 32, parts) for parts in (1, 2, 3)]
PROMPTS = [(heads, tokens) for heads in (16, 128) for tokens in (1024, 4096)]
HEADER = "| heads | batch | parts | us | GB/s | of a copy | TFLOP/s |\n|---|---|---|---|---|---|---|"
CHECKS = {
    "16 heads, pages of 16": dict(heads=16, page_size=16),
    "128 heads, pages of 64, window": dict(heads=128, page_size=64, window=700, parts=5),
    "20 heads, pages of 8, one part": dict(heads=20, page_size=8, parts=1),
    "64 heads, pages of 32, many parts": dict(heads=64, page_size=32, parts=16),
}
# (tokens before the new ones, new ones) of the sequences of a row.
CHUNKS = [(0, 130), (700, 65), (63, 1), (0, 64)]


def random_case(
    lengths: list[int], *, heads: int, page_size: int, window: int | None = None, key_dim: int = KEY_DIM
) -> tuple:
    """Arguments of `attend` that decode, with NaN or a number far out of range where nothing may be read."""
    rng = np.random.default_rng(0)
    num_pages = -(-max(lengths) // page_size) + 1
    shape = (len(lengths) * num_pages, 1, 1, page_size, key_dim)
    q = jnp.asarray(rng.standard_normal((len(lengths), 1, heads, key_dim)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    table = rng.permutation(shape[0]).astype(np.int32).reshape(len(lengths), num_pages)
    upper = np.asarray(lengths, np.int32)[:, None]
    lower = np.zeros_like(upper) if window is None else np.maximum(upper - window, 0)
    is_read = np.zeros((shape[0], page_size), bool)
    for row, first, last in zip(table, lower, upper, strict=True):
        places = np.arange(num_pages * page_size).reshape(num_pages, page_size)
        is_read[row] = (places >= first) & (places < last)
    table = jnp.asarray(np.where(is_read[table].any(-1), table, NOWHERE))
    pages = jnp.where(jnp.asarray(is_read)[:, None, None, :, None], pages, jnp.nan)
    return q, pages, table, jnp.asarray(lower), jnp.asarray(upper)


def random_prompts(
    chunks: list[tuple[int, int]], *, heads: int, page_size: int, padding: int = 0, key_dim: int = KEY_DIM
) -> tuple:
    """Arguments of `attend`: new tokens of several sequences in one row, and then padding."""
    rng = np.random.default_rng(0)
    bounds = []
    first = 0
    for before, new in chunks:
        bounds += [(first, first + before + 1 + i) for i in range(new)]
        first += -(-(before + new) // page_size) * page_size
    bounds += [(bounds[-1][1],) * 2] * padding
    lower, upper = (jnp.asarray([of], jnp.int32) for of in zip(*bounds, strict=True))
    shape = (first // page_size + 3, 1, 1, page_size, key_dim)
    q = jnp.asarray(rng.standard_normal((1, len(bounds), heads, key_dim)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(shape[0])[None, : first // page_size + 1], jnp.int32)
    return q, pages, table, lower, upper


@functools.partial(jax.jit, static_argnames="value_dim")
def reference(q, pages, table, lower, upper, value_dim: int = VALUE_DIM) -> tuple[jax.Array, jax.Array]:
    """`attend` in float32."""
    latents = PagedLatents(pages, table, lower, upper, None, None, Options(CAUSAL, SCALE), value_dim)
    return latents.reference(q.astype(jnp.float32))


def errors(results, case, value_dim: int = VALUE_DIM) -> tuple[float, float]:
    """Errors of `attend` relative to the reference: the largest of any token, and the log-sum-exp's."""
    wanted, wanted_lse = map(np.asarray, reference(*case, value_dim=value_dim))
    out, lse = (np.asarray(a, np.float64) for a in results)
    sees = np.asarray(case[-1] > case[-2])
    if out[~sees].any() or not np.isneginf(lse.swapaxes(1, 2)[~sees]).all():
        raise AssertionError("a token that sees nothing gives 0 and a log-sum-exp of -inf")
    return largest_errors(out[sees], lse.swapaxes(1, 2)[sees], wanted[sees], wanted_lse.swapaxes(1, 2)[sees])


def check(case: tuple, parts: int | None = None) -> tuple[float, float]:
    found = errors(jax.jit(functools.partial(attend, value_dim=VALUE_DIM, scale=SCALE, parts=parts))(*case), case)
    # Rounded to bfloat16: the result (0.9 * 2^-9 in the mean square) and the probabilities.
    if not (found[0] < 2**-8 and found[1] < 1e-4):
        raise AssertionError(f"relative error {found[0]:.2g}, of the log-sum-exp {found[1]:.2g}")
    return found


def check_decoding(*, parts: int | None = None, **options) -> tuple[float, float]:
    return check(random_case([1, 0, 63, 64, 65, 500, 1029, 2047], **options), parts)


def decoding(heads: int, batch: int, parts: int | None, pages: jax.Array) -> dict:
    """pages: [ROWS * TOKENS / PAGE_SIZE, 1, 1, PAGE_SIZE, C]."""
    rounds = ROWS // batch
    order = np.random.default_rng(0).permutation(len(pages)).astype(np.int32)
    tables = jnp.asarray(order.reshape(rounds, batch, TOKENS // PAGE_SIZE))
    upper = jnp.full((batch, 1), TOKENS, jnp.int32)
    q = jax.random.normal(jax.random.key(0), (batch, 1, heads, KEY_DIM), jnp.bfloat16)

    @jax.jit
    def all_rounds(q, pages, tables, lower, upper):
        def step(q, table):
            out, _ = attend(q, pages, table, lower, upper, value_dim=VALUE_DIM, scale=SCALE, parts=parts)
            return q.at[..., :VALUE_DIM].set(out), None

        return jax.lax.scan(step, q, tables)[0]

    seconds = seconds_of(all_rounds, q, pages, tables, 0 * upper, upper) / rounds
    return dict(
        heads=heads,
        batch=batch,
        parts=parts or num_parts(batch * -(-heads // BLOCK), TOKENS, SLOTS),
        microseconds=1e6 * seconds,
        gigabytes_per_second=2 * batch * TOKENS * KEY_DIM / seconds / 1e9,
        teraflops=2 * batch * heads * TOKENS * (KEY_DIM + VALUE_DIM) / seconds / 1e12,
    )


def prompt(heads: int, tokens: int) -> dict:
    """A prompt without tokens before it."""
    case = random_prompts([(0, tokens)], heads=heads, page_size=PAGE_SIZE)
    seconds = seconds_of(jax.jit(functools.partial(attend, value_dim=VALUE_DIM, scale=SCALE)), *case)
    flops = 2 * heads * (KEY_DIM + VALUE_DIM) * tokens * (tokens + 1) / 2
    return dict(heads=heads, tokens=tokens, microseconds=1e6 * seconds, teraflops=flops / seconds / 1e12)


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    found = about() | {"checks": {}, "rows": []}
    checks = {name: functools.partial(check_decoding, **options) for name, options in CHECKS.items()}
    for heads in (16, 128):
        case = random_prompts(CHUNKS, heads=heads, page_size=PAGE_SIZE, padding=20)
        checks[f"prompts, {heads} heads"] = functools.partial(check, case)
    for name, one in checks.items():
        found["checks"][name] = error, lse_error = one()
        print(f"{name:<35} relative error {error:.2g}, of the log-sum-exp {lse_error:.2g}", flush=True)
    found["copy"] = copy_bandwidth()
    print(f"copy on the device: {found['copy']:,.0f} GB/s\n\n{HEADER}", flush=True)
    shape = (ROWS * TOKENS // PAGE_SIZE, 1, 1, PAGE_SIZE, KEY_DIM)
    pages = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(1))
    for setting in DECODING:
        found["rows"].append(decoding(*setting, pages))
        print(line(found["rows"][-1], found["copy"]), flush=True)
        save(output, found)
    for heads, tokens in PROMPTS:
        found["rows"].append(row := prompt(heads, tokens))
        what = f"prompt of {tokens:,} tokens, {heads} heads"
        print(f"{what}: {row['microseconds']:.0f} us, {row['teraflops']:.0f} TFLOP/s", flush=True)
        save(output, found)


def line(row: dict, copy: float) -> str:
    """A row of the table below HEADER."""
    speed = row["gigabytes_per_second"]
    cells = [str(row[name]) for name in ("heads", "batch", "parts")]
    cells += [f"{row['microseconds']:.1f}", f"{speed:,.0f}", f"{speed / copy:.0%}", f"{row['teraflops']:.0f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    run(main)
