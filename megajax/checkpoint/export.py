"""Parameters alone, for serving: python -m megajax.checkpoint.export --run=DIR --output=DIR [--step=N --dtype=bfloat16]

The output is a run directory with config, tokenizer and one step without an optimizer, which infer.py reads as it is on
any mesh and train.py refuses. The layers lie in their plain order, whatever pipeline the run had. With --dtype matrices
are cast; vectors (norms, biases) stay as they are, so that serving in bfloat16 computes with the same numbers.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.layout import Rows, of_layers, stored_form
from megajax.mesh import MeshConfig, make_mesh


def export(run_dir: str | Path, output: str | Path, step: int | None = None, dtype: str | None = None) -> int:
    """Writes `output` from one step of a run (default: the newest) -> the step.

    The arrays are spread over all devices of this process, verified as they were saved, then cast. Raises ValueError
    if the output exists, or if the step is not there or damaged; then nothing is left.
    """
    run_dir, output = Path(run_dir), Path(output)
    if output.exists() or output.is_symlink():
        raise ValueError(f"output={output} exists; use another, or remove it")
    if not (run_dir / "config.json").is_file():
        raise ValueError(f"run={run_dir}: {run_dir / 'config.json'} does not exist; give the directory of a run")
    with Checkpointer(run_dir, None) as checkpointer:
        step = _find_step(checkpointer, step)
        try:
            params, meta = _read(checkpointer, step, dtype)
        except (MemoryError, jax.errors.JaxRuntimeError):  # nothing that the checkpoint could be blamed for
            raise
        except Exception as error:  # Orbax has many
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"step={step} of run={run_dir} cannot be read ({reason}); use another --step") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        new.chmod(0o755)
        with Checkpointer(new, CheckpointConfig(keep=0)) as checkpointer:
            checkpointer.write(step, {"params": params}, meta)
            checkpointer.wait()
        for file in (run_dir / "config.json", *run_dir.glob("tokenizer*"), *run_dir.glob("chat_template.jinja")):
            shutil.copyfile(file, new / file.name)
        record = {"run": str(run_dir.resolve()), "step": step, "dtype": dtype}
        (new / "exported.json").write_text(json.dumps(record, indent=2) + "\n")
        new.rename(output)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return step


def _read(checkpointer: Checkpointer, step: int, dtype: str | None):
    """-> (params, meta), the layers in their plain order."""
    meta = checkpointer.read_meta(step)
    meta.pop("digests", None)
    rows = {kind: np.array(numbers) for kind, numbers in meta.get("layer_rows", {}).items()}
    plain = {kind: np.arange(numbers.max() + 1) for kind, numbers in rows.items()}
    with ocp.StandardCheckpointer() as reader:
        on_disk = reader.metadata(checkpointer.folder / str(step) / "params").item_metadata
    if on_disk is None:
        raise ValueError("params is damaged")
    target = _target(on_disk.tree, rows, make_mesh(MeshConfig(fsdp=jax.device_count())), dtype)
    params = checkpointer.restore_params(step, stored_form(target, plain, rows), plain)
    return params, meta | {"layer_rows": {kind: numbers.tolist() for kind, numbers in plain.items()}}


def _find_step(checkpointer: Checkpointer, step: int | None) -> int:
    steps = sorted(int(path.name) for path in checkpointer.folder.glob("*") if path.name.isdecimal())
    if not steps:
        raise ValueError(f"run={checkpointer.run_dir}: no checkpoint in {checkpointer.folder}; train it first")
    if step is not None and step not in steps:
        raise ValueError(f"step={step} is not in {checkpointer.folder}; there are {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def _target(on_disk, rows: Rows, mesh: Mesh, dtype: str | None):
    """Abstract arrays of the shapes on disk, in the dtypes that are wanted, matrices split where they can be."""

    def choose(a, kind):
        is_matrix = len(a.shape) - (rows[kind].ndim if kind else 0) >= 2
        cast = dtype is not None and is_matrix and jnp.issubdtype(a.dtype, jnp.floating)
        is_split = is_matrix and a.shape[-1] % mesh.size == 0
        spec = P(*[None] * (len(a.shape) - 1), "fsdp") if is_split else P()
        return jax.ShapeDtypeStruct(a.shape, jnp.dtype(dtype if cast else a.dtype), sharding=NamedSharding(mesh, spec))

    return of_layers(choose, on_disk, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megajax.checkpoint.export", description=__doc__.partition(":")[0])
    parser.add_argument("--run", required=True, help="directory of a run (runs/NAME)")
    parser.add_argument("--output", required=True, help="directory to write")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matrices; default: as they are")
    flags = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        step = export(flags.run, flags.output, flags.step, flags.dtype)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{flags.output}: parameters of {flags.run}, step {step}")


if __name__ == "__main__":
    main()
