"""The encoder of a Hugging Face folder, with which a model that reads images or sound can start: of a CLIP, a SigLIP or
a SigLIP 2 (NaFlex), with or without their text encoder, of a LLaVA or a Gemma 3, or of a Whisper.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from megajax.checkpoint.layout import Rows
from megajax.config import differences
from megajax.media.kinds import AUDIO, IMAGE, Kind
from megajax.models.audio_tower import sinusoids
from megajax.models.modality import ModalityConfig
from megajax.models.multimodal import MultimodalConfig
from megajax.weights.hugging_face.folder import is_folder, problems_in
from megajax.weights.hugging_face.form import fields_of, replaced
from megajax.weights.hugging_face.multimodal.families import CLIP, NAFLEX, SIGLIP, WHISPER
from megajax.weights.hugging_face.multimodal.form import MultimodalForm
from megajax.weights.hugging_face.multimodal.options import Section, Text
from megajax.weights.hugging_face.multimodal.tensors import vit, whisper
from megajax.weights.hugging_face.options import read_object
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.parameter_reader import ParameterReader
from megajax.weights.tensor_map import Row, Tensor, WeightMap

PATCH = "embeddings.patch_embedding.weight"
PREFIXES = ("", "vision_model.", "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.")
POSITIONS = "encoder.embed_positions.weight"
WHISPER_PREFIXES = ("model.", "")


@dataclasses.dataclass(frozen=True)
class TowerFormat:
    section: Section
    kind: Kind
    processor: str | None
    """Of images."""
    first: str
    """A tensor that all files have, after one of `prefixes`."""
    prefixes: tuple[str, ...]

    def rows(self, prefix: str) -> tuple[Row, ...]:
        if self.kind == AUDIO:
            return whisper(prefix)
        return vit(prefix, "linear" if self.section is NAFLEX else "patches")


FORMATS = {
    form.section.model_type: form
    for form in (
        TowerFormat(CLIP, IMAGE, "CLIPImageProcessor", PATCH, PREFIXES),
        TowerFormat(SIGLIP, IMAGE, "SiglipImageProcessor", PATCH, PREFIXES),
        TowerFormat(NAFLEX, IMAGE, "Siglip2ImageProcessor", PATCH, PREFIXES),
        TowerFormat(WHISPER, AUDIO, None, POSITIONS, WHISPER_PREFIXES),
    )
}


class TowerFolder:
    """Raises ValueError for a folder without such an encoder, and for options that are not supported."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        file = self.path / "config.json"
        if not is_folder(path):
            raise ValueError(f"{file} is not the config.json of a Hugging Face model; give the folder of one")
        with problems_in(file):
            options = json.loads(file.read_text())
            inside = read_object(options, "vision_config") or options
            model_type = inside.get("model_type", f"{options.get('model_type')}_vision_model")
            if model_type not in FORMATS:
                raise ValueError(f"model_type={model_type} has no tower; supported are {', '.join(FORMATS)}")
            self.form = FORMATS[model_type]
            words = self.form.section.read({"vision_config": inside})
            found = replaced(MultimodalConfig(), words)
            if self.form.processor is not None:
                of_images = MultimodalForm(Text(()), self.form.processor)
                found = of_images.read_beside(replaced(of_images.default, words), self.path)
                words |= fields_of(found.vision.image, "vision.image.")
        self.section = self.form.kind.section
        """Of the model: vision or audio."""
        self._words = {name: value for name, value in words.items() if name != f"{self.section}.num_layers"}
        self.tower: ModalityConfig = getattr(found, self.section)
        """For a new model: whole, with the projector of its class's defaults."""
        self.files = TensorFiles(self.path)

    def differences(self, model: MultimodalConfig) -> list[str]:
        """Fields of a model's encoder that the folder has otherwise; it may use fewer of the layers."""
        theirs, ours = (getattr(config, self.section) for config in (replaced(model, self._words), model))
        return differences(theirs, ours, f"model.{self.section}.")

    def weights(self, model: MultimodalConfig) -> "TowerWeights":
        return TowerWeights(self, model)


class TowerWeights:
    """The parameters of a model that a folder has: its encoder, without the projector."""

    def __init__(self, folder: TowerFolder, model: MultimodalConfig):
        """Raises ValueError, naming the tensor, for one that is missing or of another shape, and for positions of sound
        that are not Whisper's."""
        form = folder.form
        forms = folder.files.forms
        prefix = next((prefix for prefix in form.prefixes if prefix + form.first in forms), "")
        encoder: ModalityConfig = getattr(model, folder.section)
        if not encoder.num_layers:
            raise ValueError(
                f"model.{folder.section}.num_layers=0 reads no {form.kind.plural}; use "
                f"--model.{folder.section}.num_layers={folder.tower.num_layers}"
            )
        small = replaced(model, {f"{folder.section}.{form.kind.values}": encoder.merged})
        map = WeightMap(small, form.rows(prefix), {}, form.section.model_type, whole=False)
        for tensor in map.tensors:
            found = list(forms[tensor.name].shape) if tensor.name in forms else "missing"
            if found != list(tensor.shape):
                raise ValueError(
                    f"{folder.path}: tensor {tensor.name} is {found}, but model.{folder.section} implies "
                    f"{list(tensor.shape)}"
                )
        if form.kind == AUDIO:
            _check_positions(folder, prefix + form.first)

        def describe(tensor: Tensor) -> str:
            return f"{tensor.name} in {folder.path}"

        self.section = folder.section
        self.names = {name for name, _ in map.source}
        self._reader = ParameterReader(
            map, lambda tensor: folder.files[tensor.name], lambda tensor: forms[tensor.name].dtype, describe
        )

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        """As WeightSource, of some of `names`."""
        return self._reader.restore(abstract, layer_rows)


def _check_positions(folder: TowerFolder, name: str) -> None:
    """Whisper's table of positions is not trained, and not read: it must be what the model computes."""
    if name not in folder.files.forms:
        raise ValueError(f"{folder.path}: tensor {name} is missing")
    table = np.asarray(folder.files[name], np.float32)
    if not np.allclose(table, sinusoids(np.arange(len(table)), table.shape[1]), atol=2e-3):  # in float16, say
        raise ValueError(f"{folder.path}: tensor {name} has other positions than the sinusoids of Whisper")
