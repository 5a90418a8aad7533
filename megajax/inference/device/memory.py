"""How much memory an engine has for keys and values, and how many pages that is."""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax.inference.config import ServingConfig, SettledConfig
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.models.model import Model
from megajax.training.reporting.console import format_bytes

DEFAULT_MAX_LENGTH = 8192  # tokens of a sequence, for models without a limit
HOST_POOL_BYTES = 2**30  # of the pools of all devices, where devices do not say how much memory they have (CPU)
ROWS_PER_KEPT_STATE = 4  # of sequences that run; the state of a sequence is as large as many pages
PAGE_DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def pool_sizes(models: Sequence[Model], mesh: Mesh, serving: SettledConfig) -> list[PoolSizes]:
    """The pools of the models of an engine (itself first, then a draft model), with the same pages: serving.num_pages,
    or as many as the free memory holds and max_rows can use.

    Raises ValueError if that is none.
    """
    dtypes = [jnp.dtype(PAGE_DTYPES.get(serving.page_dtype, model.precision.compute_dtype)) for model in models]
    found = [PoolSizes(serving.num_pages or 1, serving.page_size, serving.max_rows, dtype) for dtype in dtypes]
    found[0] = found[0]._replace(num_guesses=serving.num_guesses)
    if serving.num_pages is not None:
        return found
    page_bytes = sum(map(bytes_per_page, models, found))
    states_bytes = sum(map(pool_bytes, models, found)) - page_bytes
    most = serving.max_rows * -(-longest_sequence(models, serving) // serving.page_size)
    for model, sizes in zip(models, found, strict=True):
        states_bytes += pool_bytes(model, kept_sizes(model, sizes, serving))
    available = _available_bytes(mesh, serving.memory_fraction) - states_bytes
    num_pages = min(available // page_bytes, most) if page_bytes else most
    if num_pages < 1:
        raise ValueError(
            f"memory_fraction={serving.memory_fraction} leaves no room for keys and values; use a larger fraction, "
            "or more devices (--mesh.tensor)"
        )
    return [sizes._replace(num_pages=num_pages) for sizes in found]


def pool_bytes(model: Model, sizes: PoolSizes) -> int:
    """Of all layers on all devices."""
    abstract = jax.eval_shape(lambda: model.config.new_pages(sizes, model.execution))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))


def bytes_per_page(model: Model, sizes: PoolSizes) -> int:
    """Of a page of all layers on all devices; 0 if no layer has pages."""
    one, two = (pool_bytes(model, sizes._replace(num_pages=count)) for count in (1, 2))
    return two - one


def has_states(model: Model, sizes: PoolSizes) -> bool:
    """Whether a layer has a state per sequence besides keys and values in pages."""
    one, two = (pool_bytes(model, sizes._replace(num_rows=count)) for count in (1, 2))
    return one != two


def kept_sizes(model: Model, sizes: PoolSizes, serving: ServingConfig) -> PoolSizes:
    """A pool without pages, for the states of sequences that the prefix cache keeps: num_rows of them, which may be
    0."""
    num_states = 0
    if serving.prefix_cache and has_states(model, sizes):
        num_states = max(sizes.num_rows // ROWS_PER_KEPT_STATE, 1)
    return sizes._replace(num_pages=0, num_rows=num_states)


def longest_sequence(models: Sequence[Model], serving: ServingConfig) -> int:
    """Maximum tokens of a sequence, if the pages hold them."""
    limits = [model.config.max_length for model in models if model.config.max_length is not None]
    return min([serving.max_length or (DEFAULT_MAX_LENGTH if not limits else min(limits)), *limits])


def visible_tokens(models: Sequence[Model], pools: Sequence[PoolSizes]) -> int | None:
    """Last tokens of a sequence that any layer reads from pages; None: all."""
    pairs = zip(models, pools, strict=True)
    stacks = [model.config.paged_stacks(sizes, model.execution).values() for model, sizes in pairs]
    reaches = [layer.reach for of_model in stacks for stack in of_model for layer in stack]
    return None if None in reaches else max(reach for reach in reaches if reach is not None)


def check_programs(mesh: Mesh, programs: Iterable[jax.stages.Compiled], serving: ServingConfig) -> None:
    """Raises ValueError if one needs more memory for what it computes than is left beside weights and pages. Devices
    that do not say how much they have (CPU) are not checked."""
    stats = mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    limit = stats["bytes_limit"]
    left = limit - stats["bytes_in_use"]
    analyses = [program.memory_analysis() for program in programs]
    needed = max((analysis.temp_size_in_bytes for analysis in analyses if analysis is not None), default=0)
    if needed > left:
        fraction = math.floor(100 * (serving.memory_fraction - (needed - left) / limit)) / 100
        fewer = f"--memory_fraction={max(fraction, 0.01):g}" if serving.num_pages is None else "fewer --num_pages"
        raise ValueError(
            f"a program of the engine needs {format_bytes(needed)} beside weights and pages, and {format_bytes(left)} "
            f"are left; use {fewer}, or fewer --max_rows or --max_batch_tokens"
        )


def _available_bytes(mesh: Mesh, memory_fraction: float) -> int:
    """For pages, summed over the devices that split the heads."""
    device = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free = int(memory_fraction * stats["bytes_limit"]) - stats["bytes_in_use"]
    else:
        free = HOST_POOL_BYTES // len(mesh.local_devices)
    return max(free, 0) * mesh.shape["tensor"]
