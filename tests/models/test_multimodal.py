"""A decoder with a tower: the same on every mesh, whatever shares the patches; masks; what it refuses."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import megajax
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.images.rules import ImageRule
from megajax.media.rows import NEWLINE
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import batch_spec
from megajax.models import pipelined
from megajax.models.audio_tower import AudioConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.optim.config import OptimizerConfig
from megajax.parallel.context import sequence_order
from megajax.parallel.schedule import make_stages
from megajax.parameters import named
from megajax.precision import PrecisionConfig
from megajax.tasks.conversations import Conversations, answered, changed_media
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig
from runs import run_of

B, T, VOCAB = 8, 32, 64
RULE = ImageRule(resize="squash", size=8, patch_size=2, merge=2)
TOWER = TowerConfig(
    num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, image=RULE, table=4, rotary=True, window=2, full_layers=(1,),
    project_norm="patch", project_dim=16, newline=True, blocks=8, patches=16,
)  # fmt: skip
MODEL = MultimodalConfig(
    num_layers=4, embed_dim=16, num_heads=4, vocab_size=VOCAB, position="rope", init_std=0.2, vision=TOWER
)
DEEP = dataclasses.replace(
    MODEL, image_attention="bidirectional", vision=dataclasses.replace(TOWER, deep_layers=(0,)), num_layers=2
)
SOUND = AudioConfig(
    num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, merge=2, positions=9, project_dim=16, blocks=8, frames=8
)
BOTH = dataclasses.replace(MODEL, audio=SOUND, audio_token=1)
FLOAT32 = PrecisionConfig(compute="float32")


OF_LOSS = ("labels", "loss_weights")


@functools.cache
def make_batch() -> dict[str, np.ndarray]:
    """Each row has two images of 4 x 4 patches, in two of its 8 blocks; the text has them in the other order, and one
    newline. It has two clips of 13 mel frames in the same way."""
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
        "block_ids": np.zeros((B, T), np.int32),
        "frames": np.zeros((B, 8, 8, 400), np.float32),
        "frame_places": np.zeros((B, 8, 8, 3), np.int32),
        "audio_index": np.full((B, T), -1, np.int32),
    }
    layouts = SOUND.layouts
    places = [(block // 2 * 2 + at // 2, block % 2 * 2 + at % 2) for block in range(4) for at in range(4)]
    for row in range(B):
        parts = rng.permutation(8)[:2]
        for part in parts:
            batch["patches"][row, part] = rng.integers(0, 256, (16, 12))
            batch["patch_places"][row, part] = [(1, *place, 4, 4) for place in places]
        for start, part in zip((3, 20), reversed(parts), strict=True):
            batch["image_index"][row, start : start + 4] = 4 * part + np.arange(4)
            batch["block_ids"][row, start : start + 4] = start
        batch["image_index"][row, 24] = NEWLINE
        parts = rng.permutation(8)[:2]
        for start, part in zip((9, 26), reversed(parts), strict=True):
            batch["frames"][row, part, :7] = layouts.rows(rng.normal(0, 1, (13, 80)))
            batch["frame_places"][row, part, :7] = [(1, place, 13) for place in range(7)]
            batch["audio_index"][row, start : start + 4] = 4 * part + np.arange(4)
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
    num_microbatches = 1 if stages is None else 2

    def placed(name, array):
        dims = arrays[name].dims if name in arrays else ("time",)
        array = array[:, order] if dims[0] == "time" else array
        array = array.reshape(num_microbatches, -1, *array.shape[1:])
        return jax.device_put(array, NamedSharding(mesh, batch_spec(dims)))

    batch = {name: placed(name, array) for name, array in make_batch().items() if name in {*arrays, *OF_LOSS}}
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
        (dict(pipeline=2, tensor=2, context=2), dict(context_attention="all_to_all", model="deep")),
        (dict(context=2, tensor=2, fsdp=2), dict(context_attention="all_to_all", model="deep")),
        (dict(pipeline=2, tensor=2, context=2), dict(model="both")),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_loss_and_gradients(sizes, how):
    """deep: also with deep layers, and images that see themselves; both: images and sound."""
    how = dict(how)
    model = {"deep": DEEP, "both": BOTH, "images": MODEL}[how.pop("model", "images")]
    loss, gradients = on_one_device(model)
    found, on_mesh = loss_and_gradients(model, sizes, **how)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    flat = jax.tree.map(lambda a, like: a.reshape(like.shape), on_mesh, gradients)
    for path, wanted in jax.tree_util.tree_leaves_with_path(gradients):
        got = functools.reduce(lambda tree, key: tree[key.key], path, flat)
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
        assert np.abs(wanted).max() > 0, path


def test_a_frozen_tower_does_not_change_and_has_no_optimizer_state(tmp_path, monkeypatch):
    config = Config(
        model=dataclasses.replace(MODEL, num_layers=1, vision=dataclasses.replace(TOWER, newline=False)),
        task=Conversations(rates_answers=True),
        precision=FLOAT32,
        data=DataConfig(source="mock", tokenizer=f"null:{VOCAB}", cache_dir=str(tmp_path)),
        training=TrainingConfig(
            steps=2, global_batch_size=2, sequence_length=T, eval_every_steps=2, eval_steps=1, log_every_steps=1,
            frozen=("vision_layers.*", "vision.table", "vision.patch*"),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    lines = run_of(config, monkeypatch)
    evaluation = lines[-1]
    assert {"eval_answers", "eval_answers_exchanged", "eval_answers_grey"} <= evaluation.keys()
    run = megajax.Run(config, jax.devices()[:1])
    before = named(run.init().weights)
    state = run.restore(2)
    for name, array in named(state.weights).items():
        is_frozen = name.startswith(("vision_layers.", "vision.table", "vision.patch"))
        assert np.array_equal(array, before[name]) == is_frozen, name
    held = {name.rpartition("vision")[0] for name in named(state.optimizer) if "vision_layers" in name}
    assert not held


def test_controls_change_the_media_of_each_kind():
    batch = {name: array[None] for name, array in make_batch().items()}
    found = changed_media(batch)
    assert found.keys() == {"exchanged", "grey", "silent"}
    np.testing.assert_array_equal(found["exchanged"]["frames"][0, 1], batch["frames"][0, 0])
    np.testing.assert_array_equal(found["exchanged"]["patch_places"][0, 0], batch["patch_places"][0, -1])
    assert (found["silent"]["frames"] == -1.5).all() and found["silent"]["patches"] is batch["patches"]
    assert (found["grey"]["patches"] == 128).all() and found["grey"]["frames"] is batch["frames"]


def test_answers_count_whole_conversations():
    class Module:
        def log_probs(self, h, labels):
            return SimpleNamespace(top=h)

    batch = {
        "segment_ids": jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]]),
        "labels": jnp.array([[5, 6, 7, 8, 9, 1, 0, 0]]),
        "loss_weights": jnp.array([[0, 1, 1, 1, 1, 0, 0, 0]], jnp.float32),
    }
    likely = jnp.array([[0, 6, 7, 8, 0, 0, 0, 0]])  # the first conversation is right, the third has no answer
    right, counted = answered(Module(), likely, batch)
    assert (float(right), float(counted)) == (1, 2)
    assert changed_media(batch) == {}


@pytest.mark.parametrize("fields, mesh, message", [
    (dict(vision=TowerConfig()), {}, "model.audio.num_layers=0 with model.kind=multimodal"),
    (dict(vision=dataclasses.replace(TOWER, blocks=3)), dict(tensor=2), "vision.blocks=3 must be a multiple of 2"),
    (dict(vision=dataclasses.replace(TOWER, patches=18)), {}, "patches=18 is no multiple of the 4 patches"),
    (dict(vision=dataclasses.replace(TOWER, window=3)), {}, "window=3 is no multiple of model.vision.image.merge=2"),
    (dict(vision=dataclasses.replace(TOWER, deep_layers=(2,))), {}, "deep_layers=2 must ascend and be below"),
    (dict(vision=dataclasses.replace(TOWER, deep_layers=(0, 1))), dict(pipeline=4), "the first stage has 1 layers"),
    (dict(image_attention="bidirectional"), dict(context=2), "use --execution.context_attention=all_to_all"),
    (dict(mtp_layers=1), {}, "model.mtp_layers=1 is not supported"),
    (dict(audio=SOUND), {}, "model.image_token=0 and model.audio_token=0: each kind needs a token of its own"),
    (dict(audio=dataclasses.replace(SOUND, blocks=1), audio_token=1), dict(tensor=2), "audio.blocks=1 must be a multi"),
    (dict(audio=dataclasses.replace(SOUND, frames=9), audio_token=1), {}, "audio.frames=9 is no multiple of the 2"),
    (dict(audio=dataclasses.replace(SOUND, embed_dim=9, num_heads=1), audio_token=1), {}, "embed_dim=9 must be even"),
])  # fmt: skip
def test_contradictions_are_refused(fields, mesh, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MODEL, **fields).check(MeshConfig(**mesh), T, ExecutionConfig())
