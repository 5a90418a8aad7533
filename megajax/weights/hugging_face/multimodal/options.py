"""Options of the config.json of decoders that read images, each with a pair of functions that convert to words of our
model and back (hugging_face/options.py).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from megajax.models.decoder import DecoderConfig
from megajax.weights.hugging_face.form import DecoderForm, Family
from megajax.weights.hugging_face.known_keys import check_keys
from megajax.weights.hugging_face.options import Options, read_object
from megajax.weights.hugging_face.translate import nearest_family, read_options, write_options

TIED = "tie_word_embeddings"
# What the sections of published files leave out.
LLAMA_SIZES = dict(
    hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
)  # fmt: skip
SIZES = {
    "llama": LLAMA_SIZES,
    "mistral": LLAMA_SIZES | dict(intermediate_size=14336, num_key_value_heads=8),
    "gemma3_text": dict(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=262208, max_position_embeddings=131072,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Text:
    """text_config: that of a decoder; in old files of Qwen its keys stand beside the others."""

    families: tuple[Family, ...]
    ties: bool = False
    """Default of tie_word_embeddings."""

    @property
    def keys(self) -> tuple[str, ...]:
        inside = [key for family in self.families for option in family.options for key in option.keys]
        return ("text_config", TIED, *inside)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        inside = read_object(theirs, "text_config")
        if not inside:
            inside = {key: theirs[key] for key in self.keys if key in theirs}
            inside["model_type"] = self.families[0].model_type
        kind = inside.get("model_type", self.families[0].model_type)
        family = next((family for family in self.families if family.model_type == kind), None)
        if family is None:
            known = ", ".join(family.model_type for family in self.families)
            raise ValueError(f"text_config: model_type={kind} is not supported; supported are {known}")
        tied = theirs.get(TIED, self.ties) or inside.get(TIED, False)
        found = read_options(family, SIZES.get(kind, {}) | inside | {TIED: tied})
        words = family.form.words(found)
        del words["kind"]
        return words

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        found = text_config(ours)
        written = write_options(nearest_family(self.families, found), found)
        del written["architectures"]
        return {"text_config": written, TIED: ours["tied_embeddings"]}


@dataclasses.dataclass(frozen=True)
class Section:
    """vision_config."""

    model_type: str
    always: Mapping[str, Any]
    options: Options

    keys = ("vision_config",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        inside = read_object(theirs, "vision_config")
        if not inside:  # the defaults of a model are not those of its tower
            raise ValueError("vision_config is missing")
        check_keys(self.options, self.model_type, self.model_type, inside)
        found = dict(self.always)
        for option in self.options:
            found |= option.read(inside)
        return found

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        inside: dict[str, Any] = {"model_type": self.model_type}
        for option in self.options:
            inside |= option.write(ours)
        return {"vision_config": inside}


@dataclasses.dataclass(frozen=True)
class LlavaTower:
    """A CLIP or a SigLIP, and which of its layers the text reads."""

    clip: Section
    siglip: Section
    keys = ("vision_config", "vision_feature_layer", "vision_feature_select_strategy")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        inside = read_object(theirs, "vision_config")
        kind = inside.get("model_type", self.clip.model_type)
        if kind not in (self.clip.model_type, self.siglip.model_type):
            raise ValueError(
                f"vision_config: model_type={kind} is not supported; supported are {self.clip.model_type}, "
                f"{self.siglip.model_type}"
            )
        is_clip = kind == self.clip.model_type
        found = (self.clip if is_clip else self.siglip).read(theirs)
        layer = theirs.get("vision_feature_layer", -2)
        if not isinstance(layer, int):
            raise ValueError(f"vision_feature_layer={layer} is not supported; supported is one layer")
        strategy = theirs.get("vision_feature_select_strategy", "default")
        wanted = "default" if is_clip else "full"
        if strategy != wanted:
            raise ValueError(
                f"vision_feature_select_strategy={strategy} is not supported with {kind}; supported is {wanted}"
            )
        # The embeddings are the first of the hidden states.
        number = layer if layer >= 0 else found["vision.num_layers"] + 1 + layer
        return found | {"vision.num_layers": number}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        is_clip = ours["vision.class_token"]
        written = (self.clip if is_clip else self.siglip).write(ours)
        strategy = "default" if is_clip else "full"
        return written | {"vision_feature_layer": -1, "vision_feature_select_strategy": strategy}


@dataclasses.dataclass(frozen=True)
class Side:
    """image_size and patch_size, which give the side of the table of positions."""

    image_size: int
    patch_size: int
    keys = ("image_size", "patch_size")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        image_size = self._side(theirs, "image_size")
        patch_size = self._side(theirs, "patch_size")
        sizes = {"vision.image.size": image_size, "vision.image.patch_size": patch_size}
        return sizes | {"vision.table": image_size // patch_size}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"image_size": ours["vision.image.size"], "patch_size": ours["vision.image.patch_size"]}

    def _side(self, theirs: Mapping[str, Any], name: str) -> int:
        """Some files give height and width."""
        found = theirs.get(name, getattr(self, name))
        sides = found if isinstance(found, list) else [found]
        if len(set(sides)) != 1:
            raise ValueError(f"{name}={found} is not supported; supported are squares")
        return sides[0]


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A list of whole numbers."""

    theirs: str
    ours: str
    default: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        found = theirs.get(self.theirs, self.default)
        if not isinstance(found, list | tuple) or not all(isinstance(number, int) for number in found):
            raise ValueError(f"{self.theirs}={found} must be a list of whole numbers")
        return {self.ours: tuple(found)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {self.theirs: list(ours[self.ours])}


@dataclasses.dataclass(frozen=True)
class WindowSide:
    """window_size of Qwen2.5-VL, in pixels; ours in patches."""

    window_size: int
    patch_size: int
    keys = ("window_size",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        side = theirs.get("window_size", self.window_size)
        square = theirs.get("patch_size", self.patch_size) * theirs.get("spatial_merge_size", 2)
        if side % square:
            raise ValueError(f"window_size={side} must be a multiple of {square} pixels, of which one token is made")
        return {"vision.window": side // theirs.get("patch_size", self.patch_size)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"window_size": ours["vision.window"] * ours["vision.image.patch_size"]}


@dataclasses.dataclass(frozen=True)
class TableEntries:
    """The number of entries of a square table."""

    theirs: str
    default: int

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        number = theirs.get(self.theirs, self.default)
        side = math.isqrt(number)
        if side * side != number:
            raise ValueError(f"{self.theirs}={number} must be a square number")
        return {"vision.table": side}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {self.theirs: ours["vision.table"] ** 2}


class Downsampling:
    """downsample_ratio of InternVL; ours is the side of the squares that become one token."""

    keys = ("downsample_ratio",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        ratio = theirs.get("downsample_ratio", 0.5)
        if ratio <= 0 or not (1 / ratio).is_integer():
            raise ValueError(f"downsample_ratio={ratio} must be 1 divided by a whole number")
        return {"vision.image.merge": int(1 / ratio)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"downsample_ratio": 1 / ours["vision.image.merge"]}


class Pinpoints:
    """image_grid_pinpoints of LLaVA-NeXT, pairs of height and width."""

    keys = ("image_grid_pinpoints",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        pairs = theirs.get("image_grid_pinpoints", [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]])
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"image_grid_pinpoints={pairs} must be a list of pairs of height and width")
        return {"vision.image.pinpoints": tuple(side for pair in pairs for side in pair)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        sides = ours["vision.image.pinpoints"]
        return {"image_grid_pinpoints": [list(pair) for pair in zip(sides[::2], sides[1::2], strict=True)]}


class GemmaTokens:
    """mm_tokens_per_image of Gemma 3, from which the side of the squares that are averaged follows."""

    keys = ("mm_tokens_per_image",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        vision = read_object(theirs, "vision_config")
        side = vision.get("image_size", 224) // vision.get("patch_size", 16)
        number = theirs.get("mm_tokens_per_image", 256)
        if number < 1 or side % math.isqrt(number) or math.isqrt(number) ** 2 != number:
            raise ValueError(
                f"mm_tokens_per_image={number} must be a square number whose root divides the {side} patches of a side"
            )
        return {"vision.image.merge": side // math.isqrt(number)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"mm_tokens_per_image": (ours["vision.table"] // ours["vision.image.merge"]) ** 2}


@dataclasses.dataclass(frozen=True)
class Computed:
    """A word that follows from other keys."""

    ours: str
    value: Callable[[Mapping[str, Any]], Any]
    keys = ()

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {self.ours: self.value(theirs)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class Unread:
    """Keys of what the text does not read, or of how texts and images become tokens and patches."""

    keys: tuple[str, ...]
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.written)


def text_config(words: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of the words of a multimodal model."""
    default = DecoderConfig()
    names = DecoderForm(default).words(default).keys() - {"kind"}
    return DecoderForm(default).config({name: words[name] for name in names})
