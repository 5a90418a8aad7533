"""Options that say which layers have a window, rotary embeddings and experts, and how tokens choose experts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


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
        usual = None
        if kinds is None or self.kind == "everywhere":
            is_full = [window is None or self._is_full(layer, theirs) for layer in range(number)]
            usual = ["full_attention" if full else WINDOWED for full in is_full]
            kinds = usual if kinds is None else kinds
        _check_length("layer_types", kinds, number)
        if unknown := set(map(str, kinds)) - {"full_attention", WINDOWED}:
            raise ValueError(f"layer_types: {', '.join(sorted(unknown))} is not supported")
        if is_off and WINDOWED in kinds and theirs.get("sliding_window") is not None:
            raise ValueError("layer_types names sliding_attention, but use_sliding_window is not true; change one")
        if usual is not None and list(kinds) != usual:
            raise ValueError(f"layer_types={kinds} is not supported: sliding_window={window} applies to all layers")
        full = [kind == "full_attention" for kind in kinds]
        if window is None or all(full):
            return {"window": None}
        return {"window": window, "windows": tuple(not is_full for is_full in full) if any(full) else ()}

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
        number = ours["num_layers"]
        if self.kind == "everywhere":
            return {"sliding_window": window}
        full = [not has for has in ours["windows"]] or [window is None] * number
        kinds = {"layer_types": ["full_attention" if is_full else WINDOWED for is_full in full]}
        if self.kind in ("switched", "listed"):
            switch = {"use_sliding_window": window is not None, "sliding_window": window}
            return kinds | switch | ({} if window is None else {"max_window_layers": 0})
        is_periodic = full == [(layer + 1) % self.every == 0 for layer in range(number)]
        pattern = {"sliding_window_pattern": self.every} if is_periodic else {}
        return kinds | {"sliding_window": self.default if window is None else window} | pattern


WINDOWED = "sliding_attention"
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")


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


class NoRope:
    """no_rope_layers of SmolLM 3: 0 for a layer without rotary embedding."""

    keys = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        number = theirs["num_hidden_layers"]
        every = theirs.get("no_rope_layer_interval") or 4
        layers = theirs.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(number)]
        _check_length("no_rope_layers", layers, number)
        return {"rotary": tuple(map(bool, layers)) if not all(layers) else ()}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        layers = [int(has) for has in ours["rotary"]] or [1] * ours["num_layers"]
        return {"no_rope_layers": layers, "no_rope_layer_interval": layers.index(0) + 1 if 0 in layers else 4}


NO_ROPE = NoRope()


def _check_length(name: str, given: Any, number: int) -> None:
    if not isinstance(given, list) or len(given) != number:
        raise ValueError(f"{name} must be a list with an entry for each of the {number} layers")


class ExpertLayers:
    """decoder_sparse_step and mlp_only_layers of Qwen: every n-th layer has experts, but for the named ones."""

    keys = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        every = theirs.get("decoder_sparse_step", 1)
        dense = theirs.get("mlp_only_layers") or []
        has_experts = [(n + 1) % every == 0 and n not in dense for n in range(theirs["num_hidden_layers"])]
        return {"experts": tuple(has_experts) if not all(has_experts) else ()}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        has_experts = list(ours["experts"]) or [True] * ours["num_layers"]
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
            "moe.router.groups": (num_groups, top_groups),
            # Their bias is loaded, and goes on moving if the model is trained.
            "moe.router.bias_update_rate": 1e-3,
        }

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        num_groups, top_groups = ours["moe.router.groups"]
        theirs = {
            "num_experts_per_tok": ours["moe.router.top_k"],
            "n_group": num_groups,
            "topk_group": top_groups,
            "norm_topk_prob": ours["moe.router.top_k"] > 1,
        }
        self.read(theirs)
        return theirs
