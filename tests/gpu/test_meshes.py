"""Five steps on products of mesh axes equal those on one GPU within the noise of bfloat16: kernels, collectives and
pipeline together. The same on CPU in float32: tests/training/test_meshes.py."""

import functools

import jax
import numpy as np
import pytest

import configs
from megajax.mesh.config import make_mesh
from megajax.overrides import override
from megajax.run import load_data, make_trainer
from megajax.training.faults.watchdog import Watchdog

pytestmark = pytest.mark.gpu

STEPS = 5
SMALL = [
    "--model.num_layers=4", "--model.embed_dim=512", "--model.num_heads=4", "--model.num_kv_heads=2",
    "--model.head_dim=128", "--model.vocab_size=1000", "--data.source=mock", "--data.tokenizer=null:999",
    "--training.sequence_length=512", "--training.global_batch_size=16", "--training.microbatch_size=None",
    "--training.steps=100", "--optimizer.warmup_steps=2", "--optimizer.learning_rate=1e-3",
    "--training.eval_every_steps=0",
]  # fmt: skip
RECIPES = {
    "llama3_8b": ["--model.mlp_dim=1024"],
    "qwen3_30b_a3b": ["--model.moe.num_experts=8", "--model.moe.router.top_k=2", "--model.moe.expert_dim=256"],
}
MESHES = [
    ("llama3_8b", {"fsdp": 2}),
    ("llama3_8b", {"tensor": 2}),
    ("llama3_8b", {"pipeline": 2}),
    ("llama3_8b", {"context": 2}),
    ("qwen3_30b_a3b", {"expert": 2}),
    ("llama3_8b", {"tensor": 2, "pipeline": 2}),
    ("qwen3_30b_a3b", {"expert": 2, "fsdp": 2}),
    ("llama3_8b", {"tensor": 2, "pipeline": 2, "fsdp": 2}),
    ("llama3_8b", {"context": 2, "tensor": 2, "fsdp": 2}),
    ("qwen3_30b_a3b", {"expert": 4, "fsdp": 2}),
]


def losses(recipe: str, sizes: dict[str, int], run_dir: str) -> list[float]:
    num_devices = int(np.prod(list(sizes.values())))
    mesh = {"data": 1, "fsdp": 1, "tensor": 1, "pipeline": 1, "expert": 1, "context": 1} | sizes
    arguments = [*SMALL, *RECIPES[recipe], *(f"--mesh.{axis}={size}" for axis, size in mesh.items())]
    if "pipeline" in sizes:
        arguments.append("--training.microbatch_size=2")
    config = override(configs.recipe(recipe), [*arguments, f"--run_dir={run_dir}"]).check_on(num_devices)
    program = config.make_program(make_mesh(config.mesh, jax.devices()[:num_devices]))
    with (
        make_trainer(config, program, load_data(config), Watchdog(0)) as trainer,
        jax.set_mesh(program.mesh),
    ):
        state = trainer.initial_state()
        step = program.train_step(config.training)
        found = []
        batches = trainer.train_batches(0, STEPS, lambda: state.weights)
        for number, batch in enumerate(batches):
            state, metrics = step(state, batch, np.float32(trainer.learning_rate(number)))
            found.append(float(metrics["loss"]))
    return found


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory):
    return functools.cache(lambda recipe: losses(recipe, {}, str(tmp_path_factory.mktemp("one"))))


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    MESHES,
    ids=["-".join([recipe, *(f"{axis}{size}" for axis, size in sizes.items())]) for recipe, sizes in MESHES],
)
def test_a_product_of_axes_equals_one_gpu(recipe, sizes, on_one_gpu, tmp_path):
    needed = int(np.prod(list(sizes.values())))
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    found = losses(recipe, sizes, str(tmp_path))
    assert found[0] > found[-1] + 0.01, found  # it learns
    np.testing.assert_allclose(found, on_one_gpu(recipe), rtol=2e-3)
