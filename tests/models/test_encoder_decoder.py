"""T5: loss and every gradient equal Megatron Core's, on one device and on a mesh; relative positions are T5's."""

import functools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.layers.relative_position import RelativeBiasConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

ORACLE = Path(__file__).parent.parent / "oracles" / "t5.npz"
EVERY = 4  # of the entries of a gradient that the file has
MEGATRON = dict(
    norm="layernorm", norm_epsilon=1e-5, final_norm=False, activation="gelu", bias=True, position="learned",
    attention_multiplier=None, tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(compute="float32")


@functools.cache
def oracle():
    saved = np.load(ORACLE)
    return json.loads(str(saved["config"])), {name: saved[name] for name in saved.files}


def oracle_config() -> EncoderDecoderConfig:
    sizes, _ = oracle()
    D, N = sizes["hidden_size"], sizes["num_attention_heads"]
    return EncoderDecoderConfig(
        num_layers=sizes["num_layers"], embed_dim=D, num_heads=N, head_dim=D // N, mlp_dim=4 * D,
        vocab_size=sizes["vocab"], decoder_length=sizes["seq"], max_positions=sizes["seq"], **MEGATRON,
    )  # fmt: skip


def of_megatron(arrays: dict[str, np.ndarray], config: EncoderDecoderConfig) -> dict:
    """Megatron's parameters, [out, in] each, as ours."""
    D, N, H = config.embed_dim, config.num_heads, config.head_dim

    def norm(name):
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def projections(name, ours):
        """Of one matrix whose rows are grouped by head."""
        weights = arrays[f"{name}.weight"].reshape(N, len(ours), H, D)
        biases = arrays[f"{name}.bias"].reshape(N, len(ours), H)
        found = {key: weights[:, i].transpose(2, 0, 1) for i, key in enumerate(ours)}
        return found | {f"{key}_bias": biases[:, i] for i, key in enumerate(ours)}

    def attention(name, parts):
        found = {"out": arrays[f"{name}.linear_proj.weight"].T.reshape(N, H, D)}
        found["out_bias"] = arrays[f"{name}.linear_proj.bias"]
        for matrix, ours in parts.items():
            found |= projections(f"{name}.{matrix}", ours)
        return found

    def layer(name):
        mlp = {}
        for ours, theirs in (("up", f"{name}.mlp.linear_fc1"), ("down", f"{name}.mlp.linear_fc2")):
            mlp |= {ours: arrays[f"{theirs}.weight"].T, f"{ours}_bias": arrays[f"{theirs}.bias"]}
        found = {
            "attention_norm": norm(f"{name}.input_layernorm"),
            "attention": attention(f"{name}.self_attention", {"linear_qkv": ("query", "key", "value")}),
            "mlp_norm": norm(f"{name}.pre_mlp_layernorm"),
            "mlp": mlp,
        }
        if name.startswith("decoder"):
            parts = {"linear_q": ("query",), "linear_kv": ("key", "value")}
            found["cross_norm"] = norm(f"{name}.pre_cross_attn_layernorm")
            found["cross_attention"] = attention(f"{name}.cross_attention", parts)
        return found

    def stack(name):
        layers = [layer(f"{name}.layers.{i}") for i in range(config.num_layers)]
        return {"dense": jax.tree.map(lambda *rows: np.stack(rows), *layers)}

    return {
        "embedding": arrays["embedding.word_embeddings.weight"],
        "position_embedding": arrays["embedding.position_embeddings.weight"],
        "encoder": stack("encoder"),
        "decoder": stack("decoder"),
        "head": arrays["lm_head.output_layer.weight"].T,
    }


@pytest.mark.parametrize("sizes, scan", [({}, False), ({"data": 2, "fsdp": 2, "tensor": 2}, True)], ids=str)
def test_loss_and_every_gradient_equal_megatrons(sizes, scan, make_test_mesh):
    _, saved = oracle()
    config = oracle_config()
    model = Model(config, FLOAT32, ExecutionConfig(scan_layers=scan))
    mesh = make_test_mesh(**sizes)
    weights = of_megatron({name[6:]: a for name, a in saved.items() if name.startswith("param/")}, config)
    ids, labels = (saved[name].astype(np.int32) for name in ("ids", "labels"))
    batch = {
        "encoder_tokens": np.tile(ids, (2, 1)),
        "encoder_segment_ids": np.ones((4, ids.shape[1]), np.int32),
        "tokens": np.tile(labels, (2, 1)),
        "labels": np.tile(labels, (2, 1)),
        "loss_weights": np.repeat([[1.0], [0.0]], 2, 0) * np.ones((1, ids.shape[1])) / ids.size,
    }
    batch["loss_weights"] = batch["loss_weights"].astype(np.float32)  # rows 2 and 3 only fill the mesh
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights, model.shardings(mesh))
        loss, gradients = jax.jit(jax.value_and_grad(lambda w: model.loss(w, batch).main))(weights)
    # Both sides are float32 and add up in another order.
    assert float(loss) == pytest.approx(float(saved["loss_mean"]), rel=1e-5)
    positions = {name[6:]: np.arange(a.size).reshape(a.shape) for name, a in saved.items() if name.startswith("param/")}
    places = jax.tree.leaves(of_megatron(positions, config))
    ours = np.concatenate([np.asarray(a).ravel() for a in jax.tree.leaves(gradients)])
    assert len(ours) == sum(a.size for a in places)
    names = of_megatron({name: np.full(a.shape, i) for i, (name, a) in enumerate(positions.items())}, config)
    owner = np.concatenate([a.ravel() for a in jax.tree.leaves(names)])
    place = np.concatenate([a.ravel() for a in places])
    for number, name in enumerate(positions):
        found = ours[owner == number][np.argsort(place[owner == number])][::EVERY]
        wanted = saved[f"grad/{name}"].ravel()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)


def test_buckets_are_those_of_the_paper():
    """Exact below 8 places either way (16 in the decoder), then ranges that double every 2 (5.33) buckets."""
    encoder = RelativeBiasConfig(1, 32, 128, True, 1.0).buckets()
    decoder = RelativeBiasConfig(1, 32, 128, False, 1.0).buckets()
    assert encoder[128:137].tolist() == [0, *range(17, 24), 24] and decoder[:129].max() == 31
    for distance in range(1, 129):
        near = distance if distance < 8 else min(8 + int(2 * math.log2(distance / 8) + 1e-6), 15)
        assert (encoder[128 - distance], encoder[128 + distance]) == (near, near + 16)
        near = distance if distance < 16 else min(16 + int(16 / 3 * math.log2(distance / 16) + 1e-6), 31)
        assert (decoder[128 - distance], decoder[128 + distance]) == (near, 0)
