"""Tables of the options and tensors of decoders that read images, used by mapping.py in both directions.

A config.json has a section for the text, which is that of a decoder of families.py, and one for the tower. Only what
the text reads is kept: layers of a CLIP after the one whose output it takes, and the head of a SigLIP, are not. How
images become patches is in another file (images/processor_files.py).

Sources: the configuration and modeling files of transformers 5. Tensors have the names of the files on the hub; those
that transformers 5 writes are read too.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.images.processor_files import FILE, NESTED_FILE, PROCESSORS, read_rule, write_rule
from megajax.images.rules import ImageRule
from megajax.models.decoder import DecoderConfig
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.weights.hugging_face import families, weights
from megajax.weights.hugging_face.families import ATTENTION_BIAS, HEAD_DIM, LLAMA, RMS, RMS_EPSILON
from megajax.weights.hugging_face.form import DecoderForm, Family
from megajax.weights.hugging_face.known_keys import check_keys
from megajax.weights.hugging_face.layer_options import Window
from megajax.weights.hugging_face.options import GATED, PLAIN, REQUIRED, Choice, Option, Options, read_object
from megajax.weights.hugging_face.rope import Mrope
from megajax.weights.hugging_face.translate import nearest_family, read_options, write_options
from megajax.weights.tensor_map import Layout, Row, linear, norm

logger = logging.getLogger("megajax")
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
class TextRows:
    """In a table of tensors: those of the text, with the names of its own family but for these prefixes."""

    model: str
    """Instead of "model."."""
    head: str
    """Instead of "lm_head."."""

    def rows(self, table: Sequence[Row]) -> list[Row]:
        def renamed(name: str) -> str:
            if name.startswith("model."):
                return self.model + name.removeprefix("model.")
            return self.head + name.removeprefix("lm_head.")

        return [dataclasses.replace(row, theirs=renamed(row.theirs)) for row in table]


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


def text_config(words: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of the words of a multimodal model."""
    default = DecoderConfig()
    names = DecoderForm(default).words(default).keys() - {"kind"}
    return DecoderForm(default).config({name: words[name] for name in names})


# ----------------------------------------------------------------------------- options

_PREFIX = "vision."
_ACTIVATION = "vision.activation"
_EPSILON = "vision.norm_epsilon"


def _sizes(*names: str, defaults: tuple[Any, ...] = (REQUIRED,) * 4) -> Options:
    """The keys of width, feed-forward width, number of layers and of heads."""
    ours = ("embed_dim", "mlp_dim", "num_layers", "num_heads")
    return tuple(
        Option(name, _PREFIX + word, default) for name, word, default in zip(names, ours, defaults, strict=True)
    )


_VIT_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_VIT = _sizes(*_VIT_SIZES, defaults=(768, 3072, 12, 12))
CLIP = Section(
    "clip_vision_model",
    {
        "vision.class_token": True,
        "vision.patch_bias": False,
        "vision.embedding_norm": True,
        "vision.final_norm": False,
    },
    (
        *_VIT,
        Option("hidden_act", _ACTIVATION, "quick_gelu", values=PLAIN | {"quick_gelu": "quick_gelu"}),
        Option("layer_norm_eps", _EPSILON, 1e-5),
        Choice("num_channels", 3),
        Side(224, 32),
    ),
)
_SIGLIPS: Options = (
    *_VIT,
    Option("hidden_act", _ACTIVATION, "gelu_pytorch_tanh", values=PLAIN),
    Option("layer_norm_eps", _EPSILON, 1e-6),
    Choice("num_channels", 3),
    Unread(("vision_use_head",), {"vision_use_head": False}),  # the files lack it
)
_SIGLIP_OPTIONS: Options = (*_SIGLIPS, Side(224, 16))
SIGLIP = Section("siglip_vision_model", {"vision.final_norm": True}, _SIGLIP_OPTIONS)
NAFLEX = Section(
    "siglip2_vision_model",
    {"vision.final_norm": True, "vision.table_corners": False},
    (*_SIGLIPS, Option("patch_size", "vision.image.patch_size", 16), TableEntries("num_patches", 256)),
)
_INTERNVIT = Section(
    "internvl_vision",
    {
        "vision.class_token": True,
        "vision.branch_scales": True,
        "vision.final_norm": False,
        _EPSILON: 1e-6,
    },
    (
        *_sizes(*_VIT_SIZES, defaults=(1024, 4096, 24, 16)),
        Option("hidden_act", _ACTIVATION, "gelu", values=PLAIN),
        Option("norm_type", "vision.norm", "layer_norm", values={"layer_norm": "layernorm", "rms_norm": "rmsnorm"}),
        Option("attention_bias", "vision.qkv_bias", False),
        Option("use_qk_norm", "vision.qk_norm", False),
        Choice("layer_norm_eps", 1e-6),  # that of use_qk_norm, whatever the key says
        Choice("num_channels", 3),
        Choice("use_mask_token", False),
        Choice("use_absolute_position_embeddings", True),
        Choice("use_mean_pooling", True),
        Side(448, 14),
    ),
)
WHISPER = Section(
    "whisper",
    {},
    (
        *(
            Option(theirs, f"audio.{ours}", default)
            for theirs, ours, default in (
                ("d_model", "embed_dim", 384),
                ("encoder_layers", "num_layers", 4),
                ("encoder_attention_heads", "num_heads", 6),
                ("encoder_ffn_dim", "mlp_dim", 1536),
                ("num_mel_bins", "mels", 80),
                ("max_source_positions", "positions", 1500),
            )
        ),
        Option("activation_function", "audio.activation", "gelu", values=PLAIN),
    ),
)
_LLAVA_TOWER = LlavaTower(CLIP, Section("siglip_vision_model", {"vision.final_norm": False}, _SIGLIP_OPTIONS))
_LLAVA_TEXT = Text(tuple(family for family in families.FAMILIES if family.weights is weights.LLAMA))
_INTERN_TEXT = Text(
    tuple(family for kind in ("qwen2", "qwen3", "llama") for family in families.FAMILIES if family.model_type == kind),
    ties=True,
)
_GEMMA_TEXT = Text(tuple(family for family in families.FAMILIES if family.model_type == "gemma3_text"), ties=True)
_QWEN2_TEXT = Text((
    Family(
        "Qwen2_5_VLTextModel",
        "qwen2_5_vl_text",
        RMS | dict(qkv_bias=True),
        (*LLAMA, HEAD_DIM, RMS_EPSILON, Mrope(sections=(16, 24, 24)), Window("switched", default=4096)),
        weights.LLAMA,
    ),
))  # fmt: skip
_QWEN3_TEXT = Text((
    Family(
        "Qwen3VLTextModel",
        "qwen3_vl_text",
        RMS | dict(qk_norm=True),
        (
            *LLAMA,
            HEAD_DIM,
            RMS_EPSILON,
            ATTENTION_BIAS,
            Mrope(base=500_000.0, sections=(24, 20, 20), interleaved_sections=True),
        ),
        weights.LLAMA,
    ),
))  # fmt: skip


def _qwen_tower(model_type: str, always: Mapping[str, Any], patch_size: int, *options: Any) -> Section:
    common = {
        "vision.frames": 2,
        "vision.rotary": True,
        "vision.final_norm": False,
        "vision.project_norm": "patch",
        _EPSILON: 1e-6,
    }
    return Section(
        model_type,
        {**common, **always},
        (
            *_sizes("hidden_size", "intermediate_size", "depth", "num_heads"),
            Option("patch_size", "vision.image.patch_size", patch_size),
            Option("spatial_merge_size", "vision.image.merge", 2),
            Option("out_hidden_size", "embed_dim"),
            Choice("temporal_patch_size", 2),
            Choice("in_channels", 3),
            Choice("rope_parameters", {"rope_theta": 10000.0, "rope_type": "axial"}),
            *options,
        ),
    )


_QWEN2_TOWER = _qwen_tower(
    "qwen2_5_vl_vision",
    {"vision.norm": "rmsnorm", "vision.project_norm_kind": "rmsnorm", "vision.patch_bias": False},
    14,
    Option("hidden_act", _ACTIVATION, "silu", values=GATED),
    Numbers("fullatt_block_indexes", "vision.full_layers", (7, 15, 23, 31)),
    WindowSide(112, 14),
)
_QWEN3_TOWER = _qwen_tower(
    "qwen3_vl_vision",
    {},
    16,
    Option("hidden_act", _ACTIVATION, "gelu_pytorch_tanh", values=PLAIN),
    Numbers("deepstack_visual_indexes", "vision.deep_layers", (8, 16, 24)),
    TableEntries("num_position_embeddings", 2304),
)


def _text_width(theirs: Mapping[str, Any]) -> int:
    inside = read_object(theirs, "text_config")
    return inside.get("hidden_size") or SIZES[inside.get("model_type", "llama")]["hidden_size"]


def _merged_width(theirs: Mapping[str, Any]) -> int:
    vision = read_object(theirs, "vision_config")
    return vision["hidden_size"] * vision.get("spatial_merge_size", 2) ** 2


_LLAVA: Options = (
    _LLAVA_TOWER,
    _LLAVA_TEXT,
    Option("image_token_index", "image_token", 32000, also=("image_token_id",)),
    Option("projector_hidden_act", "vision.project_activation", "gelu", values=PLAIN),
    Option("multimodal_projector_bias", "vision.project_bias", True),
    Computed("vision.project_dim", _text_width),
)
_INTERN: Options = (
    _INTERNVIT,
    _INTERN_TEXT,
    Option("image_token_id", "image_token", 151667),
    Option("projector_hidden_act", "vision.project_activation", "gelu", values=PLAIN),
    Choice("vision_feature_layer", -1),
    Choice("vision_feature_select_strategy", "default"),
    Downsampling(),
    Computed("vision.project_dim", _text_width),
)
_QWEN: Options = (
    Option("image_token_id", "image_token", 151655),
    Computed("vision.project_dim", _merged_width),
    Unread(("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")),
)

# ----------------------------------------------------------------------------- tensors

_L = "vision_layers.*."
_BIAS = "vision.patch_bias"


def vit(prefix: str, patch: Layout = "patches") -> tuple[Row, ...]:
    """Of a CLIP or a SigLIP. patch: layout of the embedding of patches; in SigLIP 2 it is linear."""
    embeddings = f"{prefix}embeddings."
    layer = prefix + "encoder.layers.{}."
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    attention = [linear(f"{layer}self_attn.{name}", f"{_L}attention.{ours}") for name, ours in names.items()]
    return (
        Row(embeddings + "class_embedding", ("vision.class_token",)),
        Row(embeddings + "patch_embedding.weight", ("vision.patch",), patch),
        Row(embeddings + "patch_embedding.bias", (_BIAS,)),
        Row(embeddings + "position_embedding.weight", ("vision.table",)),
        *norm(prefix + "pre_layrnorm", "vision.embedding_norm"),
        *norm(layer + "layer_norm1", _L + "attention_norm"),
        *(row for rows in attention for row in rows),
        *norm(layer + "layer_norm2", _L + "mlp_norm"),
        *linear(layer + "mlp.fc1", _L + "mlp.up"),
        *linear(layer + "mlp.fc2", _L + "mlp.down"),
        *norm(prefix + "post_layernorm", "vision.final_norm"),
    )


def whisper(prefix: str) -> tuple[Row, ...]:
    """Of the encoder of a Whisper; its keys have no bias, its positions no parameter of ours."""
    encoder = f"{prefix}encoder."
    layer = encoder + "layers.{}."
    ours = "audio_layers.*."
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    attention = [linear(f"{layer}self_attn.{name}", f"{ours}attention.{word}") for name, word in names.items()]
    return (
        Row(encoder + "conv1.weight", ("audio.first",), "patches"),
        Row(encoder + "conv1.bias", ("audio.first_bias",)),
        Row(encoder + "conv2.weight", ("audio.second",), "patches"),
        Row(encoder + "conv2.bias", ("audio.second_bias",)),
        *norm(layer + "self_attn_layer_norm", ours + "attention_norm"),
        *(row for rows in attention for row in rows),
        *norm(layer + "final_layer_norm", ours + "mlp_norm"),
        *linear(layer + "fc1", ours + "mlp.up"),
        *linear(layer + "fc2", ours + "mlp.down"),
        *norm(encoder + "layer_norm", "audio.final_norm"),
    )


def _llava(tower: str, text: TextRows, prefix: str = "") -> tuple[Any, ...]:
    return (
        *vit(tower),
        *linear(f"{prefix}multi_modal_projector.linear_1", "vision.project.up"),
        *linear(f"{prefix}multi_modal_projector.linear_2", "vision.project.down"),
        Row(f"{prefix}image_newline", ("vision.newline",)),
        text,
    )


def _intern(prefix: str, text: TextRows) -> tuple[Any, ...]:
    embeddings = f"{prefix}vision_tower.embeddings."
    layer = prefix + "vision_tower.encoder.layer.{}."
    projector = f"{prefix}multi_modal_projector."
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "projection_layer": "out"}
    attention = [linear(f"{layer}attention.{name}", f"{_L}attention.{ours}") for name, ours in names.items()]
    return (
        Row(embeddings + "cls_token", ("vision.class_token",), "batched"),
        Row(embeddings + "patch_embeddings.projection.weight", ("vision.patch",), "patches"),
        Row(embeddings + "patch_embeddings.projection.bias", (_BIAS,)),
        Row(embeddings + "position_embeddings", ("vision.table",), "batched"),
        *norm(layer + "layernorm_before", _L + "attention_norm"),
        *(row for rows in attention for row in rows),
        *norm(layer + "attention.q_norm", _L + "attention.query_norm"),
        *norm(layer + "attention.k_norm", _L + "attention.key_norm"),
        Row(layer + "lambda_1", (_L + "attention_scale",)),
        *norm(layer + "layernorm_after", _L + "mlp_norm"),
        *linear(layer + "mlp.fc1", _L + "mlp.up"),
        *linear(layer + "mlp.fc2", _L + "mlp.down"),
        Row(layer + "lambda_2", (_L + "mlp_scale",)),
        *norm(projector + "layer_norm", "vision.project.norm"),
        *linear(projector + "linear_1", "vision.project.up"),
        *linear(projector + "linear_2", "vision.project.down"),
        text,
    )


def _gemma(tower: str, text: TextRows, prefix: str = "") -> tuple[Any, ...]:
    projector = f"{prefix}multi_modal_projector."
    return (
        *vit(tower),
        Row(projector + "mm_input_projection_weight", ("vision.project.down",), "conv1d"),
        *norm(projector + "mm_soft_emb_norm", "vision.project.norm"),
        text,
    )


def _qwen(prefix: str, text: TextRows, mlp: Mapping[str, str], merger: Mapping[str, str]) -> tuple[Any, ...]:
    """mlp, merger: {their name: ours}."""
    layer = prefix + "blocks.{}."
    of_mlp = [linear(f"{layer}mlp.{name}", f"{_L}mlp.{ours}") for name, ours in mlp.items()]
    projectors = {"merger": "project"} | {f"deepstack_merger_list.{n}": f"deep_{n}" for n in range(MOST_DEEP)}
    projected = [
        rows
        for theirs, projector in projectors.items()
        for name, ours in merger.items()
        for rows in (norm if ours == "norm" else linear)(f"{prefix}{theirs}.{name}", f"vision.{projector}.{ours}")
    ]
    parts = [f"{_L}attention.{name}" for name in ("query", "key", "value")]
    return (
        Row(prefix + "patch_embed.proj.weight", ("vision.patch",), "patches"),
        Row(prefix + "patch_embed.proj.bias", (_BIAS,)),
        Row(prefix + "pos_embed.weight", ("vision.table",)),
        *norm(layer + "norm1", _L + "attention_norm"),
        *linear(layer + "attn.qkv", *parts),
        *linear(layer + "attn.proj", _L + "attention.out"),
        *norm(layer + "norm2", _L + "mlp_norm"),
        *(row for rows in of_mlp for row in rows),
        *projected,
        text,
    )


MOST_DEEP = 16
_ON_HUB = TextRows("language_model.model.", "language_model.lm_head.")
_IN_MEMORY = TextRows("model.language_model.", "lm_head.")
_HUB_TOWER = "vision_tower.vision_model."
_QWEN2_NAMES = (
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"ln_q": "norm", "mlp.0": "up", "mlp.2": "down"},
)
_QWEN3_NAMES = (
    {"linear_fc1": "up", "linear_fc2": "down"},
    {"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"},
)


def _others(table: Callable[..., tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """As transformers 5 writes them, and as it has them in memory."""
    in_memory = ("model.vision_tower.", "model.vision_tower.vision_model.")
    return (
        table("vision_tower.", _ON_HUB),
        *(table(tower, _IN_MEMORY, "model.") for tower in in_memory),
    )


FAMILIES: tuple[Family, ...] = (
    Family(
        "LlavaForConditionalGeneration",
        "llava",
        {},
        _LLAVA,
        _llava(_HUB_TOWER, _ON_HUB),
        _others(_llava),
        MultimodalForm(_LLAVA_TEXT, "CLIPImageProcessor"),
    ),
    Family(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        {"vision.newline": True},
        (*_LLAVA, Pinpoints()),
        _llava(_HUB_TOWER, _ON_HUB),
        _others(_llava),
        MultimodalForm(_LLAVA_TEXT, "LlavaNextImageProcessor"),
    ),
    Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "vision.merged_by_mean": True,
            "vision.project_norm": "merged",
            "vision.project_norm_kind": "rmsnorm_1p",
            "vision.project_bias": False,
            "image_attention": "bidirectional",
        },
        (
            SIGLIP,
            _GEMMA_TEXT,
            Option("image_token_index", "image_token", 262_144, also=("image_token_id",)),
            GemmaTokens(),
        ),
        _gemma(_HUB_TOWER, _ON_HUB),
        _others(_gemma),
        MultimodalForm(_GEMMA_TEXT, "Gemma3ImageProcessor"),
    ),
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {},
        (_QWEN2_TOWER, _QWEN2_TEXT, *_QWEN),
        _qwen("visual.", TextRows("model.", "lm_head."), *_QWEN2_NAMES),
        (_qwen("model.visual.", _IN_MEMORY, *_QWEN2_NAMES),),
        MultimodalForm(_QWEN2_TEXT, "Qwen2VLImageProcessor"),
    ),
    Family(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {},
        (_QWEN3_TOWER, _QWEN3_TEXT, *_QWEN),
        _qwen("model.visual.", _IN_MEMORY, *_QWEN3_NAMES),
        (),
        MultimodalForm(_QWEN3_TEXT, "Qwen2VLImageProcessor"),
    ),
    Family(
        "InternVLForConditionalGeneration",
        "internvl",
        {"vision.project_norm": "merged", "vision.project_norm_epsilon": 1e-5},
        _INTERN,
        _intern("", _ON_HUB),
        (_intern("model.", _IN_MEMORY),),
        MultimodalForm(_INTERN_TEXT, "GotOcr2ImageProcessor"),
    ),
)
