"""BERT equals Megatron Core's (tests/oracles), is the same on every mesh, trains, resumes and is evaluated."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers import attention as attention_layer
from megajax.models.bert import BertConfig
from megajax.models.model import Model
from megajax.parallel.context import sequence_order
from megajax.precision import PrecisionConfig

ORACLES = Path(__file__).parent.parent / "oracles"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
FLOAT32 = PrecisionConfig(compute="float32")


# ----------------------------------------------------------------------------- Megatron Core


class Oracle:
    def __init__(self):
        saved = np.load(ORACLES / "bert.npz")
        sizes = json.loads(str(saved["config"]))
        self.config = BertConfig(
            num_layers=sizes["num_layers"], embed_dim=sizes["hidden_size"], num_heads=sizes["num_attention_heads"],
            vocab_size=sizes["vocab"], max_positions=sizes["seq"], vocab_multiple=32, norm_epsilon=1e-5,
            norm_placement="pre", embedding_norm=False, tied_embeddings=False, dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        self.params = ours({key[6:]: saved[key] for key in saved.files if key.startswith("param/")}, sizes)
        self.gradients = ours({key[5:]: saved[key] for key in saved.files if key.startswith("grad/")}, sizes)
        self.logits, self.pair_logits, self.loss = saved["logits"], saved["binary_logits"], float(saved["loss_mean"])
        ids = saved["ids"].astype(np.int32)
        self.is_text = saved["attention_mask"].astype(bool)
        self.batch = {
            "tokens": ids,
            "positions": np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape),
            "segment_ids": self.is_text.astype(np.int32),
            "token_types": np.zeros_like(ids),
        }


def ours(named: dict, sizes: dict) -> dict:
    """Megatron's arrays as nested dict of ours; the gradients lack pooler and binary head, which have none."""
    N, D, L = sizes["num_attention_heads"], sizes["hidden_size"], sizes["num_layers"]
    H = D // N

    def linear(name, path):
        return {path: named[f"{name}.weight"].T, f"{path}_bias": named[f"{name}.bias"]}

    def norm(name):
        return {"scale": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}

    def layer(number):
        prefix = f"encoder.layers.{number}."
        qkv = {
            f"{part}{suffix}": rows.T.reshape(*rows.shape[1:], N, 3, H)[..., place, :]
            for suffix, rows in (
                ("", named[prefix + "self_attention.linear_qkv.weight"]),
                ("_bias", named[prefix + "self_attention.linear_qkv.bias"]),
            )
            for place, part in enumerate(("query", "key", "value"))
        }
        out = linear(prefix + "self_attention.linear_proj", "out")
        out["out"] = out["out"].reshape(N, H, D)
        return {
            "attention": qkv | out,
            "attention_norm": norm(prefix + "input_layernorm"),
            "mlp": linear(prefix + "mlp.linear_fc1", "up") | linear(prefix + "mlp.linear_fc2", "down"),
            "mlp_norm": norm(prefix + "pre_mlp_layernorm"),
        }

    tree = {
        "embedding": named["embedding.word_embeddings.weight"],
        "position_embedding": named["embedding.position_embeddings.weight"],
        "token_type_embedding": named["embedding.tokentype_embeddings.weight"],
        "layers": {"dense": jax.tree.map(lambda *rows: np.stack(rows), *(layer(n) for n in range(L)))},
        "final_norm": norm("encoder.final_layernorm"),
        "head": named["output_layer.weight"].T,
        "head_bias": named["output_layer.bias"],
        "head_norm": norm("lm_head.layer_norm"),
        **linear("lm_head.dense", "head_dense"),
    }
    if "binary_head.weight" in named:
        tree |= linear("pooler.dense", "pooler") | linear("binary_head", "next_sentence")
    return tree


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def heads(model, params, batch):
    """-> (logits of every token, logits of the next-sentence head)."""
    module = model.module(params)
    h = module.hidden(batch)
    return module.logits(h), module.pair_logits(h, batch)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2, "fsdp": 2, "context": 2}], ids=str)
def test_logits_equal_megatrons(oracle, sizes, make_test_mesh):
    """Of the text: padding attends to padding here, and to nothing in Megatron."""
    model = Model(oracle.config, FLOAT32)
    mesh = make_test_mesh(**sizes)
    params = jax.device_put(oracle.params, model.shardings(mesh))
    order = sequence_order(oracle.is_text.shape[1], sizes.get("context", 1), "ring")
    batch = {name: array[:, order] for name, array in oracle.batch.items()}
    with jax.set_mesh(mesh):
        logits, pair_logits = jax.jit(lambda params, batch: heads(model, params, batch))(params, batch)
    found = np.asarray(logits)[:, np.argsort(order)]
    np.testing.assert_allclose(found[oracle.is_text], oracle.logits[oracle.is_text], atol=TOLERANCE)
    np.testing.assert_allclose(pair_logits, oracle.pair_logits, atol=TOLERANCE)


def test_every_gradient_equals_megatrons(oracle, monkeypatch):
    """Of the mean square of all logits, those of the padding included: here the padding sees no key, as in Megatron,
    which gives it the mean of all values."""

    def megatrons(q, k, v, *, segments, **options):
        queries, keys = segments
        return actual(q, k, v, segments=(queries, jnp.where(keys == 0, -1, keys)), **options)

    actual = attention_layer.attention
    monkeypatch.setattr(attention_layer, "attention", megatrons)
    model = Model(oracle.config, FLOAT32)

    def objective(params):
        logits, _ = heads(model, params, oracle.batch)
        return jnp.mean(logits**2), logits

    (loss, logits), gradients = jax.jit(jax.value_and_grad(objective, has_aux=True))(oracle.params)
    assert loss == pytest.approx(oracle.loss, rel=TOLERANCE)
    np.testing.assert_allclose(logits, oracle.logits, atol=TOLERANCE)
    for name in ("pooler", "pooler_bias", "next_sentence", "next_sentence_bias"):
        assert not np.any(gradients.pop(name))
    largest = jax.tree.map(lambda wanted: np.abs(wanted).max(), oracle.gradients)
    attention = largest["layers"]["dense"]["attention"]
    attention["key_bias"] = attention["query_bias"]  # that of keys is zero but for rounding
    jax.tree.map(
        lambda found, wanted, most: np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * most),
        gradients, oracle.gradients, largest,
    )  # fmt: skip
