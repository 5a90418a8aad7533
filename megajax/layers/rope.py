"""Rotary position embedding (Su et al. 2021), and its scalings for longer sequences: linear (Chen et al. 2023), dynamic
NTK, YaRN (Peng et al. 2023), Llama 3's and LongRoPE (Ding et al. 2024).

Dimensions: B batch, T sequence, N heads, H head dim, R rotated part of H. Each pair of entries is rotated,
(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): x1 the first R / 2 entries and x2 the next, or, interleaved, x1 the even
ones of R and x2 the odd ones.
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
    interleaved: bool = False
    """Entries 2 i and 2 i + 1 are a pair (GPT-J), instead of i and i + R / 2 (GPT-NeoX)."""
    local_base: Annotated[float, Range(above=1)] | None = None
    """Base of the layers with a window, whose wavelengths are then never stretched (Gemma 3); None: as all others."""
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    """How wavelengths are stretched for sequences beyond original_length."""
    factor: Annotated[float, Range(at_least=1)] = 8.0
    """Stretch: how many times longer than original_length."""
    attention_factor: PositiveFloat | None = None
    """Factor on cos and sin. None: YaRN 0.1 ln(factor) + 1, LongRoPE sqrt(1 + ln(factor) / ln(original_length)), 1
    otherwise."""
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
    truncate: bool = True
    """YaRN: the two ends of the ramp between them are rounded outwards to whole dims."""
    length: PositiveInt | None = None
    """Dynamic, LongRoPE: tokens of the longest sequence, for which the wavelengths are chosen; None = original_length.
    They do not depend on the sequence that is read, so keys in a cache stay valid."""
    short_factors: tuple[PositiveFloat, ...] = ()
    """LongRoPE: the stretch of each of the R / 2 wavelengths, where length is at most original_length."""
    long_factors: tuple[PositiveFloat, ...] = ()
    """LongRoPE: the same beyond original_length."""

    def check(self, head_dim: int) -> None:
        """Raises ValueError if the two ends of the scaling are not in order, or factors do not fit the head dim."""
        self._check_order("llama3", "low_frequency", "high_frequency")
        self._check_order("yarn", "beta_slow", "beta_fast")
        num_pairs = self._rotated(head_dim) // 2
        if self.scaling == "dynamic" and num_pairs < 2:
            raise ValueError(
                f"model.rope.scaling=dynamic needs two pairs that are rotated, head_dim={head_dim} and "
                f"model.rope.fraction={self.fraction} make {num_pairs}; use --model.rope.scaling=linear"
            )
        for name in ("short_factors", "long_factors"):
            given = len(getattr(self, name))
            if given != (num_pairs if self.scaling == "longrope" else 0):
                raise ValueError(
                    f"model.rope.{name} has {given} numbers; with model.rope.scaling=longrope it has one for each of "
                    f"the {num_pairs} pairs that model.rope.fraction={self.fraction} rotates, and otherwise none"
                )
        if self.scaling == "longrope" and self.original_length < 2:
            raise ValueError(
                "model.rope.original_length=1 has no logarithm to scale by, which longrope does; 4096 is usual"
            )
        if self.length is not None and self.scaling not in ("dynamic", "longrope"):
            raise ValueError(
                f"model.rope.length={self.length} is for model.rope.scaling=dynamic or longrope, not {self.scaling}; "
                "leave it out"
            )

    def _check_order(self, scaling: str, low: str, high: str) -> None:
        if self.scaling == scaling and getattr(self, low) >= getattr(self, high):
            raise ValueError(
                f"model.rope.{low}={getattr(self, low)} must be below model.rope.{high}={getattr(self, high)}; "
                f"{getattr(RopeConfig, low)} and {getattr(RopeConfig, high)} are usual"
            )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float64 [R / 2], radians a position."""
        rotated = self._rotated(head_dim)
        plain = self.base ** (-np.arange(0, rotated, 2) / rotated)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "dynamic":
            return self._dynamic(rotated)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain, rotated)
        if self.scaling == "longrope":
            return plain / np.array(self.long_factors if self._longest > self.original_length else self.short_factors)
        return plain

    @property
    def concentration(self) -> float:
        """Factor on cos and sin that keeps the entropy of the attention (YaRN, equation 22; LongRoPE, section 4)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        if self.scaling == "longrope":
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
        return 1.0

    @property
    def local(self) -> "RopeConfig":
        """Of the layers with a window."""
        if self.local_base is None:
            return self
        return RopeConfig(base=self.local_base, fraction=self.fraction, interleaved=self.interleaved)

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.fraction) // 2 * 2

    @property
    def _longest(self) -> int:
        return max(self.length or self.original_length, self.original_length)

    def _dynamic(self, rotated: int) -> np.ndarray:
        stretch = 1 + self.factor * (self._longest / self.original_length - 1)
        base = self.base * stretch ** (rotated / (rotated - 2))
        return base ** (-np.arange(0, rotated, 2) / rotated)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_length * plain / (2 * math.pi)
        keep = np.clip((turns - self.low_frequency) / (self.high_frequency - self.low_frequency), 0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: np.ndarray, rotated: int) -> np.ndarray:
        def dim_with(turns: float) -> float:
            return rotated * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low = dim_with(self.beta_fast)
        high = dim_with(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, rotated - 1)
        stretch = np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1.0 - stretch) + plain / self.factor * stretch


def rope_tables(config: RopeConfig, head_dim: int, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [B, T, R / 2], of int32 positions."""
    frequencies = jnp.asarray(config.inverse_frequencies(head_dim), jnp.float32)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * config.concentration, jnp.sin(angles) * config.concentration


def apply_rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotates the first R entries of each head by the tables of rope_tables, in float32 -> x's dtype."""
    half = cos.shape[-1]
    halves = (slice(0, half), slice(half, 2 * half))
    alternate = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    x32 = x_BTNH.astype(jnp.float32)
    first, second = (x32[..., entries] for entries in (alternate if interleaved else halves))
    rest = x_BTNH[..., 2 * half :]
    cos = cos[:, :, None]
    sin = sin[:, :, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        turned = jnp.stack(turned, -1).reshape(*x_BTNH.shape[:-1], 2 * half)
    else:
        turned = jnp.concatenate(turned, -1)
    turned = turned.astype(x_BTNH.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned
