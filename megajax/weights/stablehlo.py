"""Exports a model as two StableHLO programs (jax.export), which run with JAX and without megajax.

Dimensions: B rows, S slots in the cache, V vocabulary.

    prefill(params, tokens [B, S], lengths [B]) -> (logits [B, V], caches)
    decode(params, caches, tokens [B], positions [B]) -> (logits [B, V], caches)

params: {name: array}, as in parameters.npz. tokens, lengths and positions: int32; prompts are padded on the
right, and `positions` are the positions of `tokens` in their rows, starting with the length of the prompt. logits:
float32, of the next token. The programs run on one device, a CPU or an NVIDIA GPU, with XLA's kernels only.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.steps import find_step
from megajax.config import Config
from megajax.data.tokenizers.load import load_saved_tokenizer
from megajax.layers.attention.kv_cache import Places, PoolSizes
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.parameters import named
from megajax.weights.run_directory import copy_tokenizer, new_directory

PLATFORMS = ("cpu", "cuda")
PARAMETERS = "parameters.npz"


def export_programs(
    run_dir: str | Path,
    output: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    *,
    batch_size: int = 1,
    max_length: int | None = None,
) -> int:
    """Writes prefill.bin, decode.bin, parameters.npz, model.json and the tokenizer of one step (default: the newest) ->
    the step.

    dtype: of the computation and the matrices; default: that of the run. max_length: tokens per row, including the
    prompt; default: training.sequence_length of the run. Raises ValueError if the output exists, if the step is missing
    or damaged, or if max_length is more than the model supports; then nothing is written.
    """
    run_dir = Path(run_dir)
    step = find_step(run_dir, step)
    config = Config.load(run_dir, step)
    config.model.check_generates()
    max_length = config.training.sequence_length if max_length is None else max_length
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    longest = config.model.max_length or max(max_length, 1)
    if not 0 < max_length <= longest:
        raise ValueError(f"max_length={max_length}: the model reads 1 to {longest} tokens")
    vocab_size = min(config.model.vocab_size, load_saved_tokenizer(run_dir, config.data.tokenizer).vocab_size)
    precision = dataclasses.replace(config.precision.for_inference.with_compute(dtype), params="float32")
    model = Model(config.model, precision, config.execution, adapters=config.lora.transforms)
    with new_directory(output, "output") as new:
        params = _read(run_dir, step, model)
        for name, program in programs(model, vocab_size, batch_size, max_length).items():
            (new / f"{name}.bin").write_bytes(_serialized(program))
        np.savez(new / PARAMETERS, **params)
        about = {
            "run": str(run_dir.resolve()),
            "step": step,
            "batch_size": batch_size,
            "max_length": max_length,
            "vocab_size": vocab_size,
            "compute": np.dtype(precision.compute_dtype).name,
            "platforms": PLATFORMS,
            "jax": jax.__version__,
        }
        (new / "model.json").write_text(json.dumps(about, indent=2) + "\n")
        copy_tokenizer(run_dir, new)
    return step


def _read(run_dir: Path, step: int, model: Model) -> dict:
    replicated = NamedSharding(_host_mesh(), P())
    wanted = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated),
        model.cast_weights(model.precision.compute_dtype),
    )
    with Checkpointer(run_dir, None) as checkpointer:
        return jax.tree.map(np.asarray, named(checkpointer.restore_params(step, wanted, model.layer_rows)))


def _serialized(program: jax.export.Exported) -> bytes | bytearray:
    try:
        return program.serialize()
    except ImportError:
        raise ValueError(
            "JAX needs the package flatbuffers to write programs; pip install 'megajax[stablehlo]'"
        ) from None


def programs(model: Model, vocab_size: int, batch_size: int, max_length: int) -> dict[str, jax.export.Exported]:
    """prefill and decode, with V = vocab_size and S = max_length.

    Always traced for a CPU, because kernels chosen for one GPU would not run on others.
    """
    structure = jax.tree.structure(model.abstract_weights)
    names = list(named(model.abstract_weights))

    def module(params: dict) -> Any:
        return model.module(jax.tree.unflatten(structure, [params[name] for name in names]))

    def logits(module: Any, x_B1D: jax.Array) -> jax.Array:
        return module.logits(x_B1D)[:, 0, :vocab_size]

    # One page for each row.
    sizes = PoolSizes(batch_size, max_length, batch_size, model.precision.compute_dtype)
    numbers_B = jnp.arange(batch_size, dtype=jnp.int32)

    def prefill(params, tokens_BS, lengths_B):
        positions_1S = jnp.arange(max_length, dtype=jnp.int32)[None]

        def read_row(caches, row):
            number, tokens_S, length = row
            is_token_1S = positions_1S < length
            slots_1S = jnp.where(is_token_1S, 0, batch_size * max_length) + number * max_length + positions_1S
            rows_1S = jnp.where(is_token_1S, number, batch_size)
            upper_1S = jnp.where(is_token_1S, positions_1S + 1, 0)
            places = Places(slots_1S, positions_1S, rows_1S, number[None, None], jnp.zeros_like(upper_1S), upper_1S)
            batch = {"tokens": tokens_S[None], "positions": positions_1S}
            x_1SD, caches = module(params).extend(batch, _at(caches, places))
            return caches, x_1SD[0, length - 1]

        caches = model.config.new_pages(sizes, model.execution)
        caches, last_BD = jax.lax.scan(read_row, caches, (numbers_B, tokens_BS, lengths_B))
        return logits(module(params), last_BD[:, None]), caches

    def decode(params, caches, tokens_B, positions_B):
        slots_B = numbers_B * max_length + positions_B
        slots, positions, rows = (a[:, None] for a in (slots_B, positions_B, numbers_B))
        places = Places(slots, positions, rows, rows, None, positions + 1)
        batch = {"tokens": tokens_B[:, None], "positions": positions}
        x_B1D, caches = module(params).extend(batch, _at(caches, places))
        return logits(module(params), x_B1D), caches

    rows = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    params = named(model.cast_weights(model.precision.compute_dtype))
    with jax.set_mesh(_host_mesh()):
        prompt = (params, jax.ShapeDtypeStruct((batch_size, max_length), jnp.int32), rows)
        _, caches = jax.eval_shape(prefill, *prompt)
        leaves, cache_structure = jax.tree.flatten(caches)

        def plain_prefill(*arguments):  # caches as plain lists, without our classes
            out, caches = prefill(*arguments)
            return out, jax.tree.leaves(caches)

        def plain_decode(params, caches, tokens_B, positions_B):
            out, caches = decode(params, jax.tree.unflatten(cache_structure, caches), tokens_B, positions_B)
            return out, jax.tree.leaves(caches)

        return {
            "prefill": jax.export.export(jax.jit(plain_prefill), platforms=PLATFORMS)(*prompt),
            "decode": jax.export.export(jax.jit(plain_decode), platforms=PLATFORMS)(params, leaves, rows, rows),
        }


def _host_mesh() -> Mesh:
    return make_mesh(MeshConfig(), jax.local_devices(backend="cpu")[:1])


def _at(caches: dict, places: Places) -> dict:
    return {name: tuple(cache.at(places) for cache in of_stack) for name, of_stack in caches.items()}
