"""Bandwidth of the paged decode attention on one Hopper GPU:

    python -m benchmarks.kernels.paged_attention [--output=FILE]

First compares the kernel with the reference in float32: random tables, lengths that are not multiples of a page or a
step, NaN in every page and slot that must not be read. Then prints GB/s of keys and values read, with 4,096 tokens per
sequence, 32 query heads, 8 kv heads, head dim 128, for several batches, page sizes and splits, next to a copy on the
device in the same run. A call is the whole operation, with padding and combining; small batches cycle through all
pages, so that none remain in the L2 cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import run
from benchmarks.kernels.timing import about, copy_bandwidth, output_of, seconds_of
from benchmarks.records import save
from megajax.ops.paged_attention import quantise, reference_paged_attention
from pallas_kernels.paged_attention import INT8_SLOTS, SLOTS, decode
from pallas_kernels.parts import num_parts

NUM_HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
TOKENS = 4096
BATCH = 32
HEADER = (
    "| cache | batch | page | parts | block | stages | us | GB/s | of a copy |\n|---|---|---|---|---|---|---|---|---|"
)
NOWHERE = 2**30  # the number of a page that must not be read
CHECKS = {
    "pages of 16": dict(page_size=16),
    "pages of 64, window, soft cap": dict(page_size=64, window=700, soft_cap=5.0, group=16, parts=5),
    "pages of 8, head dim 64, one head per kv head": dict(page_size=8, head_dim=64, group=1, parts=1),
    "pages of 16, 64 heads per kv head": dict(page_size=16, group=64),
    "pages of 64, more blocks than run at once": dict(page_size=64, copies=17, parts=1),
    "int8, pages of 32": dict(page_size=32, is_int8=True),
    "int8, pages of 32, window, 33 heads per kv head": dict(page_size=32, is_int8=True, window=333, group=33),
    "int8, pages of 64, window, head dim 64": dict(page_size=64, is_int8=True, window=333, head_dim=64, parts=3),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    batch: int
    page_size: int
    is_int8: bool = False
    parts: int | None = None
    block: int = 64
    stages: int = 2


SETTINGS = [
    *(Setting(BATCH, page_size) for page_size in (16, 64)),
    *(Setting(BATCH, 64, parts=parts) for parts in (2, 8)),
    Setting(BATCH, 64, stages=3),
    Setting(BATCH, 64, block=128),
    *(Setting(8, 64, parts=parts) for parts in (None, 8)),
    *(Setting(1, 64, parts=parts) for parts in (None, 8)),
    *(Setting(BATCH, page_size, is_int8=True) for page_size in (32, 64)),
    *(Setting(BATCH, 64, is_int8=True, parts=parts) for parts in (1, 4)),
    *(Setting(BATCH, 64, is_int8=True, stages=stages) for stages in (3, 4)),
    Setting(BATCH, 64, is_int8=True, block=128),
    Setting(8, 64, is_int8=True),
    Setting(8, 64, is_int8=True, parts=4),
    Setting(1, 64, is_int8=True),
]


def random_case(
    lengths: list[int], *, kv_heads: int, group: int, head_dim: int, page_size: int, is_int8: bool = False,
    window: int | None = None
) -> tuple:  # fmt: skip
    """Arguments of `decode`, up to the scales, with NaN or a number far out of range where nothing may be read."""
    rng = np.random.default_rng(0)
    num_pages = -(-max(lengths) // page_size) + 1
    shape = (len(lengths) * num_pages, 2, kv_heads, page_size, head_dim)
    q = jnp.asarray(rng.standard_normal((len(lengths), kv_heads * group, head_dim)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    table = rng.permutation(shape[0]).astype(np.int32).reshape(len(lengths), num_pages)
    is_read = np.zeros((shape[0], page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        places = np.arange(num_pages * page_size).reshape(num_pages, page_size)
        is_read[row] = (places < length) & (places >= length - (window or length))
    is_known = is_read[table].any(-1)
    table = jnp.asarray(np.where(is_known, table, NOWHERE))
    is_read = jnp.asarray(is_read)[:, None, None]
    scales = None
    if is_int8:
        pages, scales = quantise(pages)
        scales = jnp.where(is_read, scales, jnp.nan)
    else:
        pages = jnp.where(is_read[..., None], pages, jnp.nan)
    return q, pages, table, jnp.asarray(lengths, jnp.int32), scales


def errors(results, case, lengths: list[int], **options) -> tuple[float, float]:
    """Errors of `decode` relative to the reference in float32: the largest of any sequence, and the log-sum-exp's."""
    reference = jax.jit(functools.partial(reference_paged_attention, **options))
    wanted, wanted_lse = map(np.asarray, reference(case[0].astype(jnp.float32), *case[1:]))
    full = np.asarray(lengths) > 0
    if np.asarray(results[0], np.float32)[~full].any() or not np.isneginf(np.asarray(results[1])[~full]).all():
        raise AssertionError("a sequence without tokens gives 0 and a log-sum-exp of -inf")
    return largest_errors(*(np.asarray(a, np.float64)[full] for a in (*results, wanted, wanted_lse)))


def largest_errors(out, lse, wanted, wanted_lse) -> tuple[float, float]:
    """Of any row, relative to its norm, and of the log-sum-exps."""

    def norm(a: np.ndarray) -> np.ndarray:
        return np.linalg.norm(a.reshape(len(a), -1), axis=-1)

    return float((norm(out - wanted) / norm(wanted)).max()), float(np.abs(lse - wanted_lse).max())


def check(
    *, page_size, head_dim=128, group=4, is_int8=False, parts=None, copies=1, **options
) -> tuple[float, float]:  # fmt: skip
    lengths = [1, 0, 63, 64, 65, 500, 1029, 2047] * copies
    sizes = dict(kv_heads=2, group=group, head_dim=head_dim, page_size=page_size, is_int8=is_int8)
    case = random_case(lengths, **sizes, window=options.get("window"))
    options |= dict(scale=head_dim**-0.5)
    found = errors(jax.jit(functools.partial(decode, parts=parts, **options))(*case), case, lengths, **options)
    # Rounded to bfloat16: the result (0.9 * 2^-9 in the mean square), the probabilities and, of int8, times the scale.
    if not (found[0] < 2**-8 and found[1] < 1e-4):
        raise AssertionError(f"relative error {found[0]:.2g}, of the log-sum-exp {found[1]:.2g}")
    return found


def measure(setting: Setting, pages: jax.Array, scales: jax.Array | None) -> dict:
    """pages: [BATCH * TOKENS / page_size, 2, K, page_size, H]."""
    rounds = BATCH // setting.batch
    order = np.random.default_rng(0).permutation(len(pages)).astype(np.int32)
    tables = jnp.asarray(order.reshape(rounds, setting.batch, TOKENS // setting.page_size))
    lengths = jnp.full((setting.batch,), TOKENS, jnp.int32)
    q = jax.random.normal(jax.random.key(0), (setting.batch, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    given = dict(parts=setting.parts, block=setting.block, stages=setting.stages, scale=HEAD_DIM**-0.5)

    @jax.jit
    def all_rounds(q, pages, tables, lengths, scales):
        def step(q, table):
            return decode(q, pages, table, lengths, scales, **given)[0], None

        return jax.lax.scan(step, q, tables)[0]

    seconds = seconds_of(all_rounds, q, pages, tables, lengths, scales) / rounds
    num_bytes = 2 * setting.batch * TOKENS * KV_HEADS * (HEAD_DIM + 4 if setting.is_int8 else 2 * HEAD_DIM)
    slots = INT8_SLOTS if setting.is_int8 else SLOTS
    parts = setting.parts or num_parts(setting.batch * KV_HEADS, TOKENS, slots, setting.block)
    row = dataclasses.asdict(setting) | dict(parts=parts, microseconds=1e6 * seconds)
    return row | dict(gigabytes_per_second=num_bytes / seconds / 1e9)


def main(arguments: list[str]) -> None:
    output = output_of(arguments)
    found = about() | {"checks": {}, "rows": []}
    for name, options in CHECKS.items():
        found["checks"][name] = error, lse_error = check(**options)
        print(f"{name:<45} relative error {error:.2g}, of the log-sum-exp {lse_error:.2g}", flush=True)
    found["copy"] = copy_bandwidth()
    print(f"copy on the device: {found['copy']:,.0f} GB/s\n\n{HEADER}", flush=True)
    for setting in sorted(SETTINGS, key=lambda setting: (setting.is_int8, setting.page_size)):
        found["rows"].append(measure(setting, *_pages(setting.page_size, setting.is_int8)))
        print(line(found["rows"][-1], found["copy"]), flush=True)
        save(output, found)


def line(row: dict, copy: float) -> str:
    """A row of the table below HEADER."""
    speed = row["gigabytes_per_second"]
    cells = ["int8" if row["is_int8"] else "bfloat16"]
    cells += [str(row[name]) for name in ("batch", "page_size", "parts", "block", "stages")]
    cells += [f"{row['microseconds']:.1f}", f"{speed:,.0f}", f"{speed / copy:.0%}"]
    return f"| {' | '.join(cells)} |"


@functools.lru_cache(maxsize=1)
def _pages(page_size: int, is_int8: bool) -> tuple:
    """(pages, their scales or None)."""
    shape = (BATCH * TOKENS // page_size, 2, KV_HEADS, page_size, HEAD_DIM)
    pages = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(1))
    return jax.jit(quantise)(pages) if is_int8 else (pages, None)


if __name__ == "__main__":
    run(main)
