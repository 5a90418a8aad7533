"""Loss and every gradient equal Megatron Core's (tests/oracles), on one device and on a mesh."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.parallel.context import sequence_order
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.weights.megatron import from_megajax, to_megajax

ORACLES = Path(__file__).parent.parent / "oracles"
# Both sides are float32 and add up in another order: the oracle differs from a plain formula by up to 8e-7.
TOLERANCE = 1e-5
LAYOUTS = {
    "unrolled": ({}, False, 128),
    "scanned, padded to another vocabulary": ({}, True, 1024),
    "mesh": ({"tensor": 2, "fsdp": 2, "context": 2}, False, 256),
    "experts split": ({"tensor": 2, "fsdp": 2, "expert": 2}, False, 128),
}


def decoder_config(sizes: dict) -> DecoderConfig:
    """The model that a Megatron configuration describes."""
    return DecoderConfig(
        num_layers=sizes["num_layers"],
        embed_dim=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes.get("num_query_groups"),
        mlp_dim=sizes["ffn_hidden_size"],
        vocab_size=sizes["vocab"],
        position="learned" if sizes["position"] == "learned_absolute" else sizes["position"],
        max_positions=sizes["seq"],
        norm=sizes["normalization"].lower(),
        norm_epsilon=sizes.get("layernorm_epsilon", 1e-5),
        qk_norm=sizes.get("qk_layernorm", False),
        activation="swiglu" if sizes["activation"] == "swiglu" else "gelu",
        biases=("qkv", "attention_out", "mlp", "norm") if sizes["bias"] else ("norm",),
        tied_embeddings=sizes["tied"],
        moe=moe_config(sizes),
    )


def moe_config(sizes: dict) -> MoeConfig:
    if "num_moe_experts" not in sizes:
        return MoeConfig()
    router = RouterConfig(
        top_k=sizes["moe_router_topk"], aux_loss=sizes["moe_aux_loss_coeff"], z_loss=sizes["moe_z_loss_coeff"]
    )
    return MoeConfig(sizes["num_moe_experts"], sizes["moe_ffn_hidden_size"], router=router)


class Oracle:
    def __init__(self, name: str):
        saved = np.load(ORACLES / f"{name}.npz")

        def part(prefix):
            return {key[len(prefix) :]: saved[key] for key in saved.files if key.startswith(prefix)}

        self.config = decoder_config(json.loads(str(saved["config"])))
        self.params, self.gradients, self.loss = part("param/"), part("grad/"), saved["loss"]
        self.loss_mean = float(saved["loss_mean"])
        ids = saved["ids"].astype(np.int32)
        self.batch = {
            "tokens": ids,
            "labels": saved["labels"].astype(np.int32),
            "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape),
            "loss_weights": np.full(ids.shape, 1 / ids.size, np.float32),
        }


@pytest.fixture
def oracle(request):
    return Oracle(request.param)


DENSE = list(LAYOUTS)[:3]
CASES = [("gpt2", DENSE[0]), ("gpt2", "mesh"), ("llama", DENSE[1]), ("llama", "mesh"), ("moe", "experts split")]
SLOW_CASES = [("gpt2", DENSE[1]), ("llama", DENSE[0]), *(("moe", layout) for layout in DENSE)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.fixture
def run(oracle, layout, make_test_mesh):
    """batch -> (loss, gradients of the training loss by Megatron's names)."""
    sizes, scan, vocab_multiple = LAYOUTS[layout]
    mesh, execution = make_test_mesh(**sizes), ExecutionConfig(scan_layers=scan)
    config = dataclasses.replace(oracle.config, vocab_multiple=vocab_multiple)
    model = Model(config, PrecisionConfig(compute="float32"), execution)
    params = jax.device_put(to_megajax(oracle.params, config), model.shardings(mesh))

    def losses(params, batch):
        terms = model.loss(params, batch, Language())
        return terms.total(), terms.main

    step = jax.jit(jax.value_and_grad(losses, has_aux=True))

    def run(batch):
        order = sequence_order(batch["tokens"].shape[1], mesh.shape["context"], execution.context_attention)
        batch = {name: array[:, order] for name, array in batch.items()}
        with jax.set_mesh(mesh):
            (_, value), gradients = step(params, batch)
        return float(value), from_megajax(gradients, config)

    return run


@pytest.mark.parametrize("oracle, layout", CASES, indirect=["oracle"])
def test_loss_and_every_gradient_equal_megatrons(oracle, run):
    loss, gradients = run(oracle.batch)
    assert loss == pytest.approx(oracle.loss_mean, rel=TOLERANCE)
    assert set(gradients) == set(oracle.gradients)
    for name, wanted in oracle.gradients.items():
        found, padding = np.split(gradients[name], [len(wanted)])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=name)
        assert not np.any(padding), name

    # The same program with all the weight on one token gives that token's loss.
    for row, place in ((0, 0), (0, 31), (1, 13)):
        weights = np.zeros_like(oracle.batch["loss_weights"])
        weights[row, place] = 1
        assert run(oracle.batch | {"loss_weights": weights})[0] == pytest.approx(oracle.loss[row, place], rel=TOLERANCE)


@pytest.mark.parametrize("oracle", ["gpt2", "llama", "moe"], indirect=True)
def test_logits_give_the_loss_of_every_token(oracle, make_test_mesh):
    model = Model(oracle.config, PrecisionConfig(compute="float32"))

    @jax.jit
    def token_losses(params, batch):
        module = model.module(params)
        x, _, _ = module.layers(module.embed(batch, None), module.block_inputs(batch))
        log_probs = jax.nn.log_softmax(module.logits(x))
        return -jax.numpy.take_along_axis(log_probs, batch["labels"][..., None], -1)[..., 0]

    with jax.set_mesh(make_test_mesh()):
        losses = token_losses(to_megajax(oracle.params, oracle.config), oracle.batch)
    np.testing.assert_allclose(losses, oracle.loss, rtol=TOLERANCE)
