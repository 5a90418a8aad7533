"""Tables of the options and tensors of Mamba-2 and Nemotron-H, used by mapping.py in both directions.

Sources: the configuration and modeling files of transformers 5, whose Nemotron-H limits time steps from below by
time_step_min.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.models.hybrid import HybridConfig
from megajax.weights.hugging_face.form import DecoderForm, Family
from megajax.weights.hugging_face.layer_options import SigmoidRouter
from megajax.weights.hugging_face.options import PLAIN, Choice, Option, Options
from megajax.weights.tensor_map import Row, linear, norm

# The letters of layers, with the fields that only these layers read.
_FIELDS = {
    "*": (
        "num_heads", "num_kv_heads", "head_dim", "qk_norm", "window",
        "attention_sinks", "attention_multiplier", "attention_soft_cap",
    ),
    "-": ("mlp_dim",),
    "-E": ("activation",),
}  # fmt: skip


class HybridForm(DecoderForm[HybridConfig]):
    """Mamba-2 and hybrids."""

    def with_sizes(self, config: HybridConfig) -> HybridConfig:
        mamba = config.mamba
        num_heads = mamba.num_heads or 2 * config.embed_dim // mamba.head_dim
        return dataclasses.replace(super().with_sizes(config), mamba=dataclasses.replace(mamba, num_heads=num_heads))

    def words(self, config: HybridConfig) -> dict[str, Any]:
        return super().words(config) | {"pattern": config.pattern, "windows": (), "rotary": (), "experts": ()}

    def pattern(self, words: Mapping[str, Any]) -> str:
        return words["pattern"]

    def canonical(self, config: HybridConfig) -> HybridConfig:
        config = super().canonical(config)
        letters = "".join(map(config.letter, range(config.num_layers)))
        absent = [names for readers, names in _FIELDS.items() if not set(readers) & set(letters)]
        unused = {name: getattr(self.default, name) for names in absent for name in names}
        read = {"qkv": "*", "attention_out": "*", "mlp": "-E"}
        biases = tuple(name for name in config.biases if name not in read or set(read[name]) & set(letters))
        mamba = dataclasses.replace(config.mamba, chunk=self.default.mamba.chunk)
        return dataclasses.replace(
            config,
            pattern=letters,
            biases=biases,
            mamba=mamba if "M" in letters else self.default.mamba,
            **unused,
        )


class OnlyMamba:
    """Every layer is a Mamba-2 layer; there is no key."""

    keys = ()

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {"pattern": "M"}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        if set(ours["pattern"]) != {"M"}:
            raise ValueError(f"model.pattern={ours['pattern']}")
        return {}


class Pattern:
    """layers_block_type, or hybrid_override_pattern of older folders; the second is written too."""

    keys = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")
    letters = {
        "linear_attention": "M",
        "mamba": "M",
        "full_attention": "*",
        "attention": "*",
        "mlp": "-",
        "moe": "E",
    }

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if "layers_block_type" in theirs:
            names = theirs["layers_block_type"]
            if unknown := sorted(set(names) - self.letters.keys()):
                raise ValueError(f"layers_block_type: {', '.join(unknown)} is not supported")
            pattern = "".join(self.letters[name] for name in names)
        else:
            pattern = theirs["hybrid_override_pattern"]
            if unknown := sorted(set(pattern) - set(self.letters.values())):
                raise ValueError(f"hybrid_override_pattern: {', '.join(unknown)} is not supported")
        if theirs.get("num_hidden_layers", len(pattern)) != len(pattern):
            raise ValueError(f"num_hidden_layers={theirs['num_hidden_layers']}, but {len(pattern)} layers are named")
        return {"pattern": pattern, "num_layers": len(pattern)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        number = ours["num_layers"]
        pattern = (ours["pattern"] * number)[:number]
        names = {letter: name for name, letter in reversed(self.letters.items())}
        if set(pattern) - names.keys():
            raise ValueError(f"model.pattern={ours['pattern']}")
        return {
            "layers_block_type": [names[letter] for letter in pattern],
            "hybrid_override_pattern": pattern,
            "num_hidden_layers": number,
        }


@dataclasses.dataclass(frozen=True)
class OfExperts:
    """Options that transformers also writes, with defaults, for a model without layers E; then they are not read."""

    options: Options

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for option in self.options for key in option.keys)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        if "E" in Pattern().read(theirs)["pattern"]:
            for option in self.options:
                found |= option.read(theirs)
        return found

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        theirs = {}
        if ours["moe.num_experts"] is not None:
            for option in self.options:
                theirs |= option.write(ours)
        return theirs


class TimeStepLimit:
    """time_step_limit: the lower and the upper limit. Infinity is what JSON has for it, or since version 5 a dict."""

    keys = ("time_step_limit",)
    infinity = {"__float__": "Infinity"}

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        low, high = theirs.get("time_step_limit") or (0.0, math.inf)
        return {"mamba.dt_min": float(low), "mamba.dt_max": None if high in (math.inf, self.infinity) else float(high)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        high = ours["mamba.dt_max"]
        return {"time_step_limit": [ours["mamba.dt_min"], self.infinity if high is None else high]}


class Expand:
    """expand: the channels of all heads over hidden_size. It follows from the heads, and must be a whole number."""

    keys = ("expand",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        channels = ours["mamba.num_heads"] * ours["mamba.head_dim"]
        if channels % ours["embed_dim"]:
            raise ValueError(f"model.mamba.num_heads={ours['mamba.num_heads']}, of which expand is no whole number")
        return {"expand": channels // ours["embed_dim"]}


_COMMON: Options = (
    Option("vocab_size", "vocab_size"),
    Option("hidden_size", "embed_dim"),
    Option("n_groups", "mamba.num_groups", 8),
    Option("conv_kernel", "mamba.conv_width", 4),
    Option("use_conv_bias", "mamba.conv_bias", True),
    Option("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Choice("use_bias", False),
)
_EXPERTS: Options = (
    Option("n_routed_experts", "moe.num_experts", 8, also=("num_local_experts",)),
    Option("moe_intermediate_size", "moe.expert_dim", 7688),
    Option("moe_shared_expert_intermediate_size", "moe.shared_dim"),  # without a default: transformers has no None
    SigmoidRouter(top_k=2, num_groups=1, top_groups=1),
    Option("routed_scaling_factor", "moe.router.scale", 1.0),
    Choice("n_shared_experts", 1),
    Choice("moe_latent_size", None),
    Choice("mlp_bias", False),
)
_ALWAYS = dict(position="none", norm="rmsnorm", bias=False)


def _mixer(theirs: str) -> Sequence[Row]:
    """Of a Mamba-2 layer."""
    ours = "layers.mamba.mixer."
    return (
        Row(f"{theirs}.in_proj.weight", tuple(ours + name for name in ("gate", "x", "B", "C", "dt")), "linear"),
        Row(f"{theirs}.conv1d.weight", tuple(ours + name for name in ("conv_x", "conv_B", "conv_C")), "taps"),
        Row(f"{theirs}.conv1d.bias", tuple(f"{ours}conv_{name}_bias" for name in ("x", "B", "C")), "linear"),
        *(Row(f"{theirs}.{name}", (ours + name,)) for name in ("A_log", "D", "dt_bias")),
        Row(f"{theirs}.norm.weight", (f"{ours}norm_scale",), "linear"),
        Row(f"{theirs}.out_proj.weight", (f"{ours}out",), "linear"),
    )


def _model(prefix: str, *, fused_experts: bool = False) -> tuple[Row, ...]:
    """fused_experts: the experts of a layer in one tensor, as transformers has them in memory."""
    layer = f"{prefix}.layers.{{}}."
    attention = "layers.attention.mixer."
    experts = "layers.moe.mixer."
    matrices = "experts.{}_proj" if fused_experts else "experts.{{}}.{}_proj.weight"
    projections = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("o_proj", "out"))
    return (
        Row(f"{prefix}.embeddings.weight", ("embedding",)),
        *norm(f"{layer}norm", "layers.*.norm"),
        *_mixer(f"{layer}mixer"),
        *(row for name, our in projections for row in linear(f"{layer}mixer.{name}", attention + our)),
        *linear(f"{layer}mixer.up_proj", "layers.dense.mixer.up"),
        *linear(f"{layer}mixer.down_proj", "layers.dense.mixer.down"),
        Row(f"{layer}mixer.gate.weight", (f"{experts}router",), "linear"),
        Row(f"{layer}mixer.gate.e_score_correction_bias", (f"{experts}router_expert_bias",)),
        *(Row(f"{layer}mixer.{matrices.format(name)}", (experts + name,), "linear") for name in ("up", "down")),
        *linear(f"{layer}mixer.shared_experts.up_proj", f"{experts}shared.up"),
        *linear(f"{layer}mixer.shared_experts.down_proj", f"{experts}shared.down"),
        *norm(f"{prefix}.norm_f", "final_norm"),
        *linear("lm_head", "head"),
    )


FAMILIES: tuple[Family, ...] = (
    # Order of preference when exporting a model without a named architecture.
    Family(
        "Mamba2ForCausalLM",
        "mamba2",
        _ALWAYS,
        (
            *_COMMON,
            OnlyMamba(),
            Option("num_hidden_layers", "num_layers", 64),
            Option("num_heads", "mamba.num_heads", 128),
            Option("head_dim", "mamba.head_dim", 64),
            Option("state_size", "mamba.state_dim", 128),
            Option("chunk_size", "mamba.chunk", 256),
            Option("initializer_range", "init_std", 0.1),
            Option("tie_word_embeddings", "tied_embeddings", False),
            Choice("hidden_act", "silu"),
            TimeStepLimit(),
            Expand(),
        ),
        _model("backbone"),
        form=HybridForm(HybridConfig()),
    ),
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        _ALWAYS | {"mamba.dt_max": None},
        (
            *_COMMON,
            Pattern(),
            Option("mamba_num_heads", "mamba.num_heads", 128),
            Option("mamba_head_dim", "mamba.head_dim", 64),
            Option("ssm_state_size", "mamba.state_dim", 128),
            Option("chunk_size", "mamba.chunk", 128),
            Option("time_step_min", "mamba.dt_min", 0.001),
            Option("num_attention_heads", "num_heads", 32),
            Option("num_key_value_heads", "num_kv_heads", 8),
            Option("head_dim", "head_dim", 128, also=("attention_head_dim",)),
            Option("max_position_embeddings", "max_positions", 4096),
            Option("intermediate_size", "mlp_dim", 21504),
            Option("mlp_hidden_act", "activation", "relu2", values=PLAIN),
            Option("attention_bias", ("qkv_bias", "attention_out_bias"), False),
            Option("mlp_bias", "mlp_bias", False),
            OfExperts(_EXPERTS),
            Option("initializer_range", "init_std", 0.02),
            Option("tie_word_embeddings", "tied_embeddings", False),
            Choice("sliding_window", None),
            Choice("mamba_hidden_act", "silu"),
            Choice("mamba_proj_bias", False),
            Choice("num_nextn_predict_layers", 0),
        ),
        _model("backbone"),
        (_model("model", fused_experts=True),),
        form=HybridForm(HybridConfig()),
    ),
)
