"""A decoder with a tower: the same on every mesh, whatever shares the patches; masks; what it refuses."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megajax.images.layout import NEWLINE
from megajax.images.rules import ImageRule
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import batch_spec
from megajax.models import pipelined
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language

B, T, VOCAB = 8, 32, 64
RULE = ImageRule(resize="squash", size=8, patch_size=2, merge=2)
TOWER = TowerConfig(
    num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, image=RULE, table=4, rotary=True, window=2, full_layers=(1,),
    project_norm="patch", project_dim=16, newline=True, blocks=8, patches=16,
)  # fmt: skip
MODEL = MultimodalConfig(
    num_layers=4, embed_dim=16, num_heads=4, vocab_size=VOCAB, position="rope", init_std=0.2, vision=TOWER
)
FLOAT32 = PrecisionConfig(compute="float32")


@functools.cache
def make_batch() -> dict[str, np.ndarray]:
    """Each row has two images of 4 x 4 patches, in two of its 8 blocks; the text has them in the other order, and one
    newline."""
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, VOCAB, (B, T), np.int32),
        "labels": rng.integers(0, VOCAB, (B, T), np.int32),
        "loss_weights": np.full((B, T), 1 / (B * T), np.float32),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "segment_ids": np.repeat(np.array([[1, 2]], np.int32), T // 2, 1).repeat(B, 0),
        "patches": np.zeros((B, 8, 16, 12), np.uint8),
        "patch_places": np.zeros((B, 8, 16, 5), np.int32),
        "image_index": np.full((B, T), -1, np.int32),
    }
    places = [(block // 2 * 2 + at // 2, block % 2 * 2 + at % 2) for block in range(4) for at in range(4)]
    for row in range(B):
        parts = rng.permutation(8)[:2]
        for part in parts:
            batch["patches"][row, part] = rng.integers(0, 256, (16, 12))
            batch["patch_places"][row, part] = [(1, *place, 4, 4) for place in places]
        for start, part in zip((3, 20), reversed(parts), strict=True):
            batch["image_index"][row, start : start + 4] = 4 * part + np.arange(4)
        batch["image_index"][row, 24] = NEWLINE
    return batch


def loss_and_gradients(config: MultimodalConfig, sizes: dict, **how):
    """-> (loss, gradients) on a mesh, unstacked."""
    mesh_config = MeshConfig(**sizes)
    execution = ExecutionConfig(**how)
    stages = make_stages(mesh_config, config.num_layers)
    model = Model(config, FLOAT32, execution, stages=stages)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    order = sequence_order(T, mesh_config.context, execution.context_attention)
    arrays = model.config.inputs(T, packed=True)

    def placed(name, array):
        dims = arrays[name].dims if name in arrays else ("time",)
        array = array[:, order] if dims[0] == "time" else array
        return jax.device_put(array[None], NamedSharding(mesh, batch_spec(dims)))

    batch = {name: placed(name, array) for name, array in make_batch().items()}
    weights = model.init(0, mesh)

    def run(weights, batch):
        if stages is not None:
            terms, gradients, _ = pipelined.loss_and_gradients(
                model, model.split(weights), batch, Language(), None, NO_REGULARISERS
            )
            return terms.total(), gradients
        first = {name: array[0] for name, array in batch.items()}
        return jax.value_and_grad(lambda weights: model.loss(weights, first, Language()).total())(weights)

    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(run)(weights, batch))


@functools.cache
def on_one_device(config: MultimodalConfig):
    return loss_and_gradients(config, {})


@pytest.mark.parametrize(
    "sizes, how",
    [
        (dict(data=2, fsdp=2, tensor=2), {}),
        (dict(context=2, tensor=2, data=2), dict(scan_layers=True, recompute="full")),
        (dict(pipeline=2, tensor=2, context=2), {}),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_loss_and_gradients(sizes, how):
    loss, gradients = on_one_device(MODEL)
    found, on_mesh = loss_and_gradients(MODEL, sizes, **how)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    flat = jax.tree.map(lambda a, like: a.reshape(like.shape), on_mesh, gradients)
    for path, wanted in jax.tree_util.tree_leaves_with_path(gradients):
        got = functools.reduce(lambda tree, key: tree[key.key], path, flat)
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
        assert np.abs(wanted).max() > 0, path
