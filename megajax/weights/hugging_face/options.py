"""Options of a config.json, each with a pair of functions that convert to fields of our config and back.

`read(theirs)` takes the whole config.json and returns fields of DecoderConfig, those of its sections as "rope.base";
`write(ours)` takes all of these fields and returns keys of config.json. Each raises ValueError, with the option and its
value, for values that the other side does not support. `keys` are the keys of config.json that `read` takes into
account; any other key must be known to change nothing (known_keys.py).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from megajax.layers.attention.rope import RAMPS
from megajax.layers.feed_forward.moe import MoeConfig, layer_pattern

REQUIRED = object()

# Activations of plain and of gated feed-forward layers, by their names in transformers' ACT2FN; the first name of an
# activation is the one that is written.
PLAIN = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
GATED = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip


class AnyOption(Protocol):
    @property
    def keys(self) -> tuple[str, ...]: ...
    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]: ...
    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]: ...


Options = tuple[AnyOption, ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """Maps a key to one of our fields, or to several with the same value."""

    theirs: str
    ours: str | tuple[str, ...]
    default: Any = REQUIRED
    """Default of transformers if config.json does not have the key."""
    values: Mapping | None = None
    """Their value -> ours, if they differ."""
    power: float = 1
    """Ours = theirs to this power."""
    also: tuple[str, ...] = ()
    """Other names of the key."""

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: theirs[name] for name in self.keys if theirs.get(name) is not None}
        if len({str(value) for value in given.values()}) > 1:
            both = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"{both} are two names of one option; remove the one that is not meant")
        value = next(iter(given.values()), theirs.get(self.theirs, self.default))
        if value is REQUIRED:
            raise ValueError(f"{self.theirs} is missing")
        if self.values is None or isinstance(value, list | dict):
            self._check_type(value)
        if self.values is not None:
            if value not in self.values:
                known = ", ".join(map(str, self.values))
                raise ValueError(f"{self.theirs}={value} is not supported; supported are {known}")
            value = self.values[value]
        elif self.power != 1 and value is not None:
            value = float(value) ** self.power
        return dict.fromkeys(self._fields, value)

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        value = ours[self._fields[0]]
        if value is None and self.default is REQUIRED:
            raise ValueError(f"model.{self._fields[0]}=None, which {self.theirs} cannot say")
        if self.values is not None:
            value = next((spelling for spelling, known in self.values.items() if known == value), None)
            if value is None:
                raise ValueError(f"model.{self._fields[0]}={ours[self._fields[0]]} has no {self.theirs}")
        elif self.power != 1 and value is not None:
            # the nearest number of 12 digits: 1 / (1 / 49) is not 49
            value = float(f"{value ** (1 / self.power):.12g}")
            if isinstance(self.default, int):
                if not value.is_integer():
                    raise ValueError(f"model.{self._fields[0]}={ours[self._fields[0]]}, for which {self.theirs} is "
                                     f"{value}, no whole number")  # fmt: skip
                value = int(value)
        return {self.theirs: value}

    def _check_type(self, value: Any) -> None:
        """Of a number or a truth value; its range is that of our field."""
        kind = int if self.default is REQUIRED else type(self.default)
        allowed = {bool: (bool,), int: (int,), float: (int, float), type(None): (int, float)}.get(kind, (str,))
        if value is not None and (not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool)):
            words = {bool: "true or false", int: "a whole number", str: "a name"}
            raise ValueError(f"{self.theirs}={value!r} must be {words.get(kind, 'a number')}")

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs, *self.also)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclasses.dataclass(frozen=True)
class Choice:
    """A key with one supported value; None counts as this value."""

    theirs: str
    value: Any

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        found = theirs.get(self.theirs)
        if found is not None and found != self.value:
            raise ValueError(f"{self.theirs}={found} is not supported; supported is {self.value}")
        return {}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclasses.dataclass(frozen=True)
class Follows:
    """A field without a key in config.json: a power of another field."""

    ours: str
    other: str
    power: float
    keys = ()

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        # embed_dim is hidden_size in all families that use this
        return {self.ours: theirs["hidden_size"] ** self.power}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {}


# ----------------------------------------------------------------------------- rotary embedding


# Keys of a scaling: theirs -> ours.
SCALINGS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", "original_max_position_embeddings": "original_length"},
    "llama3": {
        "factor": "factor", "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor", "truncate": "truncate",
    },
    "longrope": {
        "factor": "factor", "original_max_position_embeddings": "original_length", "short_factor": "short_factors",
        "long_factor": "long_factors", "attention_factor": "attention_factor",
    },
}  # fmt: skip


# Their two keys of our `ramp`.
RAMP_KEYS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


@dataclasses.dataclass(frozen=True)
class Rope:
    """rope_parameters, or rope_theta, rope_scaling and partial_rotary_factor before version 5; writes both."""

    base: float = 10_000.0
    fraction: float | None = None
    """Default of partial_rotary_factor; None: the class of transformers ignores this key."""
    interleaved: bool = False
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    """Of the base and the fraction before version 5."""
    scalings: tuple[str, ...] = tuple(SCALINGS)
    """Those that the class of transformers has."""
    original_length: int | None = None
    """Default of original_max_position_embeddings; None: max_position_embeddings."""

    @property
    def keys(self) -> tuple[str, ...]:
        new = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
        return (*new, *dict.fromkeys((*Rope.names, *self.names)))

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        # transformers takes an old rope_scaling before the new rope_parameters
        name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
        parameters = read_object(theirs, name)
        base_name, fraction_name = self.names
        given = {base_name: theirs.get(base_name, self.base), fraction_name: theirs.get(fraction_name, self.fraction)}
        base = parameters.get("rope_theta", given[base_name])
        fraction = parameters.get("partial_rotary_factor", given[fraction_name])
        for key, value in zip(Rope.names, (base, fraction), strict=True):
            if theirs.get(key, value) != value:
                raise ValueError(f"{key}={theirs[key]}, but {value} is used; remove the one that is not meant")
        found = {"rope.base": float(base), "rope.fraction": self._fraction(theirs, fraction)}
        if self.interleaved:
            found["rope.interleaved"] = True
        return found | read_scaling(name, parameters, theirs, self.scalings, self.original_length)

    def _fraction(self, theirs: Mapping[str, Any], fraction: Any) -> float:
        if self.fraction is None:
            if fraction not in (None, 1):
                raise ValueError(
                    f"partial_rotary_factor={fraction} is not supported: this class of transformers rotates whole "
                    "heads in spite of it; remove the key to do so too"
                )
            return 1.0
        width = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        _check_rotated("partial_rotary_factor", float(fraction), width)
        return float(fraction)

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        base = ours["rope.base"]
        fraction = ours["rope.fraction"]
        partial = {}
        if self.fraction is not None:
            _check_rotated("model.rope.fraction", fraction, ours["head_dim"])
            partial = {"partial_rotary_factor": fraction}
        elif fraction != 1:
            raise ValueError(f"model.rope.fraction={fraction}")
        scaling = write_scaling(ours)
        if scaling and scaling["rope_type"] not in self.scalings:
            raise ValueError(f"model.rope.scaling={scaling['rope_type']}")
        found = {"rope_theta": base, "rope_scaling": scaling, **partial}
        if self.fraction is not None:
            found |= dict(zip(self.names, (base, fraction), strict=True))
        if scaling and scaling["rope_type"] == "longrope":
            found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        return found | {"rope_parameters": {"rope_theta": base, **(scaling or {"rope_type": "default"}), **partial}}


def _check_rotated(name: str, fraction: float, head_dim: int) -> None:
    """transformers rounds an odd number of rotated entries up, and we down."""
    if (rotated := int(head_dim * fraction)) % 2:
        raise ValueError(f"{name}={fraction} rotates an odd number of entries, {rotated} of head_dim={head_dim}")


@dataclasses.dataclass(frozen=True)
class RotatedDims:
    """rotary_dim of GPT-J: the number of rotated dims of a head instead of a fraction; there are no other options."""

    default: int = 64
    keys = ("rotary_dim",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if (rotated := theirs.get("rotary_dim", self.default)) is None:
            raise ValueError("rotary_dim=None is not supported; give the number of rotated dims of a head")
        return {"rope.fraction": rotated / (theirs["n_embd"] // theirs["n_head"]), "rope.interleaved": True}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"rotary_dim": round(ours["rope.fraction"] * ours["head_dim"])}


@dataclasses.dataclass(frozen=True)
class TwoRopes:
    """Gemma 3: another base, never scaled, in the layers with a window."""

    keys = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        parameters = read_object(theirs, "rope_parameters")
        if unknown := sorted(parameters.keys() - {"full_attention", "sliding_attention"}):
            raise ValueError(f"rope_parameters: {', '.join(unknown)} is not supported beside full_attention")
        whole = read_object(parameters, "full_attention") | read_object(theirs, "rope_scaling")
        local = read_object(parameters, "sliding_attention")
        if whole.get("truncate") is False:
            raise ValueError("rope_parameters.full_attention: truncate=False is ignored by transformers; remove it")
        for found in (whole, local):
            Rope()._fraction(theirs, found.get("partial_rotary_factor"))
        if read_scaling("rope_parameters.sliding_attention", local, theirs):
            raise ValueError(
                f"rope_parameters.sliding_attention: rope_type={local.get('rope_type', local.get('type'))} is not "
                "supported; supported is default"
            )
        return {
            "rope.base": float(whole.get("rope_theta", theirs.get("rope_theta", 1e6))),
            "rope.local_base": float(local.get("rope_theta", theirs.get("rope_local_base_freq", 1e4))),
            **read_scaling("rope_parameters.full_attention", whole, theirs),
        }

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        if ours["rope.local_base"] is None:
            raise ValueError("model.rope.local_base=None: this family needs two bases")
        if ours["rope.fraction"] != 1:
            raise ValueError(f"model.rope.fraction={ours['rope.fraction']}")
        scaling = write_scaling(ours)
        return {
            "rope_theta": ours["rope.base"],
            "rope_local_base_freq": ours["rope.local_base"],
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": {"rope_theta": ours["rope.base"], **(scaling or {"rope_type": "default"})},
                "sliding_attention": {"rope_theta": ours["rope.local_base"], "rope_type": "default"},
            },
        }


ROPE = Rope()
TWO_ROPES = TwoRopes()


def read_object(theirs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """{} if it is missing or null. Raises ValueError for what is not an object."""
    found = theirs.get(name)
    if not isinstance(found, dict | None):
        raise ValueError(f"{name}={found} is not an object {{...}}")
    return found or {}


def read_scaling(
    name: str,
    scaling: Mapping[str, Any],
    theirs: Mapping[str, Any],
    supported: tuple[str, ...] = tuple(SCALINGS),
    original_length: int | None = None,
) -> dict[str, Any]:
    """scaling: rope_scaling, or rope_parameters, which also contain the base; `name` says which."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)
    if kind != "default" and kind not in supported:
        raise ValueError(f"rope_type={kind} is not supported; supported are default, {', '.join(supported)}")
    ends = RAMP_KEYS.get(kind, ())
    names = {*SCALINGS.get(kind, ()), *ends, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    names |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    if unknown := sorted(key for key, value in scaling.items() if key not in names and value is not None):
        raise ValueError(f"rope_type={kind}: {', '.join(unknown)} is not supported in {name}")
    if kind == "default":
        return {}
    known = {key: value for key, value in scaling.items() if value is not None}
    known["original_max_position_embeddings"] = _original_length(kind, known, theirs, original_length)
    if kind in ("yarn", "longrope") and "factor" not in known:
        known["factor"] = theirs["max_position_embeddings"] / known["original_max_position_embeddings"]
    if kind == "yarn" and "attention_factor" not in known and known.get("mscale") and known.get("mscale_all_dim"):
        terms = [0.1 * known[key] * math.log(known["factor"]) + 1 for key in ("mscale", "mscale_all_dim")]
        known["attention_factor"] = terms[0] / terms[1]
    if missing := [key for key in ("factor", "short_factor", "long_factor") if key in names - known.keys()]:
        raise ValueError(f"rope_type={kind} needs {', '.join(missing)} in {name}")
    found = {f"rope.{ours}": known[key] for key, ours in SCALINGS[kind].items() if key in known}
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    found |= {key: float(value) for key, value in found.items() if type(value) is int}
    found["rope.original_length"] = int(found.get("rope.original_length", 8192))
    ramp = tuple(float(known.get(key) or usual) for key, usual in zip(ends, RAMPS.get(kind, ()), strict=True))
    if ramp != RAMPS.get(kind, ()):
        found["rope.ramp"] = ramp
    return {"rope.scaling": kind, **found}


def _original_length(kind: str, scaling: Mapping[str, Any], theirs: Mapping[str, Any], default: int | None) -> Any:
    """As transformers: that beside the scaling comes before that in it, and `dynamic` reads neither."""
    longest = theirs.get("max_position_embeddings")
    inside = scaling.get("original_max_position_embeddings")
    if kind == "dynamic":
        if inside not in (None, longest):
            raise ValueError(
                f"rope_type=dynamic: original_max_position_embeddings={inside} is not supported; transformers uses "
                f"max_position_embeddings={longest} instead of it"
            )
        return longest
    return theirs.get("original_max_position_embeddings") or default or inside or longest


def write_scaling(ours: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = ours["rope.scaling"]
    if kind == "none":
        return None
    found = {name: ours[f"rope.{field}"] for name, field in SCALINGS[kind].items()}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    if kind in RAMP_KEYS:
        found |= dict(zip(RAMP_KEYS[kind], ours["rope.ramp"] or RAMPS[kind], strict=True))
    if found.get("truncate", False) is True:
        del found["truncate"]
    if kind == "dynamic":  # transformers uses max_position_embeddings and warns about other keys
        del found["original_max_position_embeddings"]
    return {"rope_type": kind, **{name: value for name, value in found.items() if value is not None}}


@dataclasses.dataclass(frozen=True)
class NoRope:
    """no_rope_layers of SmolLM 3: 0 for a layer without rotary embedding."""

    keys = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        number = theirs["num_hidden_layers"]
        every = theirs.get("no_rope_layer_interval") or 4
        layers = theirs.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(number)]
        _check_length("no_rope_layers", layers, number)
        return {"no_rope_every": _period("no_rope_layers", [not has for has in layers])}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        every = ours["no_rope_every"]
        layers = [int(not every or (layer + 1) % every != 0) for layer in range(ours["num_layers"])]
        return {"no_rope_layers": layers, "no_rope_layer_interval": every or 4}


NO_ROPE = NoRope()


def _check_length(name: str, given: Any, number: int) -> None:
    if not isinstance(given, list) or len(given) != number:
        raise ValueError(f"{name} must be a list with an entry for each of the {number} layers")


def _period(name: str, marks: Sequence[bool]) -> int | None:
    """n if exactly every n-th is marked; None if none is."""
    if not any(marks):
        return None
    every = list(marks).index(True) + 1
    if list(marks) != [(number + 1) % every == 0 for number in range(len(marks))]:
        raise ValueError(f"{name}={list(map(int, marks))} does not select every n-th layer")
    return every


# ----------------------------------------------------------------------------- windows


@dataclasses.dataclass(frozen=True)
class Window:
    """everywhere: sliding_window applies to all layers; switched: if use_sliding_window is true, to those from
    max_window_layers on; listed: if it is true, to those of layer_types; pattern: every n-th layer has full attention.
    """

    kind: Literal["everywhere", "switched", "listed", "pattern"]
    default: int | None
    every: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        # max_window_layers and use_sliding_window say nothing where they are not read
        return ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", *PATTERNS)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        window = theirs.get("sliding_window", self.default)
        is_off = self.kind in ("switched", "listed") and not theirs.get("use_sliding_window", False)
        window = None if is_off else window
        number = theirs["num_hidden_layers"]
        kinds = theirs.get("layer_types")
        if kinds is None or self.kind == "everywhere":
            is_full = [window is None or self._is_full(layer, theirs) for layer in range(number)]
            usual = ["full_attention" if full else WINDOWED for full in is_full]
            kinds = usual if kinds is None else kinds
        _check_length("layer_types", kinds, number)
        if unknown := set(map(str, kinds)) - {"full_attention", WINDOWED}:
            raise ValueError(f"layer_types: {', '.join(sorted(unknown))} is not supported")
        if is_off and WINDOWED in kinds and theirs.get("sliding_window") is not None:
            raise ValueError("layer_types names sliding_attention, but use_sliding_window is not true; change one")
        if self.kind == "everywhere" and list(kinds) != usual:
            raise ValueError(f"layer_types={kinds} is not supported: sliding_window={window} applies to all layers")
        full = [kind == "full_attention" for kind in kinds]
        if window is None or all(full):
            return {"window": None}
        return {"window": window, "full_attention_every": _period("layer_types", full)}

    def _is_full(self, layer: int, theirs: Mapping[str, Any]) -> bool:
        if self.kind == "pattern":
            for name in PATTERNS:  # of which only some classes and versions of transformers read one
                if theirs.get(name, self.every) != self.every:
                    raise ValueError(f"{name}={theirs[name]} is not supported without layer_types; give these")
            return (layer + 1) % self.every == 0
        if self.kind == "listed":
            raise ValueError("use_sliding_window=True is not supported without layer_types; give these")
        return self.kind == "switched" and layer < theirs.get("max_window_layers", 28)

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        window = ours["window"]
        every = ours["full_attention_every"]
        number = ours["num_layers"]
        if self.kind == "everywhere":
            return {"sliding_window": window}
        full = [window is None or bool(every and (layer + 1) % every == 0) for layer in range(number)]
        kinds = {"layer_types": ["full_attention" if is_full else WINDOWED for is_full in full]}
        if self.kind in ("switched", "listed"):
            switch = {"use_sliding_window": window is not None, "sliding_window": window}
            return kinds | switch | ({} if window is None else {"max_window_layers": 0})
        pattern = {"sliding_window_pattern": every} if every else {}
        return kinds | {"sliding_window": self.default if window is None else window} | pattern


WINDOWED = "sliding_attention"
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


@dataclasses.dataclass(frozen=True)
class NoWindow:
    """The keys of a window that is switched off."""

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if theirs.get("use_sliding_window"):
            raise ValueError("use_sliding_window=True is not supported; supported is False")
        if set(theirs.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"layer_types={theirs['layer_types']} is not supported; supported is full_attention")
        return {}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False}


# ----------------------------------------------------------------------------- experts


@dataclasses.dataclass(frozen=True)
class ExpertLayers:
    """decoder_sparse_step and mlp_only_layers of Qwen: every n-th layer has experts, but for the named ones."""

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        every = theirs.get("decoder_sparse_step", 1)
        dense = theirs.get("mlp_only_layers") or []
        has_experts = [(n + 1) % every == 0 and n not in dense for n in range(theirs["num_hidden_layers"])]
        return {"moe.layers": layer_pattern(has_experts)}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        moe = MoeConfig(num_experts=1, layers=ours["moe.layers"])
        has_experts = [moe.has_experts(number) for number in range(ours["num_layers"])]
        every = has_experts.index(True) + 1 if any(has_experts) else 1
        if has_experts == [(number + 1) % every == 0 for number in range(len(has_experts))]:
            return {"decoder_sparse_step": every, "mlp_only_layers": []}
        dense = [number for number, has in enumerate(has_experts) if not has]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


@dataclasses.dataclass(frozen=True)
class SigmoidRouter:
    """The router of DeepSeek-V3 and Nemotron-H: sigmoid scores, a bias for the choice alone, groups of experts.

    Here weights are normalised if a token has several experts, there if norm_topk_prob is set; a group is scored by its
    best top_k / top_groups experts here, by its best 2 there. Values for which these differ are refused.
    """

    top_k: int
    """Default of num_experts_per_tok; the next two of n_group and topk_group."""
    num_groups: int
    top_groups: int
    keys = ("num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        top_k = theirs.get("num_experts_per_tok", self.top_k)
        num_groups = theirs.get("n_group", self.num_groups)
        top_groups = theirs.get("topk_group", self.top_groups)
        is_normalised = theirs.get("norm_topk_prob", True)
        if num_groups > 1 and top_k != 2 * top_groups:
            raise ValueError(
                f"num_experts_per_tok={top_k} is not twice topk_group={top_groups}: a group is scored by its best "
                "num_experts_per_tok / topk_group experts here, and by its best 2 there"
            )
        if is_normalised != (top_k > 1):
            raise ValueError(
                f"norm_topk_prob={is_normalised} is not supported with num_experts_per_tok={top_k}; supported is "
                f"{top_k > 1}"
            )
        return {
            "moe.router.score": "sigmoid",
            "moe.router.top_k": top_k,
            "moe.router.num_groups": num_groups,
            "moe.router.top_groups": top_groups,
            # Their bias is loaded, and goes on moving if the model is trained.
            "moe.router.bias_update_rate": 1e-3,
        }

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        theirs = {
            "num_experts_per_tok": ours["moe.router.top_k"],
            "n_group": ours["moe.router.num_groups"],
            "topk_group": ours["moe.router.top_groups"],
            "norm_topk_prob": ours["moe.router.top_k"] > 1,
        }
        self.read(theirs)
        return theirs


# ----------------------------------------------------------------------------- options of single families


@dataclasses.dataclass(frozen=True)
class FalconOptions:
    """Key-value heads and parallel residuals."""

    keys = ("new_decoder_architecture", "num_ln_in_parallel_attn", "num_kv_heads", "multi_query", "parallel_attn")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if theirs.get("new_decoder_architecture", False):
            norms = theirs.get("num_ln_in_parallel_attn") or 2
            if norms != 2:
                raise ValueError(f"num_ln_in_parallel_attn={norms} is not supported with new_decoder_architecture")
            return {"num_kv_heads": theirs.get("num_kv_heads"), "parallel_residual": "two_norms"}
        heads = 1 if theirs.get("multi_query", True) else None
        parallel = "one_norm" if theirs.get("parallel_attn", True) else "none"
        return {"num_kv_heads": heads, "parallel_residual": parallel}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        is_new = ours["parallel_residual"] == "two_norms"
        return {
            "new_decoder_architecture": is_new,
            "multi_query": is_new or ours["num_kv_heads"] == 1,  # used by the old architecture only,
            "num_kv_heads": ours["num_kv_heads"] if is_new else ours["num_heads"],  # as this by the new one
            "parallel_attn": ours["parallel_residual"] != "none",
            "num_ln_in_parallel_attn": 2 if is_new else None,
        }


@dataclasses.dataclass(frozen=True)
class DeepseekOptions:
    """Which layers have experts, the width of the shared experts, and YaRN's factor on the scores."""

    keys = ("first_k_dense_replace", "n_shared_experts")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = theirs["num_hidden_layers"]
        num_dense = theirs.get("first_k_dense_replace", 3)
        shared = (theirs.get("n_shared_experts", 1) or 0) * theirs["moe_intermediate_size"]
        return {
            "moe.layers": layer_pattern([number >= num_dense for number in range(num_layers)]),
            "moe.shared_dim": shared or None,
            "attention_multiplier": self._multiplier(theirs),
        }

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        moe = MoeConfig(num_experts=1, layers=ours["moe.layers"])
        has_experts = [moe.has_experts(number) for number in range(ours["num_layers"])]
        width = ours["moe.expert_dim"]
        shared = ours["moe.shared_dim"] or 0
        if not width or shared % width:
            raise ValueError(f"model.moe.shared_dim={shared}, which is no multiple of model.moe.expert_dim={width}")
        scaling = {}
        factor = math.sqrt(ours["attention_multiplier"] * math.sqrt(self._width(ours)))
        if ours["rope.scaling"] == "yarn" and ours["rope.factor"] > 1 and not math.isclose(factor, 1, rel_tol=1e-12):
            scaling = {"mscale_all_dim": float(f"{(factor - 1) / (0.1 * math.log(ours['rope.factor'])):.12g}")}
        found = Rope().write(ours)
        for name in ("rope_scaling", "rope_parameters"):
            found[name] = found[name] and found[name] | scaling
        return found | {
            "first_k_dense_replace": has_experts.index(True) if any(has_experts) else len(has_experts),
            "n_shared_experts": shared // width,
        }

    def _multiplier(self, theirs: Mapping[str, Any]) -> float | None:
        scaling = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        if not scaling.get("mscale_all_dim"):
            return None
        width = theirs.get("qk_nope_head_dim", 128) + theirs.get("qk_rope_head_dim", 64)
        factor = max(float(scaling["factor"]), 1.0)
        return (0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1) ** 2 / math.sqrt(width)

    @staticmethod
    def _width(ours: Mapping[str, Any]) -> int:
        return ours["head_dim"] + ours["latent.rope_dim"]


falcon_options = FalconOptions()
deepseek_options = DeepseekOptions()
