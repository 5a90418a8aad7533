"""Tables of the options of decoders that read images, used by mapping.py in both directions.

A config.json has a section for the text, which is that of a decoder of hugging_face/families.py, and one for the tower.
Only what the text reads is kept: layers of a CLIP after the one whose output it takes, and the head of a SigLIP, are
not. How images become patches is in another file (images/processor_files.py).

Sources: the configuration and modeling files of transformers 5.
"""

from collections.abc import Mapping
from typing import Any

from megajax.weights.hugging_face import families, weights
from megajax.weights.hugging_face.families import ATTENTION_BIAS, HEAD_DIM, LLAMA, RMS, RMS_EPSILON
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.layer_options import Window
from megajax.weights.hugging_face.multimodal import tensors
from megajax.weights.hugging_face.multimodal.form import MultimodalForm
from megajax.weights.hugging_face.multimodal.options import (
    SIZES,
    Computed,
    Downsampling,
    GemmaTokens,
    LlavaTower,
    Numbers,
    Pinpoints,
    Section,
    Side,
    TableEntries,
    Text,
    Unread,
    WindowSide,
)
from megajax.weights.hugging_face.options import GATED, PLAIN, REQUIRED, Choice, Option, Options, read_object
from megajax.weights.hugging_face.rope import Mrope

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

FAMILIES: tuple[Family, ...] = (
    Family(
        "LlavaForConditionalGeneration",
        "llava",
        {},
        _LLAVA,
        tensors.LLAVA,
        tensors.LLAVA_OTHERS,
        MultimodalForm(_LLAVA_TEXT, "CLIPImageProcessor"),
    ),
    Family(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        {"vision.newline": True},
        (*_LLAVA, Pinpoints()),
        tensors.LLAVA,
        tensors.LLAVA_OTHERS,
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
        tensors.GEMMA,
        tensors.GEMMA_OTHERS,
        MultimodalForm(_GEMMA_TEXT, "Gemma3ImageProcessor"),
    ),
    Family(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {},
        (_QWEN2_TOWER, _QWEN2_TEXT, *_QWEN),
        tensors.QWEN2,
        tensors.QWEN2_OTHERS,
        MultimodalForm(_QWEN2_TEXT, "Qwen2VLImageProcessor"),
    ),
    Family(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {},
        (_QWEN3_TOWER, _QWEN3_TEXT, *_QWEN),
        tensors.QWEN3,
        (),
        MultimodalForm(_QWEN3_TEXT, "Qwen2VLImageProcessor"),
    ),
    Family(
        "InternVLForConditionalGeneration",
        "internvl",
        {"vision.project_norm": "merged", "vision.project_norm_epsilon": 1e-5},
        _INTERN,
        tensors.INTERN,
        tensors.INTERN_OTHERS,
        MultimodalForm(_INTERN_TEXT, "GotOcr2ImageProcessor"),
    ),
)
