"""Rotary position embedding (Su et al. 2021), its Llama-3 scaling and YaRN (Peng et al. 2023).

Dimensions: B batch, T sequence, N heads, H head dim, R rotated part of H. Halves are rotated, not neighbours:
(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), with x1 the first R / 2 entries and x2 the next.
"""

import dataclasses
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.ranges import PositiveFloat, PositiveInt, Range


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    base: Annotated[float, Range(above=1)] = 10000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    fraction: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Part of the head dim that is rotated."""
    scaling: Literal["none", "llama3", "yarn"] = "none"
    """How wavelengths are stretched for sequences beyond original_length."""
    factor: Annotated[float, Range(at_least=1)] = 8.0
    """Stretch: how many times longer than original_length."""
    original_length: PositiveInt = 8192
    """Sequence length of the first training (Llama 3: 8192, YaRN: 4096)."""
    low_frequency: PositiveFloat = 1.0
    """Llama 3: wavelengths above original_length / low_frequency are stretched fully."""
    high_frequency: PositiveFloat = 4.0
    """Llama 3: wavelengths below original_length / high_frequency stay."""
    beta_fast: PositiveFloat = 32.0
    """YaRN: dims that turn more often than this within original_length stay."""
    beta_slow: PositiveFloat = 1.0
    """YaRN: dims that turn less often than this are stretched fully."""

    def check(self) -> None:
        """Raises ValueError if the two ends of the scaling are not in order."""
        self._check_order("llama3", "low_frequency", "high_frequency")
        self._check_order("yarn", "beta_slow", "beta_fast")

    def _check_order(self, scaling: str, low: str, high: str) -> None:
        if self.scaling == scaling and getattr(self, low) >= getattr(self, high):
            raise ValueError(
                f"model.rope.{low}={getattr(self, low)} must be below model.rope.{high}={getattr(self, high)}; "
                f"{getattr(RopeConfig, low)} and {getattr(RopeConfig, high)} are usual"
            )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float64 [R / 2], radians a position."""
        rotated = int(head_dim * self.fraction) // 2 * 2
        plain = self.base ** (-np.arange(0, rotated, 2) / rotated)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain, rotated)
        return plain

    @property
    def concentration(self) -> float:
        """Factor on cos and sin that keeps the entropy of the attention (YaRN, equation 22); 1 otherwise."""
        return 0.1 * math.log(self.factor) + 1.0 if self.scaling == "yarn" and self.factor > 1 else 1.0

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_length * plain / (2 * math.pi)
        keep = np.clip((turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: np.ndarray, rotated: int) -> np.ndarray:
        def dim_with(turns: float) -> float:
            return rotated * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(math.floor(dim_with(self.beta_fast)), 0)
        high = min(math.ceil(dim_with(self.beta_slow)), rotated - 1)
        stretch = np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1.0 - stretch) + plain / self.factor * stretch


def rope_tables(config: RopeConfig, head_dim: int, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [B, T, R / 2], of int32 positions."""
    frequencies = jnp.asarray(config.inverse_frequencies(head_dim), jnp.float32)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * config.concentration, jnp.sin(angles) * config.concentration


def apply_rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R entries of each head by the tables of rope_tables, in float32 -> x's dtype."""
    half = cos.shape[-1]
    x32 = x_BTNH.astype(jnp.float32)
    first = x32[..., :half]
    second = x32[..., half : 2 * half]
    rest = x_BTNH[..., 2 * half :]
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTNH.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned
