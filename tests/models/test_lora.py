"""LoRA: before training an adapted model is its base; only adapters are trained, on every mesh alike."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.lora import LoraConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import named, select
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language

T = 16
MODEL = DecoderConfig(
    num_layers=2, pattern="de", embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=64, position="rope",
    norm="rmsnorm", biases=(), activation="swiglu", init_std=0.2, moe=MoeConfig(num_experts=4, expert_dim=16),
)  # fmt: skip
LORA = LoraConfig(rank=4)


def batch() -> dict:
    tokens = np.random.default_rng(0).integers(0, 63, (2, T + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))
    ones = np.ones((2, T), np.float32)
    return dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], positions=positions, loss_weights=ones)


def loss_of(model: Model, weights: dict) -> float:
    return float(jax.jit(lambda weights: model.loss(weights, batch(), Language()).main)(weights))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_before_training_a_model_is_its_base_bit_for_bit(compute):
    """The base of an adapted model is stored in bfloat16, that of the other in float32."""
    precision = PrecisionConfig(compute=compute)
    model = Model(MODEL, precision, adapters=LORA.transforms)
    weights = model.init(0)
    base = model.without_transforms
    assert loss_of(model, weights) == loss_of(base, base.init(0))
    scale_of_a = {name: float(abs(a).max()) for name, a in named(weights).items() if name.endswith("_lora_a")}
    assert len(scale_of_a) == 14 and all(
        0.5 < bound * np.sqrt(32 if name == "layers.dense.mlp.down_lora_a" else 16) < 1
        for name, bound in scale_of_a.items()
    )


def test_the_scale_is_that_of_peft():
    scales = [LoraConfig(rank=16, alpha=8, rslora=rslora).transforms[0].scale for rslora in (False, True)]
    assert scales == [0.5, 2.0]


def test_merged_weights_give_the_same_model():
    model = Model(MODEL, PrecisionConfig(compute="float32"), adapters=LORA.transforms)
    key = jax.random.key(1)
    weights = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(key, a.shape), model.init(0))
    plain = model.without_transforms
    merged = jax.jit(model.merged)(weights)
    np.testing.assert_allclose(loss_of(plain, merged), loss_of(model, weights), rtol=1e-6)  # sums in another order
    only_base = select(weights, lambda name: name in named(merged))
    assert abs(loss_of(plain, only_base) / loss_of(model, weights) - 1) > 1e-3


def test_targets_that_match_no_matrix_are_refused():
    with pytest.raises(ValueError, match=r"lora.targets: 'mlp.gat' matches no matrix; the layers have .*mlp.gate"):
        Model(MODEL, adapters=dataclasses.replace(LORA, targets=("mlp.gat",)).transforms)
