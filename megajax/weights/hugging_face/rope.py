"""Options of rotary embeddings: rope_parameters, and the keys that it had before version 5."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megajax.layers.attention.rope import RAMPS
from megajax.weights.hugging_face.options import read_object

# Keys of a scaling: theirs -> ours.
SCALINGS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", "original_max_position_embeddings": "original_length"},
    "llama3": {
        "factor": "factor", "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor",
    },
    "longrope": {
        "factor": "factor", "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor",
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
        found = {"rope.base": float(base), "rope.fraction": self.read_fraction(theirs, fraction)}
        if self.interleaved:
            found["rope.interleaved"] = True
        return found | read_scaling(name, parameters, theirs, self.scalings, self.original_length)

    def read_fraction(self, theirs: Mapping[str, Any], fraction: Any) -> float:
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
            raise ValueError(f"model.rope.scaling={ours['rope.scaling']}")
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
            Rope().read_fraction(theirs, found.get("partial_rotary_factor"))
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


@dataclasses.dataclass(frozen=True)
class Mrope(Rope):
    """Qwen-VL: pairs rotate by time, row or column."""

    sections: tuple[int, int, int] = (16, 24, 24)
    """Default of mrope_section."""
    interleaved_sections: bool = False

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
        parameters = read_object(theirs, name)
        sections = parameters.get("mrope_section", self.sections)
        if not isinstance(sections, list | tuple) or len(sections) != 3:
            raise ValueError(f"{name}: mrope_section={sections} must be a list of three numbers")
        if parameters.get("mrope_interleaved", self.interleaved_sections) != self.interleaved_sections:
            raise ValueError(
                f"{name}: mrope_interleaved={not self.interleaved_sections} is not supported; supported is "
                f"{self.interleaved_sections}"
            )
        rest = {key: value for key, value in parameters.items() if not key.startswith("mrope_")}
        for key in ("type", "rope_type"):
            if rest.get(key) == "mrope":
                rest[key] = "default"
        found = super().read({**theirs, name: rest})
        return found | {"rope.sections": tuple(sections), "rope.sections_interleaved": self.interleaved_sections}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        if ours["rope.sections"] is None:
            raise ValueError("model.rope.sections=None")
        mrope: dict[str, Any] = {"mrope_section": list(ours["rope.sections"])}
        if self.interleaved_sections:
            mrope["mrope_interleaved"] = True
        found = super().write(ours)
        found["rope_parameters"] |= mrope
        # In the form before version 5.
        found["rope_scaling"] = {"type": "mrope", **(found["rope_scaling"] or {"rope_type": "default"}), **mrope}
        return found


ROPE = Rope()
TWO_ROPES = TwoRopes()


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
    names |= {"mscale", "mscale_all_dim", "truncate"} if kind == "yarn" else set()
    names |= {"short_factor", "long_factor"} if kind == "longrope" else set()
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
    found |= {key: float(value) for key, value in found.items() if type(value) is int}
    found["rope.original_length"] = int(known["original_max_position_embeddings"] or 8192)
    ramp = tuple(float(known.get(key) or usual) for key, usual in zip(ends, RAMPS.get(kind, ()), strict=True))
    if ramp != RAMPS.get(kind, ()):
        found["rope.ramp"] = ramp
    if kind == "longrope":
        found["rope.factors"] = (*map(float, known["short_factor"]), *map(float, known["long_factor"]))
    return {"rope.scaling": "yarn_exact" if known.get("truncate") is False else kind, **found}


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
    exact = {}
    if kind == "yarn_exact":
        kind = "yarn"
        exact = {"truncate": False}
    found = {name: ours[f"rope.{field}"] for name, field in SCALINGS[kind].items()} | exact
    if kind == "longrope":
        factors = list(ours["rope.factors"])
        middle = len(factors) // 2
        found |= {"short_factor": factors[:middle], "long_factor": factors[middle:]}
    if kind in RAMP_KEYS:
        found |= dict(zip(RAMP_KEYS[kind], ours["rope.ramp"] or RAMPS[kind], strict=True))
    if kind == "dynamic":  # transformers uses max_position_embeddings and warns about other keys
        del found["original_max_position_embeddings"]
    return {"rope_type": kind, **{name: value for name, value in found.items() if value is not None}}
