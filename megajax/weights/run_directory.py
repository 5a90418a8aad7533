"""Writes run directories that hold only parameters: exports, and what other frameworks have trained."""

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import piecewise
from megajax.checkpoint.layout import recorded
from megajax.checkpoint.piecewise import Index, PiecewiseArray
from megajax.config import Config
from megajax.data.tokenizers.load import BESIDE_TOKENIZER, save_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.models.model import Model
from megajax.terminal.progress import progress_bar


@contextlib.contextmanager
def new_directory(path: str | Path, field: str) -> Generator[Path]:
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
        **recorded(Model(config.model).layer_rows),
        "tokenizer": tokenizer.identity,
        "eod_id": tokenizer.eod_id,
    }
    with progress_bar("import") as advance:
        total = 2 * sum(array.nbytes for array in jax.tree.leaves(arrays))  # each is read twice

        def shown(array: PiecewiseArray) -> PiecewiseArray:
            def read(index: Index) -> np.ndarray:
                piece = array.read(index)
                advance(piece.nbytes, total)
                return piece

            return dataclasses.replace(array, read=read)

        piecewise.write(new, step, jax.tree.map(shown, arrays), meta)
    describe(new, config, record)
    save_tokenizer(tokenizer, new)


def describe(new: Path, config: Config, record: dict[str, Any]) -> None:
    """record: written to exported.json, which marks the run as not trainable."""
    (new / "config.json").write_text(config.to_json())
    (new / "exported.json").write_text(json.dumps(record, indent=2) + "\n")


def copy_tokenizer(run_dir: Path, new: Path) -> None:
    for file in (*run_dir.glob("tokenizer*"), *(run_dir / name for name in BESIDE_TOKENIZER)):
        if file.is_file():
            shutil.copyfile(file, new / file.name)
