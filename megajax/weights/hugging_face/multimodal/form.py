"""Converts between a config.json and our config of decoders that read images, with what is beside them: the image
processor, and which tensors a folder may lack or have in vain.
"""

import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megajax.images.processor_files import FILE, NESTED_FILE, PROCESSORS, read_rule, write_rule
from megajax.images.rules import ImageRule
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.weights.hugging_face.form import DecoderForm
from megajax.weights.hugging_face.multimodal.options import Text, text_config
from megajax.weights.hugging_face.multimodal.tensors import TextRows
from megajax.weights.hugging_face.translate import nearest_family
from megajax.weights.tensor_map import Row

logger = logging.getLogger("megajax")


class MultimodalForm(DecoderForm[MultimodalConfig]):
    def __init__(self, text: Text, processor: str):
        """processor: of images, one of images/processor_files.py."""
        super().__init__(MultimodalConfig(vision=TowerConfig(image=PROCESSORS[processor])))
        self.text = text
        self.processor = processor

    def read_beside(self, config: MultimodalConfig, folder: Path) -> MultimodalConfig:
        image = config.vision.image
        if not any((folder / name).is_file() for name in (FILE, NESTED_FILE)):
            logger.warning("%s has no %s: images are prepared as %s does by default", folder, FILE, self.processor)
            return _with_room(config)
        rule = read_rule(folder, image.patch_size, image.merge)
        if rule.resize not in ("pixels", "patches") and rule.size != image.size:
            raise ValueError(f"image_size={image.size}, but the images of {FILE} have {rule.size} pixels a side")
        return _with_room(dataclasses.replace(config, vision=dataclasses.replace(config.vision, image=rule)))

    def write_beside(self, config: MultimodalConfig, folder: Path) -> None:
        rule = config.vision.image
        fitting = [name for name, known in PROCESSORS.items() if known.resize == rule.resize]
        write_rule(folder, rule, self.processor if self.processor in fitting else fitting[0])

    def without_training(self, config: MultimodalConfig) -> MultimodalConfig:
        vision = dataclasses.replace(config.vision, blocks=1, patches=config.vision.merged)
        return dataclasses.replace(super().without_training(config), vision=vision)

    def canonical(self, config: MultimodalConfig) -> MultimodalConfig:
        """Without what images/processor_files.py reads."""
        config = super().canonical(config)
        names = ("size", "patch_size", "merge", "pinpoints")
        known = ImageRule(**{name: getattr(config.vision.image, name) for name in names})
        return dataclasses.replace(config, vision=dataclasses.replace(config.vision, image=known))

    def rows(self, config: MultimodalConfig, table: Sequence[Any]) -> list[Row]:
        found = text_config(self.words(config))
        of_text = nearest_family(self.text.families, found).weights
        return [row for part in table for row in (part.rows(of_text) if isinstance(part, TextRows) else [part])]

    def in_files(self, config: MultimodalConfig, names: Collection[str]) -> MultimodalConfig:
        """Where the head is tied by default, config.json may leave out that it is not."""
        has_head = self.text.ties and any(name.endswith("lm_head.weight") for name in names)
        return dataclasses.replace(config, tied_embeddings=config.tied_embeddings and not has_head)

    def copied(self, config: MultimodalConfig, name: str) -> str | None:
        return "embedding" if config.tied_embeddings and name.endswith("lm_head.weight") else None

    def is_unused(self, config: MultimodalConfig, name: str) -> bool:
        """Of a tower the layers after those of the model, what follows them, and the pooling head."""
        _, is_tower, inside = name.partition("vision_tower.")
        words = inside.removeprefix("vision_model.").split(".")
        if not is_tower:
            return False
        if words[:2] == ["encoder", "layers"]:
            return int(words[2]) >= config.vision.num_layers
        return words[0] == "head" or (words[0] == "post_layernorm" and not config.vision.final_norm)


def _with_room(config: MultimodalConfig) -> MultimodalConfig:
    """With blocks that hold a view: of images of any size, one of 64 by 64 patches."""
    vision = config.vision
    side = 64 if vision.image.resize == "pixels" else vision.table
    patches = side**2 + (vision.merged if vision.class_token else 0)
    return dataclasses.replace(config, vision=dataclasses.replace(vision, patches=max(patches, vision.patches)))
