"""Exports the parameters of a run, for serving: python -m megajax.convert.export --run=DIR --output=DIR [--step=N
--dtype=bfloat16]
With programs that run without megajax: ... --stablehlo [--batch_size=1 --max_length=N] (convert/stablehlo.py)

The output is a run directory with config, tokenizer and one step without optimizer state, which infer.py reads on any
mesh and train.py refuses. Layers are stored in order, whatever pipeline the run had, and adapters are merged into their
matrices. With --dtype matrices are cast; vectors (norms, biases) keep their dtype, so that serving in bfloat16 computes
with the same numbers.
"""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint import piecewise
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.steps import find_step
from megajax.command_line import Parser, errors_in_one_line
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import BESIDE_TOKENIZER, Tokenizer, save_tokenizer
from megajax.mesh import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.parameters import Parameter


def export(run_dir: str | Path, output: str | Path, step: int | None = None, dtype: str | None = None) -> int:
    """Writes `output` from one step of a run (default: the newest) -> the step.

    The arrays are sharded over all devices of this process, verified as saved, then cast. Raises ValueError if the
    output exists, or if the step is missing or damaged; then nothing is written.
    """
    run_dir = Path(run_dir)
    step = find_step(run_dir, step)
    config = Config.load(run_dir, step)
    model = Model(config.model, config.precision, config.execution)
    with new_directory(output, "output") as new:
        with Checkpointer(run_dir, None) as checkpointer:
            weights, meta = _read(checkpointer, step, model, None if config.model.transforms else dtype)
        if config.model.transforms:
            config = dataclasses.replace(config, model=config.model.without_transforms)
            weights = _merged(model, weights, dtype)
            meta |= {"config": dataclasses.asdict(config)}
        record = {"run": str(run_dir.resolve()), "step": step, "dtype": dtype}
        with Checkpointer(new, CheckpointConfig(keep=0)) as writer:
            writer.write(step, {"params": weights}, meta)
            writer.wait()
        _describe(new, config, record)
        copy_tokenizer(run_dir, new)
    return step


@contextlib.contextmanager
def new_directory(path: str | Path, field: str) -> Iterator[Path]:
    """A temporary directory, renamed to `path` when complete. Raises ValueError if `path` exists."""
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise ValueError(f"{field}={path} exists; use another, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new.chmod(0o755)
        yield new
        new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def write_imported(
    new: Path, config: Config, step: int, arrays: dict, tokenizer: Tokenizer, record: dict[str, Any]
) -> None:
    """Writes one step with parameters only into an empty directory, piece by piece.

    arrays: nested dict of PiecewiseArray, with the layers in order. record: where they come from.
    """
    meta = {
        "step": step,
        "config": dataclasses.asdict(config),
        "layer_rows": {stack: rows.tolist() for stack, rows in Model(config.model).layer_rows.items()},
        "tokenizer": tokenizer.identity,
        "eod_id": tokenizer.eod_id,
    }
    piecewise.write(new, step, arrays, meta)
    _describe(new, config, record)
    save_tokenizer(tokenizer, new)


def _describe(new: Path, config: Config, record: dict[str, Any]) -> None:
    """record: written to exported.json, which marks the run as not trainable."""
    (new / "config.json").write_text(config.to_json())
    (new / "exported.json").write_text(json.dumps(record, indent=2) + "\n")


def copy_tokenizer(run_dir: Path, new: Path) -> None:
    for file in (*run_dir.glob("tokenizer*"), *(run_dir / name for name in BESIDE_TOKENIZER)):
        if file.is_file():
            shutil.copyfile(file, new / file.name)


def _read(checkpointer: Checkpointer, step: int, model: Model, dtype: str | None):
    """-> (weights, meta), with the layers in order."""
    meta = checkpointer.read_meta(step)
    meta.pop("digests", None)
    mesh = make_mesh(MeshConfig(fsdp=jax.device_count()))
    abstract = model.abstract_weights if dtype is None else model.cast_weights(jnp.dtype(dtype))
    target = jax.tree.map(lambda a, record: _spread(a, record, mesh), abstract, model.records)
    weights = checkpointer.restore_params(step, target, model.layer_rows)
    return weights, meta | {"layer_rows": {stack: numbers.tolist() for stack, numbers in model.layer_rows.items()}}


def _merged(model: Model, weights: dict, dtype: str | None) -> dict:
    """The weights with the transforms of the model merged into them, then cast."""
    plain = model.without_transforms
    abstract = plain.abstract_weights if dtype is None else plain.cast_weights(jnp.dtype(dtype))

    def run(weights: dict) -> dict:
        return jax.tree.map(lambda array, wanted: array.astype(wanted.dtype), model.merged(weights), abstract)

    return jax.jit(run)(weights)


def _spread(a: jax.ShapeDtypeStruct, record: Parameter, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Adds a sharding: matrices are split over all devices if divisible."""
    splits = record.is_cast and a.shape[-1] % mesh.size == 0
    spec = P(*[None] * (len(a.shape) - 1), "fsdp") if splits else P()
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m megajax.convert.export", description=__doc__.partition(":")[0])
    parser.add_argument("--run", required=True, help="directory of a run (runs/NAME)")
    parser.add_argument("--output", required=True, help="directory to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the matrices; default: unchanged")
    parser.add_argument("--stablehlo", action="store_true", help="write programs that run without megajax")
    parser.add_argument("--batch_size", type=int, default=1, help="with --stablehlo: sequences per batch")
    parser.add_argument(
        "--max_length", type=int, help="with --stablehlo: tokens per sequence; default: that of training"
    )
    with errors_in_one_line():
        flags = parser.parse_args(arguments)
        if flags.stablehlo:
            from megajax.convert.stablehlo import export_programs

            sizes = dict(batch_size=flags.batch_size, max_length=flags.max_length)
            step = export_programs(flags.run, flags.output, flags.step, flags.dtype, **sizes)
        else:
            step = export(flags.run, flags.output, flags.step, flags.dtype)
    print(f"{flags.output}: parameters of {flags.run}, step {step}")


if __name__ == "__main__":
    main()
