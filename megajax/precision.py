"""Number formats: in what the parameters are kept, in what the layers compute."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    params: Literal["float32", "bfloat16"] = "float32"
    """Format of the stored matrices and embeddings. bfloat16 keeps no float32 copy: an update below 1/512 of a weight
    is lost. Norm scales, biases, routers, optimizer moments and gradient sums are float32."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Format of activations and of the weights that matmuls read; norms, softmax and loss are float32 inside."""
    gradient_reduce: Literal["compute", "float32"] = "compute"
    """In what the gradients of the layers' matrices are summed over devices: in `compute`, or in float32, as Megatron
    does by default, for more time and memory (docs/design.md). Over microbatches they are always summed in float32."""

    @property
    def has_float32_gradients(self) -> bool:
        """Whether gradients of matrices are more than the compute dtype has."""
        return self.gradient_reduce == "float32" and self.compute != "float32"

    @property
    def params_dtype(self) -> jnp.dtype:
        return DTYPES[self.params]

    @property
    def compute_dtype(self) -> jnp.dtype:
        return DTYPES[self.compute]


def cast_floating(tree, dtype: jnp.dtype):
    """Casts the floating-point leaves of a pytree to dtype; other leaves are kept."""

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)
