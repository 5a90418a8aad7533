"""Recurrent and hybrid language models: a decoder whose layers follow a pattern, one letter and one branch each (Dao
and Gu 2024, https://arxiv.org/abs/2405.21060; Waleffe et al. 2024, https://arxiv.org/abs/2406.07887)."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from megajax.fields.ranges import changed_fields
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.layers.sublayer import SublayerConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig

LETTERS = {"M": "Mamba-2", "G": "gated delta net", "*": "attention", "-": "MLP", "E": "experts"}
RECURRENT = {"M": "mamba", "G": "delta_net"}
"""Letters of recurrent layers -> the sections that configure them."""


@dataclasses.dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """As DecoderConfig, but each of the num_layers layers is one branch with one norm."""

    kind: Literal["hybrid"] = "hybrid"  # pyrefly: ignore[bad-override]: a hybrid is no DecoderConfig by its kind alone
    """The family of the model."""
    pattern: str = "M"
    """Kind of each layer, repeated over the model: M (Mamba-2), G (gated delta net), * (attention), - (MLP) or E
    (experts, model.moe)."""
    mamba: MambaConfig = MambaConfig()
    """Layers M."""
    delta_net: DeltaNetConfig = DeltaNetConfig()
    """Layers G."""

    @property
    def num_branches(self) -> int:
        return self.num_layers

    def letter(self, number: int) -> str:
        """Of the layer with this number."""
        return self.pattern[number % len(self.pattern)]

    def attention_letter(self, number: int) -> str:
        return "f" if self.window is None else "w"

    def has_experts(self, number: int) -> bool:
        return self.letter(number) == "E"

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[SublayerConfig, ...]]:
        return {"layers": tuple(self._sublayer(number, execution) for number in range(self.num_layers))}

    def _sublayer(self, number: int, execution: ExecutionConfig) -> SublayerConfig:
        letter = self.letter(number)
        if letter in RECURRENT:
            branch = getattr(self, RECURRENT[letter]).mixer(
                embed_dim=self.embed_dim,
                norm_epsilon=self.norm_epsilon,
                context=execution.context_attention,
                init_std=self.init_std,
                out_init_std=self.out_init_std,
            )
        elif letter == "*":
            branch = self._attention(number, execution)
        else:
            branch = self._feed_forward(number, execution)
        layer = SublayerConfig(
            branch=branch,
            norm=self.norm_config,
            context=execution.context_attention,
            residual_multiplier=self.residual_multiplier,
            dropout=self.dropout,
        )
        return layer.saving(execution.recompute_of(number), execution.recompute_modules, execution.offload)

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        self._check_pattern()
        self.check_one_branch()
        super().check(mesh, sequence_length, execution)

    def _check_pattern(self) -> None:
        if "|" in self.pattern:
            layout = "|".join("t" * len(stage) for stage in self.pattern.split("|"))
            letters = self.pattern.replace("|", "")
            raise ValueError(
                f"model.pattern={self.pattern}: pipeline stages belong to the mesh; use --model.pattern='{letters}' "
                f"--mesh.pipeline_layout='{layout}'"
            )
        unknown = sorted(set(self.pattern) - LETTERS.keys())
        if unknown or not self.pattern:
            known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            raise ValueError(f"model.pattern={self.pattern!r} must be letters of layers: {known}")
        if self.num_layers % len(self.pattern):
            length = len(self.pattern)
            raise ValueError(
                f"model.num_layers={self.num_layers} is not a multiple of the {length} letters of model.pattern; use "
                f"--model.num_layers={-(-self.num_layers // length) * length}"
            )
        if ("E" in self.pattern) != (self.moe.num_experts is not None):
            raise ValueError(
                f"model.moe.num_experts={self.moe.num_experts} and model.pattern={self.pattern} contradict each other: "
                "layers E are those with experts; change one of them"
            )
        for letter, section in RECURRENT.items():
            given = getattr(self, section)
            default = type(given)()
            if letter not in self.pattern and (changed := changed_fields(given, default)):
                defaults = " ".join(f"--model.{section}.{name}={getattr(default, name)}" for name in changed)
                raise ValueError(
                    f"model.{section}: {', '.join(changed)} set, but model.pattern={self.pattern} has no {letter}; "
                    f"use {defaults}"
                )

    def _check_heads(self) -> None:
        if "*" in self.pattern:
            super()._check_heads()
