"""Writes a run directory from a Hugging Face folder, without torch.

Memory holds parts of at most checkpoint.piecewise.PIECE_BYTES, not the model.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from megajax.checkpoint.piecewise import PiecewiseArray
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.run_directory import new_directory, write_imported

logger = logging.getLogger("megajax")

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_folder(source: str | Path, run_dir: str | Path) -> Folder:
    """Writes a run directory with the weights of a folder as its step 0, each array in the dtype of the folder.

    Raises ValueError if the directory exists, or for a folder that cannot be read as a whole; then nothing is left.
    """
    folder = Folder(source)
    config = folder.config
    tokenizer = folder.tokenizer()
    with new_directory(run_dir, "run_dir") as new:
        model = Model(config.model)
        record = {"folder": str(folder.path.resolve()), "architecture": folder.family.architecture, "step": 0}
        with progress_bar("import") as advance:
            write_imported(new, config, 0, _piecewise(folder, model, advance), tokenizer, record)
        if not (new / "generation_config.json").is_file():
            ids = {name: folder.options[name] for name in TOKEN_IDS if folder.options.get(name) is not None}
            write_json(new / "generation_config.json", ids)
    return folder


def _piecewise(folder: Folder, model: Model, advance: Callable[[int, int], None]) -> dict:
    sizes = []

    def array_of(path, leaf):
        name = name_of(path)
        numbers = folder.map.layers_of(name)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            piece = folder.read(name, numbers, index, folder.dtype(name))
            advance(piece.nbytes, 2 * sum(sizes))  # each is read twice
            return piece

        array = PiecewiseArray(leaf.shape, folder.dtype(name), read)
        sizes.append(array.nbytes)
        return array

    return jax.tree_util.tree_map_with_path(array_of, model.abstract_weights)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """advance(bytes that are done, bytes in all), shown as a bar on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, advance=done, total=total)

        yield advance
