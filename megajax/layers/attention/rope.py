"""Rotary position embedding (Su et al. 2021), and its scalings for longer sequences: linear (Chen et al. 2023), dynamic
NTK, YaRN (Peng et al. 2023), Llama 3's and LongRoPE (Ding et al. 2024).

Dimensions: B batch, T sequence, N heads, H head dim, R rotated part of H. Each pair of entries is rotated,
(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): x1 is the first and x2 the second half of R or, interleaved, x1 has the
even and x2 the odd entries.
"""

import dataclasses
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.fields.ranges import Multiplier, PositiveFloat, PositiveInt, Range

RAMPS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0), "yarn_exact": (1.0, 32.0)}
"""The usual `ramp` of each scaling that has one."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    base: Annotated[float, Range(above=1, at_most=1e12)] = 10000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    fraction: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Fraction of the head dim that is rotated."""
    interleaved: bool = False
    """Rotate entries 2 i and 2 i + 1 as a pair (GPT-J) instead of i and i + R / 2 (GPT-NeoX)."""
    local_base: Annotated[float, Range(above=1, at_most=1e12)] | None = None
    """Base of the layers with a window, whose wavelengths are then never stretched (Gemma 3); None: like other
    layers."""
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "yarn_exact", "longrope"] = "none"
    """How wavelengths are stretched for sequences beyond original_length. yarn rounds the ends of its ramp outwards to
    whole dims, yarn_exact does not (gpt-oss)."""
    factor: Annotated[float, Range(at_least=1, at_most=1e6)] = 8.0
    """By how much wavelengths are stretched: the longest sequence divided by original_length."""
    attention_factor: Multiplier | None = None
    """Factor on cos and sin. None: YaRN 0.1 ln(factor) + 1, LongRoPE sqrt(1 + ln(factor) / ln(original_length)), 1
    otherwise."""
    original_length: PositiveInt = 8192
    """Sequence length of the original pretraining (Llama 3: 8192, YaRN: 4096)."""
    ramp: tuple[PositiveFloat, PositiveFloat] | None = None
    """Llama 3, YaRN: rotations within original_length below which a dim is stretched fully, and above which it is not
    stretched. None: 1,4 for Llama 3 and 1,32 for YaRN."""
    length: PositiveInt | None = None
    """Dynamic, LongRoPE: length of the longest sequence, which sets the wavelengths; None = original_length. They do
    not depend on the actual sequence, so cached keys remain valid."""
    factors: tuple[PositiveFloat, ...] = ()
    """LongRoPE: stretch of each of the R / 2 wavelengths for a length up to original_length, then of each for a length
    above it."""
    sections: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Pairs that rotate by the time, the row and the column of a token, which differ within an image (Wang et al. 2024,
    Qwen2-VL, M-RoPE); None: a token has one position."""
    sections_interleaved: bool = False
    """The pairs of the three alternate (Qwen3-VL) instead of following one another."""

    def check(self, head_dim: int) -> None:
        """Raises ValueError if the bounds of the ramp are not ascending, or factors do not fit the head dim."""
        if self.ramp is not None and self.scaling not in RAMPS:
            raise ValueError(
                f"model.rope.ramp={_typed(self.ramp)} is read with model.rope.scaling={' or '.join(RAMPS)}, not "
                f"{self.scaling}; leave it out"
            )
        if self.ramp is not None and self.ramp[0] >= self.ramp[1]:
            raise ValueError(
                f"model.rope.ramp={_typed(self.ramp)} must ascend; --model.rope.ramp={_typed(RAMPS[self.scaling])} is "
                "usual"
            )
        num_pairs = self._rotated(head_dim) // 2
        if self.scaling == "dynamic" and num_pairs < 2:
            raise ValueError(
                f"model.rope.scaling=dynamic needs two rotated pairs; head_dim={head_dim} and "
                f"model.rope.fraction={self.fraction} give {num_pairs}; use --model.rope.scaling=linear"
            )
        if len(self.factors) != (2 * num_pairs if self.scaling == "longrope" else 0):
            raise ValueError(
                f"model.rope.factors has {len(self.factors)} numbers; give two for each of the {num_pairs} pairs that "
                f"model.rope.fraction={self.fraction} rotates with model.rope.scaling=longrope, otherwise none"
            )
        if self.scaling == "longrope" and self.original_length < 2:
            raise ValueError(
                "model.rope.original_length=1: longrope divides by its logarithm, which is 0; 4096 is usual"
            )
        if self.sections is not None and sum(self.sections) != num_pairs:
            raise ValueError(
                f"model.rope.sections={','.join(map(str, self.sections))} must add up to the {num_pairs} rotated pairs "
                "of a head"
            )
        if self.length is not None and self.scaling not in ("dynamic", "longrope"):
            raise ValueError(
                f"model.rope.length={self.length} is read with model.rope.scaling=dynamic or longrope, not "
                f"{self.scaling}; leave it out"
            )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float64 [R / 2], radians per position."""
        rotated = self._rotated(head_dim)
        plain = self.base ** (-np.arange(0, rotated, 2) / rotated)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "dynamic":
            return self._dynamic(rotated)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling.startswith("yarn"):
            return self._yarn(plain, rotated)
        if self.scaling == "longrope":
            return plain / np.split(np.array(self.factors), 2)[int(self._longest > self.original_length)]
        return plain

    def axis_of_pairs(self, num_pairs: int) -> np.ndarray:
        """int32 [R / 2]: which of (time, row, column) each pair rotates by, with `sections`."""
        assert self.sections is not None
        if not self.sections_interleaved:
            return np.repeat(np.arange(3, dtype=np.int32), self.sections)
        pair = np.arange(num_pairs, dtype=np.int32)
        return np.where(pair < 3 * np.array(self.sections)[pair % 3], pair % 3, 0)

    @property
    def concentration(self) -> float:
        """Factor on cos and sin that preserves the entropy of the attention (YaRN, equation 22; LongRoPE, section
        4)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.scaling.startswith("yarn"):
            return 0.1 * math.log(self.factor) + 1.0
        if self.scaling == "longrope":
            return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
        return 1.0

    @property
    def local(self) -> "RopeConfig":
        """The embedding of the layers with a window."""
        if self.local_base is None:
            return self
        return RopeConfig(base=self.local_base, fraction=self.fraction, interleaved=self.interleaved)

    def _rotated(self, head_dim: int) -> int:
        return int(head_dim * self.fraction) // 2 * 2

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the wavelengths are for; None: any."""
        return self._longest if self.scaling in ("dynamic", "longrope") else None

    @property
    def _longest(self) -> int:
        return max(self.length or self.original_length, self.original_length)

    def _dynamic(self, rotated: int) -> np.ndarray:
        stretch = 1 + self.factor * (self._longest / self.original_length - 1)
        base = self.base * stretch ** (rotated / (rotated - 2))
        return base ** (-np.arange(0, rotated, 2) / rotated)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        rotations = self.original_length * plain / (2 * math.pi)
        low, high = self.ramp or RAMPS["llama3"]
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return plain * keep + plain / self.factor * (1.0 - keep)

    def _yarn(self, plain: np.ndarray, rotated: int) -> np.ndarray:
        def dim_with(turns: float) -> float:
            return rotated * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        slow, fast = self.ramp or RAMPS[self.scaling]
        low = dim_with(fast)
        high = dim_with(slow)
        if self.scaling == "yarn":
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, rotated - 1)
        stretch = np.clip((np.arange(rotated // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1.0 - stretch) + plain / self.factor * stretch


def _typed(ramp: tuple[float, float]) -> str:
    return ",".join(map(str, ramp))


def rope_tables(config: RopeConfig, head_dim: int, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [B, T, R / 2], for int32 positions [B, T], or [B, T, 3] of time, row and column."""
    frequencies = jnp.asarray(config.inverse_frequencies(head_dim), jnp.float32)
    if positions_BT.ndim == 2:
        positions_BTR = positions_BT[..., None]
    else:
        positions_BTR = positions_BT[..., config.axis_of_pairs(len(frequencies))]
    angles = positions_BTR.astype(jnp.float32) * frequencies
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
