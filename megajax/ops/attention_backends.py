"""The implementations of attention, and the choice among them: for whole sequences, parts of them, and pages.

Dimensions: see ops/attention.py. BACKENDS is the registry: the forward and backward pass (ops/attention.py), blocks of
a split sequence (parallel/context.py) and pages of a cache (ops/paged_attention.py) all choose from it, once, by what
each backend says of the Inputs, and then call the object that was chosen.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.mesh import compat
from megajax.ops import transformer_engine
from megajax.ops.attention_mask import CAUSAL, FULL, Mask, window
from megajax.ops.choice import log_choice

BackendName = Literal["auto", "cudnn", "pallas", "transformer_engine", "reference"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is computed of the scores; hashable, part of the program."""

    mask: Mask
    scale: float
    soft_cap: float | None = None
    dropout: float = 0.0
    deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a backend may not support, and what its speed depends on."""

    options: Options
    length: int
    """Of the queries."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    keys: Literal["own", "other", "cache", "pages", "latents"] = "own"
    """Those of the queries' sequence, of another one, with positions of their own, in pages, or in pages as latents,
    which are the values too."""
    page: tuple[int, jnp.dtype] | None = None
    """Tokens of a page and their dtype, if the queries read the pages themselves."""
    is_packed: bool = False
    is_split: bool = False
    """The results for parts of the keys are merged by their log-sum-exps."""
    has_slopes: bool = False
    has_sinks: bool = False
    has_bias: bool = False
    has_blocks: bool = False
    """Adjacent tokens see each other whatever the mask."""

    @staticmethod
    def of(options: Options, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **others) -> "Inputs":
        _, length, heads, head_dim = q_BTNH.shape
        return Inputs(options, length, heads, k_BSKH.shape[2], head_dim, v_BSKH.shape[3], q_BTNH.dtype, **others)

    @property
    def what(self) -> str:
        """For the log."""
        if self.keys == "latents":
            return "latent attention in pages"
        if self.keys == "pages":
            return "prompts in pages" if self.page is None else "paged attention"
        return "attention"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Which of the keys of one device each of its queries sees, in the form that a backend needs."""

    options: Options

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """int32 [B, T] each: query i sees the keys lower <= j < upper, if its mask is an interval. Neither descends
        along T."""
        raise NotImplementedError

    def bias(self) -> tuple[jax.Array | None, dict]:
        """(what is added to the scores, [B or 1, N or 1, T, S] in the dtype of the queries; the masks besides: causal
        and window)."""
        raise NotImplementedError

    @property
    def learns_bias(self) -> bool:
        """Whether the bias gets a gradient, [N, T, S]."""
        return False

    def reference(self, q, k, v) -> tuple[jax.Array, jax.Array]:
        """The plain formula -> (out, log-sum-exp [B, N, T] float32)."""
        raise NotImplementedError

    def reference_gradients(self, q, k, v, out, lse, d_out) -> tuple[jax.Array, ...]:
        """Of q, k and v, and of what else the formula has a gradient for."""
        raise NotImplementedError


class Backend:
    """One implementation. Arrays are those of one device."""

    name: str

    def problem(self, inputs: Inputs) -> str:
        """Why it does not support them here, or an empty string."""
        raise NotImplementedError

    def note(self, inputs: Inputs) -> str:
        """What the log says of how it computes them, or an empty string."""
        return ""

    def reads_joined(self, inputs: Inputs) -> bool:
        """Whether it has joined_forward and joined_backward, as forward and backward of one array that has q, k and v,
        [B, T, K, G + 2, H], and of its gradient."""
        return False

    def joined_forward(self, joined, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def joined_backward(self, joined, out, lse, d_out, pairs: Pairs) -> jax.Array:
        raise NotImplementedError

    def forward(self, q, k, v, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
        """-> (out [B, T, N, H] in q's dtype, log-sum-exp [B, N, T] float32)."""
        raise NotImplementedError

    def backward(self, q, k, v, out, lse, d_out, pairs: Pairs) -> tuple[jax.Array, ...]:
        """Gradients of q, k and v, and further ones as Pairs.reference_gradients; out and lse are those of attention to
        these keys, or to more keys, to which these belong."""
        raise NotImplementedError

    def decode(self, q, pages: Any) -> tuple[jax.Array, jax.Array]:
        """Of inputs with `page`; q [B, N, H]. pages: PagedKeys (ops/paged_attention.py)."""
        raise NotImplementedError

    def attend_to_latents(self, q, latents: Any) -> tuple[jax.Array, jax.Array]:
        """As forward. latents: PagedLatents (ops/paged_attention.py)."""
        raise NotImplementedError


class Cudnn(Backend):
    name = "cudnn"
    # Head dims of queries and keys, and of values, that differ: those of DeepSeek-V2 and -V3.
    LATENT_HEADS = (192, 128)
    LATENT_VERSION = 91000

    def problem(self, inputs: Inputs) -> str:
        return _first(self.reasons(inputs)) or compat.cudnn_attention_problem()

    def reasons(self, inputs: Inputs) -> dict[str, bool]:
        """{reason: whether it holds}."""
        heads = (inputs.head_dim, inputs.value_dim)
        is_latent = heads == self.LATENT_HEADS
        mask = inputs.options.mask
        needs_bias = inputs.has_bias or inputs.is_packed or (inputs.is_split and mask not in (FULL, CAUSAL))
        capability = compat.compute_capability()
        version = compat.cudnn_version()
        return {
            "no NVIDIA GPU": compat.mesh_platform() not in ("gpu", "cuda"),
            # Older than Ampere. Heads of latent attention need Hopper, which JAX looks for on this machine.
            f"compute capability {capability}": (
                (capability or 0) < 9.0 if is_latent else capability is not None and capability < 8.0
            ),
            f"dtype {inputs.dtype}": inputs.dtype not in (jnp.bfloat16, jnp.float16),
            _described(heads): not is_latent and (heads[0] != heads[1] or heads[0] > 128 or heads[0] % 8 != 0),
            f"cuDNN {version}": is_latent and (version or 0) < self.LATENT_VERSION,
            "a bias with values of another head dim": is_latent and needs_bias,  # not tried
            "a bias of an odd number of tokens": inputs.has_bias and inputs.length % 2 != 0,
            f"mask {mask}": mask not in (FULL, CAUSAL & window(mask.reach)) and not inputs.is_split,
            "soft cap": inputs.options.soft_cap is not None,
            "blocks of tokens": inputs.has_blocks,
            "deterministic": inputs.options.deterministic,  # with a bias jaxlib 0.11.2 raises an IndexError
            **_only_the_reference(inputs),
            "keys in pages": inputs.keys in ("pages", "latents"),
        }

    def forward(self, q, k, v, pairs):
        bias, masks = pairs.bias()
        return _marked(compat.cudnn_attention_forward(q, k, v, bias, scale=pairs.options.scale, **masks), q)

    def backward(self, q, k, v, out, lse, d_out, pairs):
        bias, masks = pairs.bias()
        masks |= dict(scale=pairs.options.scale, learns_bias=pairs.learns_bias)
        found = compat.cudnn_attention_backward(q, k, v, out, lse, d_out, bias, **masks)
        if pairs.learns_bias:
            found = (*found[:3], found[3].sum(0, dtype=jnp.float32))
        return _marked(found, q)


class TransformerEngine(Cudnn):
    """It ends in cuDNN's kernels, so what these do not support it does not either."""

    name = "transformer_engine"

    def problem(self, inputs: Inputs) -> str:
        more = {
            "packed documents": inputs.is_packed,
            "bias": inputs.has_bias,
            "attention sinks": inputs.has_sinks,
            "latent attention": inputs.head_dim != inputs.value_dim,
            "no log-sum-exp, which parts of a sequence need": inputs.is_split,
        }
        return transformer_engine.problem() or _first(self.reasons(inputs) | more)

    def forward(self, q, k, v, pairs):
        unused = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        return _marked((transformer_engine.forward(q, k, v, pairs.options.mask, pairs.options.scale), unused), q)

    def backward(self, q, k, v, out, lse, d_out, pairs):
        return _marked(transformer_engine.backward(q, k, v, d_out, pairs.options.mask, pairs.options.scale), q)


class Pallas(Backend):
    """Our kernels for Hopper."""

    name = "pallas"

    @property
    def kernel(self):
        from pallas_kernels import flash_attention  # not at the top: only Hopper needs it, and it takes time

        return flash_attention

    @property
    def decoding_kernel(self):
        from pallas_kernels import paged_attention

        return paged_attention

    @property
    def latent_kernel(self):
        from pallas_kernels import latent_attention

        return latent_attention

    def problem(self, inputs: Inputs) -> str:
        mask = inputs.options.mask
        # It takes the segments of the queries for those of the keys.
        others = {"keys of another sequence": inputs.keys == "other", f"mask {mask}": not mask.is_interval}
        others |= {"bias": inputs.has_bias}
        reasons = _only_the_reference(inputs) | others
        return compat.mosaic_problem() or self._kernel_problem(inputs) or _first(reasons)

    def _kernel_problem(self, inputs: Inputs) -> str:
        if inputs.page is None:
            return self.kernel.problem(self._dim(inputs.head_dim, inputs.value_dim), inputs.dtype)
        page_size, dtype = inputs.page
        if inputs.keys == "latents":
            if inputs.options.soft_cap is not None:
                return "soft cap"
            return self.latent_kernel.problem(inputs.head_dim, inputs.value_dim, page_size, inputs.dtype, dtype)
        shape = (inputs.heads, inputs.kv_heads, inputs.head_dim, page_size)
        return self.decoding_kernel.problem(*shape, inputs.dtype, dtype)

    def note(self, inputs: Inputs) -> str:
        heads = (inputs.head_dim, inputs.value_dim)
        dim = self._dim(*heads)
        return "" if inputs.page is not None or heads == (dim, dim) else f"{_described(heads)}, padded to {dim}"

    def _dim(self, head_dim: int, value_dim: int) -> int:
        """The head dim that the kernels compute with: they have one for keys and values, and tiles for a few of them.
        The arrays are padded with zeros to the next one."""
        widest = max(head_dim, value_dim)
        return min((dim for dim in self.kernel.HEAD_DIMS if dim >= widest), default=widest)

    def reads_joined(self, inputs: Inputs) -> bool:
        return inputs.head_dim == inputs.value_dim and inputs.head_dim in self.kernel.HEAD_DIMS

    def joined_forward(self, joined, pairs):
        how = dict(scale=pairs.options.scale, soft_cap=pairs.options.soft_cap)
        return _marked(self.kernel.joined_forward(joined, *pairs.bounds(), **how), joined)

    def joined_backward(self, joined, out, lse, d_out, pairs):
        how = dict(scale=pairs.options.scale, soft_cap=pairs.options.soft_cap, ordered=pairs.options.deterministic)
        (d_joined,) = self.kernel.joined_backward(joined, out, lse, d_out, *pairs.bounds(), **how)
        return _marked(d_joined, joined)

    def forward(self, q, k, v, pairs):
        dim = self._dim(q.shape[-1], v.shape[-1])
        arrays = (_padded(a, dim) for a in (q, k, v))
        how = dict(scale=pairs.options.scale, soft_cap=pairs.options.soft_cap)
        out, lse = self.kernel.forward(*arrays, *pairs.bounds(), **how)
        return _marked((out[..., : v.shape[-1]], lse), q)

    def backward(self, q, k, v, out, lse, d_out, pairs):
        dim = self._dim(q.shape[-1], v.shape[-1])
        q_wide, k_wide, v_wide, out_wide, d_out_wide = (_padded(a, dim) for a in (q, k, v, out, d_out))
        arrays = (q_wide, k_wide, v_wide, out_wide, lse, d_out_wide)
        how = dict(scale=pairs.options.scale, soft_cap=pairs.options.soft_cap, ordered=pairs.options.deterministic)
        gradients = self.kernel.backward(*arrays, *pairs.bounds(), **how)
        return _marked(tuple(d[..., : a.shape[-1]] for d, a in zip(gradients, (q, k, v), strict=True)), q)

    def decode(self, q, pages):
        how = dict(scale=pages.options.scale, window=pages.options.mask.reach, soft_cap=pages.options.soft_cap)
        return _marked(self.decoding_kernel.decode(q, *pages.arrays, **how), q)

    def attend_to_latents(self, q, latents):
        arrays = (latents.pages, latents.table_BP, latents.lower_BT, latents.upper_BT)
        how = dict(value_dim=latents.value_dim, scale=latents.options.scale)
        return _marked(self.latent_kernel.attend(q, *arrays, **how), q)


class Reference(Backend):
    """The plain formula, with all scores in memory; supports everything."""

    name = "reference"

    def problem(self, inputs: Inputs) -> str:
        return ""

    def forward(self, q, k, v, pairs):
        return pairs.reference(q, k, v)

    def backward(self, q, k, v, out, lse, d_out, pairs):
        return pairs.reference_gradients(q, k, v, out, lse, d_out)

    def decode(self, q, pages):
        return pages.reference(q)

    def attend_to_latents(self, q, latents):
        return latents.reference(q)


BACKENDS: dict[str, Backend] = {one.name: one for one in (Cudnn(), Pallas(), TransformerEngine(), Reference())}


def _marked(results, q: jax.Array):
    """Results of a kernel, as arrays that vary over the devices where the queries do."""
    return compat.vary(results, compat.varying_axes(q))


def _only_the_reference(inputs: Inputs) -> dict[str, bool]:
    return {
        "key-value cache": inputs.keys == "cache",
        "dropout": inputs.options.dropout > 0,
        "ALiBi": inputs.has_slopes,
    }


def _first(reasons: dict[str, bool]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def _described(heads: tuple[int, int]) -> str:
    head_dim, value_dim = heads
    return f"head dim {head_dim}" + (f", of values {value_dim}" if value_dim != head_dim else "")


def _padded(a: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(a, ((0, 0),) * 3 + ((0, dim - a.shape[-1]),)) if a.shape[-1] < dim else a


# ----------------------------------------------------------------------------- the choice

# (head dim, mask): {length: time with our kernels / time with cuDNN's}, on an H100 (pallas_kernels/README.md): of a
# whole step if one was measured. Packed: cuDNN reads a bias of T x T.
MEASURED = {
    (64, "causal"): {1024: 0.91},
    (64, "window"): {2048: 0.78},  # kernel alone
    (64, "packed"): {512: 0.94, 2048: 0.31},  # 512: in both directions (bert_large); 2048: kernel alone
    (72, "packed"): {8192: 0.13},  # images in a row, kernel alone
    (80, "packed"): {8192: 0.12},  # the same
    (128, "causal"): {2048: 0.99, 16384: 1.02},  # 16384: kernel alone
    (128, "grouped"): {4096: 1.00},
    (128, "window"): {8192: 0.99},  # grouped
    (128, "packed"): {2048: 0.90},  # an earlier version, on two H200 side by side
}


def choose(inputs: Inputs, requested: str = "auto") -> Backend:
    """The requested backend, or else the fastest, that supports the inputs; logs why it is not an earlier one, and what
    it pads."""
    fastest = _by_speed(inputs)
    order = fastest if requested == "auto" else (requested, *(name for name in fastest if name != requested))
    refused: list[str] = []
    for name in order:
        backend = BACKENDS[name]
        problem = backend.problem(inputs)
        if not problem:
            notes = "; ".join(filter(None, (*refused, backend.note(inputs))))
            log_choice(inputs.what, f"{name} ({notes})" if notes else name)
            return backend
        refused.append(f"not {name}: {problem}")
    raise AssertionError("the reference supports everything")


def _by_speed(inputs: Inputs) -> tuple[str, ...]:
    """Names of backends, by speed at the nearest measured length."""
    if inputs.keys in ("pages", "latents"):
        return "pallas", "reference"
    features = {
        "packed": inputs.is_packed,
        "unmasked": not inputs.options.mask.is_causal,
        "window": inputs.options.mask.reach is not None,
        "grouped": inputs.heads != inputs.kv_heads,
        "causal": True,
    }
    # What was not measured is cuDNN's, but for packed rows, which it reads with a bias of T x T.
    not_measured = {inputs.length: 0.0 if inputs.is_packed else 1.0}
    by_length = MEASURED.get((inputs.head_dim, _first(features)), not_measured)
    nearest = min(by_length, key=lambda measured: abs(math.log(measured / max(inputs.length, 1))))
    return ("pallas", "cudnn", "reference") if by_length[nearest] < 1 else ("cudnn", "pallas", "reference")
