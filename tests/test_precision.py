"""Parameters in bfloat16 train: what is near 1 and moves by 1e-4 a step stays in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.optim.optimizer import Optimizer
from megajax.parameters import name_of
from megajax.precision import PrecisionConfig

SIZES = DecoderConfig(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=32, vocab_multiple=8)


@pytest.fixture(scope="module")
def model():
    return Model(SIZES, PrecisionConfig(params="bfloat16"))


def named(tree) -> dict:
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_norm_scales_and_biases_move_by_the_learning_rate_and_matrices_are_stored_in_bfloat16(model):
    optimizer = Optimizer(OptimizerConfig(weight_decay=0.0, clip_norm=0.0), model.trained)
    before = model.init(0)
    state = optimizer.init(before)
    ones = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.float32), before)
    after, state, _ = jax.jit(optimizer.update)(ones, state, before, jnp.float32(3e-4))
    old, new, records = named(before), named(after), named(model.records)
    vectors = [name for name, record in records.items() if record.role == "vector"]
    assert any("norm" in name for name in vectors) and any("bias" in name for name in vectors)
    for name in vectors:
        # AdamW's first update is the learning rate; float32 keeps 1 - 3e-4 to 2^-24.
        np.testing.assert_allclose(old[name] - new[name], 3e-4, atol=1e-7, err_msg=name)
    for name, record in records.items():
        assert new[name].dtype == (jnp.bfloat16 if record.is_cast else jnp.float32), name
    assert {leaf.dtype for leaf in jax.tree.leaves(state.state)} == {np.dtype(np.float32), np.dtype(np.int32)}
