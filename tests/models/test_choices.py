"""The decoder's further choices, several in each model: any mesh, a pipeline, a loop and recomputation change nothing.

What each of them means: tests/models/test_hugging_face.py.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models import pipelined
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS
from megajax.models.model import Model
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.planning.step_time import recomputed_flops
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language

FLOAT32 = PrecisionConfig(compute="float32")
BATCH, T = 4, 16
SIZES = dict(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=30, vocab_multiple=8, init_std=0.2)
MODELS = {
    # Gemma's and gpt-oss's choices.
    "sandwich": DecoderConfig(
        **SIZES, position="rope", num_kv_heads=2, norm="rmsnorm_1p", norm_placement="sandwich",
        qk_norm="all_heads", activation="geglu_tanh", biases=("qkv", "head"),
        window=6, pattern="wf", attention_sinks=True, attention_multiplier=0.4, embedding_multiplier=4.0,
        residual_multiplier=0.5, logit_multiplier=0.7, logit_soft_cap=3.0, dropout=0.1,
        rope=RopeConfig(scaling="yarn", factor=4.0, original_length=8, local_base=100.0, interleaved=True),
    ),
    # BLOOM's and Cohere's.
    "parallel": DecoderConfig(
        **SIZES, position="alibi", embedding_norm=True, parallel_residual="one_norm",
        activation="relu", attention_sinks=True, biases=("qkv", "attention_out"), dropout=0.1, tied_embeddings=False,
    ),
    # OLMo 2's and GPT-NeoX's.
    "post": DecoderConfig(
        **SIZES, position="rope", norm="rmsnorm", norm_placement="post", parallel_residual="two_norms", biases=(),
        activation="swiglu",
    ),
    # DeepSeek's.
    "latent": DecoderConfig(
        **SIZES, position="rope", norm="rmsnorm", biases=(), activation="swiglu", dropout=0.1, attention_dropout=0.1,
        head_dim=4, latent=LatentConfig(kv_rank=8, q_rank=12, rope_dim=2, value_dim=6),
        rope=RopeConfig(scaling="yarn", factor=4.0, original_length=8, interleaved=True),
    ),
}  # fmt: skip


def batch_of(order: np.ndarray) -> dict:
    rng = np.random.default_rng(0)
    shape = (BATCH, T)
    batch = {
        "tokens": rng.integers(0, 30, shape, dtype=np.int32),
        "labels": rng.integers(0, 30, shape, dtype=np.int32),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), shape),
        "segment_ids": np.sort(rng.integers(0, 2, shape, dtype=np.int32), -1),
        "loss_weights": rng.random(shape, dtype=np.float32) / (BATCH * T),
    }
    return {name: array[:, order] for name, array in batch.items()}


def weights_of(model: Model) -> dict:
    """Scales and biases differ from 1 and 0. Of a pipeline: rows of layers in the order of a model without one."""
    plain = Model(model.config, FLOAT32)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: (0.2 * rng.standard_normal(a.shape)).astype(np.float32), plain.abstract_weights)
    return arranged(drawn, model, lambda array, rows: array[np.maximum(rows, 0)])


def arranged(weights: dict, model: Model, of_layers) -> dict:
    rows = model.layer_rows["layers.dense"]
    return weights | {"layers": {"dense": jax.tree.map(lambda a: of_layers(a, rows), weights["layers"]["dense"])}}


def loss_and_gradients(name: str, sizes: dict, **how):
    """As without a pipeline."""
    config = MODELS[name]
    mesh_config = MeshConfig(**sizes)
    execution = ExecutionConfig(**how)
    config.check(mesh_config, T, execution)
    model = Model(config, FLOAT32, execution, stages=make_stages(mesh_config, config.num_layers))
    batch = batch_of(sequence_order(T, mesh_config.context, execution.context_attention))
    key = jax.random.key(3)

    def run(weights):
        if model.stages is None:
            return jax.value_and_grad(lambda weights: model.loss(weights, batch, Language(), key=key).total())(weights)
        microbatches = jax.tree.map(lambda a: a[None], batch)
        terms, gradients, _ = pipelined.loss_and_gradients(
            model, model.split(weights), microbatches, Language(), key, NO_REGULARISERS
        )
        return terms.total(), gradients

    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights_of(model), model.shardings(mesh))
        loss, gradients = jax.device_get(jax.jit(run)(weights))

    def numbered(array, rows):
        return array[tuple(np.stack([np.argwhere(rows == number)[0] for number in range(2)], 1))]

    return loss, arranged(gradients, model, numbered)


@pytest.fixture(scope="module")
def on_one_device():
    return functools.cache(lambda name: loss_and_gradients(name, {}))


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("sandwich", dict(fsdp=2, tensor=2, context=2), dict(recompute="selective")),
        ("sandwich", dict(pipeline=2), {}),
        pytest.param("sandwich", dict(pipeline=2, tensor=2, context=2), {}, marks=pytest.mark.slow),
        ("parallel", dict(data=2, tensor=2, context=2), dict(context_attention="all_to_all")),
        ("parallel", dict(pipeline=2, tensor=2), dict(recompute="norm,mlp")),
        ("post", dict(tensor=2, context=2), dict(recompute="full", scan_layers=True)),
        ("latent", dict(fsdp=2, tensor=2, context=2), dict(recompute="selective", scan_layers=True)),
        pytest.param(
            "latent",
            dict(pipeline=2, tensor=2),
            dict(recompute="qkv,mlp"),
            marks=pytest.mark.slow,
        ),
        pytest.param("latent", dict(pipeline=2, context=2, fsdp=2), {}, marks=pytest.mark.slow),
        pytest.param(
            "latent",
            dict(context=2, tensor=2),
            dict(context_attention="all_to_all", recompute="full"),
            marks=pytest.mark.slow,
        ),
        pytest.param("latent", dict(context=4), dict(context_attention="all_gather"), marks=pytest.mark.slow),
        pytest.param("post", dict(pipeline=2, fsdp=2), {}, marks=pytest.mark.slow),
        pytest.param("sandwich", {}, dict(recompute="full", scan_layers=True), marks=pytest.mark.slow),
        pytest.param("parallel", {}, dict(recompute="full", scan_layers=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_meshes_pipelines_loops_and_recomputation_change_nothing(name, sizes, how, on_one_device):
    loss, gradients = loss_and_gradients(name, sizes, **how)
    wanted_loss, wanted = on_one_device(name)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    # Sums over devices come in another order.
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max(), err_msg=str(path))
        assert np.any(want), path


# ----------------------------------------------------------------------------- what a plan counts


def activations(**fields) -> dict:
    config = dataclasses.replace(MODELS["post"], **fields)
    (layer,) = dict.fromkeys(config.layers(ExecutionConfig()))
    return layer.activations(T)


def test_plan_counts_the_activations_of_each_placement():
    D = SIZES["embed_dim"]
    counted = {
        ("pre", "none"): {"residual": D, "normed": 2 * D, "residual_mid": D},
        ("post", "none"): {"residual": D, "branch_out": 2 * D, "residual_mid": D},
        ("sandwich", "none"): {"residual": D, "normed": 2 * D, "branch_out": 2 * D, "residual_mid": D},
        ("pre", "one_norm"): {"residual": D, "normed": D},
        ("pre", "two_norms"): {"residual": D, "normed": 2 * D},
        ("post", "two_norms"): {"residual": D, "branch_out": 2 * D},
    }
    for (placement, parallel), wanted in counted.items():
        found = activations(norm_placement=placement, parallel_residual=parallel)
        of_norms = {name: one.elements for name, one in found.items() if name in ("residual", "normed", "branch_out",
                                                                                 "residual_mid")}  # fmt: skip
        assert of_norms == wanted


def test_full_recomputation_repeats_the_matmuls_whose_results_are_read():
    """A norm behind a projection reads its result; a sum does not."""
    D, F = SIZES["embed_dim"], SIZES["mlp_dim"]
    qkv, out, wide, down = 2 * D * 3 * D, 2 * D * D, 2 * D * 2 * F, 2 * D * F
    wanted = {
        ("pre", "none"): qkv + out + wide,
        ("pre", "two_norms"): qkv + wide,
        ("post", "none"): qkv + out + wide + down,
        ("sandwich", "two_norms"): qkv + out + wide + down,
    }
    for (placement, parallel), matmuls in wanted.items():
        config = dataclasses.replace(MODELS["post"], norm_placement=placement, parallel_residual=parallel)
        again = recomputed_flops(Model(config, FLOAT32, ExecutionConfig(recompute="full")), T)
        assert again.matmuls == config.num_layers * matmuls


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(parallel_residual="one_norm", norm_placement="post"), "model.parallel_residual=one_norm .*two_norms"),
        (dict(rope=RopeConfig(local_base=100.0)), "model.rope.local_base=100.0 .*--model.window"),
        (
            dict(window=4, position="alibi", rope=RopeConfig(local_base=100.0)),
            "model.rope.local_base=100.0 .*position=rope",
        ),
    ],
    ids=str,
)
def test_choices_that_contradict_each_other_are_refused(fields, message):
    config = dataclasses.replace(MODELS["post"], **fields)
    with pytest.raises(ValueError, match=message):
        config.check(MeshConfig(), T, ExecutionConfig())
