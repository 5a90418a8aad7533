"""Writes a run directory from a Hugging Face folder, without torch.

Memory holds parts of at most checkpoint.piecewise.PIECE_BYTES, not the model.
"""

import json
import logging
from pathlib import Path

from megajax import hub
from megajax.models.model import Model
from megajax.weights.hugging_face.adapter import open_folder
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.run_directory import new_directory, write_imported

logger = logging.getLogger("megajax")

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_folder(source: str | Path, run_dir: str | Path) -> Folder:
    """Writes a run directory with the weights of a folder as its step 0, each array in the dtype of the folder; of a
    folder of PEFT with those of its base.

    Raises ValueError if the directory exists, or for a folder that cannot be read as a whole; then nothing is left.
    """
    folder = open_folder(hub.local(source))
    config = folder.config
    tokenizer = folder.tokenizer()
    with new_directory(run_dir, "run_dir") as new:
        record = {"folder": str(folder.path.resolve()), "architecture": folder.family.architecture, "step": 0}
        model = Model(config.model, adapters=config.lora.transforms)
        write_imported(new, config, 0, folder.piecewise(model), tokenizer, record)
        if not (new / "generation_config.json").is_file():
            ids = {name: folder.options[name] for name in TOKEN_IDS if folder.options.get(name) is not None}
            write_json(new / "generation_config.json", ids)
    return folder


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
