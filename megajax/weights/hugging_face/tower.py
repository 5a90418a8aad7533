"""The tower of a Hugging Face folder, with which a model that reads images can start: of a CLIP, a SigLIP or a SigLIP 2
(NaFlex), with or without their text encoder, or of a LLaVA or a Gemma 3.
"""

import dataclasses
import json
from pathlib import Path

from megajax.checkpoint.layout import Rows
from megajax.config import differences
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.weights.hugging_face.folder import is_folder, problems_in
from megajax.weights.hugging_face.form import fields_of, replaced
from megajax.weights.hugging_face.multimodal import CLIP, NAFLEX, SIGLIP, MultimodalForm, Text, vit
from megajax.weights.hugging_face.options import read_object
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.parameter_reader import ParameterReader
from megajax.weights.tensor_map import Tensor, WeightMap

# With the image processor of each.
SECTIONS = {
    CLIP.model_type: (CLIP, "CLIPImageProcessor"),
    SIGLIP.model_type: (SIGLIP, "SiglipImageProcessor"),
    NAFLEX.model_type: (NAFLEX, "Siglip2ImageProcessor"),
}
PREFIXES = ("", "vision_model.", "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.")


class TowerFolder:
    """Raises ValueError for a folder without such a tower, and for options that are not supported."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        file = self.path / "config.json"
        if not is_folder(path):
            raise ValueError(f"{file} is not the config.json of a Hugging Face model; give the folder of one")
        with problems_in(file):
            options = json.loads(file.read_text())
            inside = read_object(options, "vision_config") or options
            self.kind = inside.get("model_type", f"{options.get('model_type')}_vision_model")
            if self.kind not in SECTIONS:
                raise ValueError(f"model_type={self.kind} has no tower; supported are {', '.join(SECTIONS)}")
            section, processor = SECTIONS[self.kind]
            words = section.read({"vision_config": inside})
            form = MultimodalForm(Text(()), processor)
            found = form.read_beside(replaced(form.default, words), self.path).vision
        image = fields_of(found.image, "vision.image.")
        self._words = {name: value for name, value in (words | image).items() if name != "vision.num_layers"}
        self.tower: TowerConfig = found
        """For a new model: whole, with the projector of TowerConfig()."""
        self.files = TensorFiles(self.path)

    def differences(self, model: MultimodalConfig) -> list[str]:
        """Fields of a model's tower that the folder has otherwise; it may use fewer of the layers."""
        return differences(replaced(model, self._words).vision, model.vision, "model.vision.")

    def weights(self, model: MultimodalConfig) -> "TowerWeights":
        return TowerWeights(self, model)


class TowerWeights:
    """The parameters of a model that a folder has: its tower, without the projector."""

    def __init__(self, folder: TowerFolder, model: MultimodalConfig):
        """Raises ValueError, naming the tensor, for one that is missing or of another shape."""
        forms = folder.files.forms
        patch = "embeddings.patch_embedding.weight"
        prefix = next((prefix for prefix in PREFIXES if prefix + patch in forms), "")
        rows = vit(prefix, "linear" if folder.kind == NAFLEX.model_type else "patches")
        whole = dataclasses.replace(model, vision=dataclasses.replace(model.vision, patches=model.vision.merged))
        map = WeightMap(whole, rows, {}, folder.kind, whole=False)
        for tensor in map.tensors:
            found = list(forms[tensor.name].shape) if tensor.name in forms else "missing"
            if found != list(tensor.shape):
                raise ValueError(
                    f"{folder.path}: tensor {tensor.name} is {found}, but model.vision implies {list(tensor.shape)}"
                )

        def describe(tensor: Tensor) -> str:
            return f"{tensor.name} in {folder.path}"

        self.names = {name for name, _ in map.source}
        self._reader = ParameterReader(
            map, lambda tensor: folder.files[tensor.name], lambda tensor: forms[tensor.name].dtype, describe
        )

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        """As WeightSource, of some of `names`."""
        return self._reader.restore(abstract, layer_rows)
