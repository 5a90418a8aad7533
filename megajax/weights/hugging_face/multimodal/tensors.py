"""Tables of the tensors of decoders that read images, and of encoders of images and sound.

Tensors have the names of the files on the hub; those that transformers 5 writes are read too.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megajax.weights.tensor_map import Layout, Row, linear, norm

_L = "vision_layers.*."
_BIAS = "vision.patch_bias"
_MOST_DEEP = 16


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
    projectors = {"merger": "project"} | {f"deepstack_merger_list.{n}": f"deep_{n}" for n in range(_MOST_DEEP)}
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


def _others(table: Callable[..., tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
    """As transformers 5 writes them, and as it has them in memory."""
    in_memory = ("model.vision_tower.", "model.vision_tower.vision_model.")
    return (
        table("vision_tower.", _ON_HUB),
        *(table(tower, _IN_MEMORY, "model.") for tower in in_memory),
    )


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
LLAVA = _llava(_HUB_TOWER, _ON_HUB)
LLAVA_OTHERS = _others(_llava)
GEMMA = _gemma(_HUB_TOWER, _ON_HUB)
GEMMA_OTHERS = _others(_gemma)
QWEN2 = _qwen("visual.", TextRows("model.", "lm_head."), *_QWEN2_NAMES)
QWEN2_OTHERS = (_qwen("model.visual.", _IN_MEMORY, *_QWEN2_NAMES),)
QWEN3 = _qwen("model.visual.", _IN_MEMORY, *_QWEN3_NAMES)
INTERN = _intern("", _ON_HUB)
INTERN_OTHERS = (_intern("model.", _IN_MEMORY),)
