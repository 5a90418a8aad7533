"""Mamba-2 and hybrids: the model that Megatron's arguments describe, and the table of its parameters.

in_proj and the convolution have the names that torch_dist gives their parts: gate z, x, B, C and dt.
"""

import dataclasses
import re
from typing import Any

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.models.hybrid import HybridConfig
from megajax.ops.activation import GATED
from megajax.weights.megatron.arguments import Arguments, Shapes, decoder_model
from megajax.weights.megatron.decoders import LAYER, attention
from megajax.weights.megatron.rows import EMBEDDINGS, OUTPUT, Table, experts, feed_forward
from megajax.weights.tensor_map import Row, linear, norm

# How the names of a layer's parameters begin -> its letter, by the first that fits: those of experts also fit "mlp.".
_LAYERS = {"mixer.": "M", "mlp.experts.": "E", "mlp.": "-", "self_attention.": "*"}
_STACKS = ("mamba_stack_spec", "hybrid_stack_spec")
_GATED_NORM_EPSILON = 1e-5  # fixed in Megatron
SUPPORTED = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "spec")


def read_model(given: Arguments, shapes: Shapes) -> HybridConfig:
    """The pattern is that of the parameters, which older versions gave by ratios instead."""
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if set(given.get(name, default="")) - {*_LAYERS.values(), "|"}:
            raise given.refuse(name)
    spec = given.get("spec")
    if spec is not None and spec[-1] not in _STACKS:
        raise given.refuse("spec")
    pattern = _pattern(shapes)
    model = decoder_model(given, shapes)
    if "M" in pattern and model.norm_epsilon != _GATED_NORM_EPSILON:
        raise ValueError(
            f"layernorm_epsilon={model.norm_epsilon}: Megatron normalises the outputs of Mamba layers with "
            f"{_GATED_NORM_EPSILON}, and megajax everything with model.norm_epsilon; only {_GATED_NORM_EPSILON} can be "
            "imported"
        )
    fields: dict[str, Any] = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    moe = model.moe if "E" in pattern else MoeConfig()
    mamba = _mamba(given, shapes) if "M" in pattern else MambaConfig()
    fields |= {"kind": "hybrid", "pattern": pattern, "num_layers": len(pattern), "moe": moe, "mamba": mamba}
    return HybridConfig(**fields)


def _pattern(shapes: Shapes) -> str:
    """Raises ValueError for a layer of another kind than these."""
    letters: dict[int, str] = {}
    for name in shapes:
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            letter = next((letter for prefix, letter in _LAYERS.items() if found[2].startswith(prefix)), None)
            if letter and letters.get(int(found[1])) != "E":
                letters[int(found[1])] = letter
    missing = [n for n in range(max(letters, default=0) + 1) if n not in letters]
    if missing:
        raise ValueError(f"layer {missing[0]} has no parameters of a layer that megajax knows")
    return "".join(letters[n] for n in range(len(letters)))


def _mamba(given: Arguments, shapes: Shapes) -> MambaConfig:
    head_dim = int(given.get("mamba_head_dim", default=64))
    shape = next((shape for name, shape in shapes.items() if name.endswith(".mixer.conv1d.weight.x")), None)
    if shape is None:
        raise ValueError("no layer has mixer.conv1d.weight: the checkpoint is incomplete; copy it again")
    channels, _, conv_width = shape
    return MambaConfig(
        num_heads=channels // head_dim,
        head_dim=head_dim,
        state_dim=int(given.get("mamba_state_dim", default=128)),
        num_groups=int(given.get("mamba_num_groups", default=8)),
        conv_width=conv_width,
    )


def table(config: HybridConfig) -> Table:
    is_gated = config.activation in GATED
    return (
        *EMBEDDINGS,
        *norm(f"{LAYER}norm", "layers.mamba.norm"),
        *_mixer(f"{LAYER}mixer.", "layers.mamba.mixer."),
        *norm(f"{LAYER}input_layernorm", "layers.attention.norm"),
        *attention(config, f"{LAYER}self_attention.", "layers.attention.mixer."),
        *norm(f"{LAYER}pre_mlp_layernorm", "layers.dense.norm"),
        *feed_forward(f"{LAYER}mlp.", "layers.dense.mixer.", is_gated),
        *norm(f"{LAYER}pre_mlp_layernorm", "layers.moe.norm"),
        *experts(f"{LAYER}mlp.", "layers.moe.mixer.", is_gated),
        *norm("decoder.final_norm", "final_norm"),
        Row(OUTPUT, ("head",), "linear"),
    )


def _mixer(theirs: str, ours: str) -> Table:
    inputs = {"z": "gate", "x": "x", "B": "B", "C": "C", "dt": "dt"}
    return (
        *(Row(f"{theirs}in_proj.weight.{part}", (ours + name,), "linear") for part, name in inputs.items()),
        *(Row(f"{theirs}conv1d.weight.{part}", (f"{ours}conv_{part}",), "taps") for part in "xBC"),
        *(Row(f"{theirs}conv1d.bias.{part}", (f"{ours}conv_{part}_bias",), "linear") for part in "xBC"),
        *(Row(theirs + name, (ours + name,)) for name in ("A_log", "D", "dt_bias")),
        Row(f"{theirs}norm.weight", (f"{ours}norm_scale",), "linear"),
        *linear(f"{theirs}out_proj", f"{ours}out"),
    )
