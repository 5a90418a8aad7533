"""One layer of experts, bfloat16, on the GPUs of this machine: python -m benchmarks.moe_layer [NAME ...] [--profile]

Prints milliseconds for the forward pass, and for both passes together, with 4,096 tokens per GPU and the experts split
over all GPUs, for tokens that choose about evenly and skewed. As in a model, several layers follow one another in a
program. benchmarks/peers/torch_moe.py measures the same layers in PyTorch.
"""

import sys
import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.layer_times import layer_times
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.feed_forward.moe import ExpertsConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import weight_shardings
from megajax.parameters import Structure, records
from megajax.training.reporting.console import log_to_stderr

TOKENS = 4096
# Model width, width of an expert, experts, experts per token, width of the shared experts.
LAYERS = {
    "mixtral": (4096, 14336, 8, 2, 0),
    "deepseek": (7168, 2048, 32, 8, 2048),
    "qwen3": (2048, 768, 128, 8, 0),
}
LAYERS_PER_PROGRAM = 3


def skew_of(experts: int) -> np.ndarray:
    """float32 [experts]: added to the logits of every token."""
    return np.random.default_rng(7).normal(size=experts).astype(np.float32)


def chained(layer):
    """layer(weights, *arrays), several times; each waits for the results of the one before."""

    def run(weights, *arrays):
        all_results = []
        for _ in range(LAYERS_PER_PROGRAM):
            arrays, results = jax.lax.optimization_barrier((arrays, layer(weights, *arrays)))
            all_results.append(results)
        return all_results

    return jax.jit(run)


def measure(name: str, profiled: bool, **options) -> Iterator[str]:
    width, expert_width, experts, top_k, shared = LAYERS[name]
    num_devices = jax.device_count()
    of_mlp = ("swiglu", False, 0.02, 0.02)
    config = ExpertsConfig(
        width, expert_width, *of_mlp, num_experts=experts, router=RouterConfig(top_k=top_k),
        shared=MlpConfig(width, shared, *of_mlp) if shared else None, shared_gate=False, context="ring",
        **{"dispatch": "auto", "buffer": 1.5} | options,
    )  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(params=0))))
    structure = Structure.of(state)
    mesh = make_mesh(MeshConfig(expert=num_devices))

    def layer(weights, x):
        y, _, terms = nnx.merge(graphdef, structure.to_state(weights))(x)
        return y, terms

    def both_passes(weights, x, d_y):
        y, vjp, _ = jax.vjp(layer, weights, x, has_aux=True)
        return y, vjp(d_y)

    forward = chained(lambda weights, x: layer(weights, x)[0])
    both = chained(both_passes)
    load_of = jax.jit(lambda weights, x: layer(weights, x)[1].metrics["router_max_load"])
    with jax.set_mesh(mesh):
        tree = structure.to_tree(state)
        shardings = weight_shardings(records(state), mesh)
        x, d_y = (
            jax.device_put(
                np.random.default_rng(seed).normal(size=(num_devices, TOKENS, width)).astype(jnp.bfloat16),
                jax.NamedSharding(mesh, jax.P("expert")),
            )
            for seed in range(2)
        )
        x = x.at[:, :, 0].set(1.0)  # multiplies the skew

        def weights_of(skew: float):
            def drawn(path, like):
                dtype = jnp.float32 if "router" in str(path[0]) else jnp.bfloat16
                values = jax.random.normal(jax.random.key(zlib.crc32(str(path).encode())), like.shape, dtype) * 0.02
                return values.at[0].set(skew_of(experts) * skew) if "router" in str(path[0]) else values

            return jax.jit(lambda: jax.tree_util.tree_map_with_path(drawn, tree), out_shardings=shardings)()

        for kind, skew in (("even", 0.0), ("skewed", 1.0)):
            weights = weights_of(skew)
            times = layer_times(forward, both, weights, x, d_y, num_layers=LAYERS_PER_PROGRAM, profiled=profiled)
            load = f"largest load {load_of(weights, x):.2f} of the mean"
            yield f"megajax {name} {kind}, {num_devices} GPUs {options or ''}: {times}; {load}"


def main(arguments: list[str]) -> None:
    log_to_stderr()
    for name in [a for a in arguments if a in LAYERS] or LAYERS:
        for line in measure(name, "--profile" in arguments):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
