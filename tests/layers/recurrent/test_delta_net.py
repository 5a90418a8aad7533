"""The gated delta net computes what transformers does. On meshes and from a cache: tests/models/test_hybrid.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.parameters import Structure

ORACLE = Path(__file__).parents[2] / "oracles" / "gated_delta_net.npz"
G, R, N, P = 2, 2, 6, 5  # heads of keys, heads of values for each, their widths


def from_transformers(theirs: dict) -> dict:
    """Its projections have their rows by head of keys, and linear layers [outputs, inputs]; ours the inputs first."""
    split = theirs["in_proj_qkvz.weight"].T.reshape(-1, G, 2 * N + 2 * R * P)
    query, key, value, gate = np.split(split, [N, 2 * N, 2 * N + R * P], axis=-1)
    beta, dt = np.split(theirs["in_proj_ba.weight"].T.reshape(-1, G, 2 * R), 2, axis=-1)
    taps = np.split(theirs["conv1d.weight"][:, 0].T, [G * N, 2 * G * N], axis=-1)
    D = len(query)
    return {
        "query": query,
        "key": key,
        "value": value.reshape(D, G * R, P),
        "gate": gate.reshape(D, G * R, P),
        "beta": beta.reshape(D, G * R),
        "dt": dt.reshape(D, G * R),
        "conv_query": taps[0].reshape(-1, G, N),
        "conv_key": taps[1].reshape(-1, G, N),
        "conv_value": taps[2].reshape(-1, G * R, P),
        "dt_bias": theirs["dt_bias"],
        "A_log": theirs["A_log"],
        "norm_scale": theirs["norm.weight"],
        "out": theirs["out_proj.weight"].T.reshape(G * R, P, D),
    }


def test_the_layer_equals_that_of_transformers():
    """Its output and the gradient of its input, recorded by tests/oracles/make_gated_delta_net.py."""
    recorded = np.load(ORACLE)
    theirs = {name.removeprefix("weights/"): recorded[name] for name in recorded if name.startswith("weights/")}
    section = DeltaNetConfig(num_value_heads=G * R, value_head_dim=P, num_key_heads=G, key_head_dim=N, chunk=8)
    config = section.mixer(
        embed_dim=recorded["x"].shape[-1], norm_epsilon=1e-5, context="ring", init_std=0.1, out_init_std=0.1
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0))))
    structure = Structure.of(state)
    weights = from_transformers(theirs)
    assert jax.tree.map(jnp.shape, structure.to_tree(state)) == jax.tree.map(jnp.shape, weights)

    @jax.jit
    def run(weights, x):
        y, vjp = jax.vjp(lambda x: nnx.merge(graph, structure.to_state(weights))(x, {})[0], x)
        return y, vjp(jnp.cos(y))[0]

    for found, name in zip(run(weights, recorded["x"]), ("y", "d_x"), strict=True):
        wanted = recorded[name]
        # Both sides are float32 and add up in another order.
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
