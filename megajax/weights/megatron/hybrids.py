"""Mamba-2 and hybrids: the model that Megatron's arguments describe, and the table of its parameters.

in_proj and the convolution have the names that torch_dist gives their parts: gate z, x, B, C and dt.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.models.hybrid import HybridConfig
from megajax.weights.megatron.arguments import Arguments, decoder_model
from megajax.weights.megatron.decoders import attention, mixture, mlp, outside_of_layers
from megajax.weights.megatron.entries import LAYER, Entry, Table, linear, norm

# How the names of a layer's parameters begin -> its letter, by the first that fits: those of experts also fit "mlp.".
_LAYERS = {"mixer.": "M", "mlp.experts.": "E", "mlp.": "-", "self_attention.": "*"}
_STACKS = ("mamba_stack_spec", "hybrid_stack_spec")
_GATED_NORM_EPSILON = 1e-5  # fixed in Megatron
SUPPORTED = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "spec")


def read_model(given: Arguments, shapes: Mapping[str, tuple[int, ...]]) -> HybridConfig:
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
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)} | {"kind": "hybrid"}
    moe = dataclasses.replace(model.moe, layers="e") if "E" in pattern else MoeConfig()
    mamba = _mamba(given, shapes) if "M" in pattern else MambaConfig()
    return HybridConfig(**fields | {"pattern": pattern, "num_layers": len(pattern), "moe": moe, "mamba": mamba})


def _pattern(shapes: Mapping[str, tuple[int, ...]]) -> str:
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


def _mamba(given: Arguments, shapes: Mapping[str, tuple[int, ...]]) -> MambaConfig:
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
    found = outside_of_layers(config, "decoder.final_norm")
    kinds = {
        "M": ("mamba", "norm", _mixer),
        "*": ("attention", "input_layernorm", attention),
        "-": ("dense", "pre_mlp_layernorm", mlp),
        "E": ("moe", "pre_mlp_layernorm", mixture),
    }
    for letter, (kind, norm_name, branch) in kinds.items():
        layers = [n for n in range(config.num_layers) if config.letter(n) == letter]
        if layers:
            layer = norm(config.norm_config, "norm", f"{LAYER}{norm_name}", config.embed_dim) + branch(config, "mixer/")
            found += [entry.of_layers(f"layers/{kind}", layers) for entry in layer]
    return found


def _mixer(config: HybridConfig, ours: str) -> Table:
    D = config.embed_dim
    mamba = config.mamba
    heads = mamba.num_heads or 2 * D // mamba.head_dim
    theirs = f"{LAYER}mixer."
    channels = {"x": (heads, mamba.head_dim), "B": (mamba.num_groups, mamba.state_dim)}
    channels["C"] = channels["B"]
    found = []
    for part, name, outputs in (
        ("z", "gate", channels["x"]),
        *((name, name, outputs) for name, outputs in channels.items()),
        ("dt", "dt", (heads,)),
    ):
        (entry,) = linear(ours + name, f"{theirs}in_proj", (D,), outputs, has_bias=False)
        found.append(dataclasses.replace(entry, theirs=f"{theirs}in_proj.weight.{part}"))
    for name, outputs in channels.items():
        found += _taps(mamba, f"{ours}conv_{name}", theirs, name, outputs)
    found += [Entry((ours + name,), theirs + name, (heads,)) for name in ("A_log", "D", "dt_bias")]
    found.append(_vector(f"{ours}norm_scale", f"{theirs}norm.weight", channels["x"]))
    return found + linear(f"{ours}out", f"{theirs}out_proj", channels["x"], (D,), has_bias=False)


def _taps(mamba: MambaConfig, ours: str, theirs: str, part: str, outputs: tuple[int, int]) -> Table:
    """Of the convolution, in Megatron [channels, 1, W]."""
    W = mamba.conv_width
    shape = (outputs[0] * outputs[1], 1, W)

    def split(taps):
        return (taps.T.reshape(W, *outputs),)

    def join(taps):
        return taps.reshape(shape[::-1]).T

    found = [Entry((ours,), f"{theirs}conv1d.weight.{part}", shape, split, join)]
    if mamba.conv_bias:
        found.append(_vector(f"{ours}_bias", f"{theirs}conv1d.bias.{part}", outputs))
    return found


def _vector(ours: str, theirs: str, outputs: tuple[int, int]) -> Entry:
    return Entry((ours,), theirs, (outputs[0] * outputs[1],), lambda b: (b.reshape(outputs),), np.ravel)
