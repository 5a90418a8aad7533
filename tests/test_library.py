"""A notebook gets from `import megajax` what train.py and infer.py do, a step at a time or all at once."""

import functools
import itertools
import subprocess
import sys

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
import megajax
from megajax import library
from megajax.inference.engine import ServingConfig

TINY = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.num_heads": 2,
    "model.mlp_dim": 64,
    "model.vocab_size": 512,
    "data.source": "mock",
    "data.text": (),
    "data.tokenizer": "bytes",
    "training.sequence_length": 32,
    "training.global_batch_size": 8,
    "training.steps": 3,
    "training.log_every_steps": 1,
    "training.eval_every_steps": 3,
    "training.eval_steps": 1,
    "training.sample_prompt": "",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 1,
    "checkpoint.every_steps": 2,
    "logging.tensorboard": False,
}


MESH = {"mesh_data": 2, "mesh_fsdp": 2, "mesh_tensor": 2, "training_microbatch_size": 1}


def make(folder, **more) -> megajax.Run:
    mesh = {name.replace("_", ".", 1): value for name, value in more.items()}
    overrides = TINY | {"run_dir": str(folder / "run"), "data.cache_dir": str(folder)} | mesh
    return megajax.Run(megajax.recipe("gpt_tiny", overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps, with two microbatches, on data 2 x fsdp 2 x tensor 2."""
    run = make(tmp_path_factory.mktemp("library"), **MESH)
    lines = []
    assert run.train(lines.append) == "finished"
    assert lines == run.metrics() and [line["step"] for line in lines] == [1, 2, 3, 3]
    return run


@pytest.fixture(scope="module")
def state(trained):
    return trained.restore()


def test_import_takes_no_time_and_names_what_there_is():
    script = "import sys, megajax; assert 'jax' not in sys.modules; print(*dir(megajax))"
    names = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert set(megajax.__all__) <= set(names)
    with pytest.raises(AttributeError, match="has no attribute 'trainer'; it has .*Run"):
        megajax.trainer  # noqa: B018


def test_recipe_takes_overrides_by_name_and_as_on_the_command_line():
    assert list(megajax.recipes()) == list(configs.recipes())
    by_name = megajax.recipe(
        "gpt_tiny", {"model.num_layers": 2, "data.text": ("a", "b"), "model.attention_sinks": True}
    )
    typed = megajax.recipe("gpt_tiny", ["--model.num_layers=2", "--data.text=a,b", "--model.attention_sinks=true"])
    assert by_name == typed == megajax.override(configs.recipe("gpt_tiny"), by_name_of(by_name))
    with pytest.raises(ValueError, match="did you mean --training.steps"):
        megajax.recipe("gpt_tiny", {"training.num_steps": 3})


def by_name_of(config) -> dict:
    return {
        "model.num_layers": config.model.num_layers,
        "data.text": config.data.text,
        "model.attention_sinks": config.model.attention_sinks,
    }


def test_steps_by_hand_are_those_of_training_whose_program_they_use(trained, compiled):
    state = trained.init()
    losses = []
    for step in range(3):
        state, metrics = trained.step(state, trained.batch(step))
        losses.append(metrics["loss"])
    assert not any("train_step" in name for name in compiled), compiled
    lines = [line for line in trained.metrics() if "loss" in line]
    assert losses == [line["loss"] for line in lines]
    assert metrics["learning_rate"] == lines[-1]["learning_rate"]
    (evaluation,) = [line["eval_loss"] for line in trained.metrics() if "eval_loss" in line]
    assert trained.loss(state, trained.eval_batch()) == pytest.approx(evaluation, rel=1e-6)  # another order of sums


# On top of TINY: the fewest layers that hold one of each kind, and data that need no text.
TINY_RECIPES = {
    "gpt_tiny": {},
    "bert_tiny": {"task.sentences": "none", "model.next_sentence": False, "model.num_layers": 1},
    "mamba2_tiny": {"model.num_layers": 1},
    "hybrid_tiny": {"model.pattern": "M*-", "model.num_layers": 3},
    "delta_net_tiny": {"model.pattern": "G-", "model.num_layers": 2},
    "moe_tiny": {"model.num_layers": 1},
    "t5_tiny": {"model.num_layers": 1, "model.head_dim": 16, "data.tokenizer": "null:400"},
    "vlm_tiny": {
        "model.num_layers": 1,
        "model.vision.num_layers": 1,
        "training.sequence_length": 64,
        "data.tokenizer": "bytes:<image>",
    },
    "mimo_tiny": {
        "model.num_layers": 1,
        "model.vision.num_layers": 1,
        "model.audio.num_layers": 1,
        "training.sequence_length": 64,
        "data.tokenizer": "bytes:<image>,<audio>",
    },
    "retro_tiny": {"model.num_layers": 1, "model.retrieval_layers": (0,), "model.chunk_length": 8},
}


@pytest.fixture(params=TINY_RECIPES)
def tiny_run(request, tmp_path) -> megajax.Run:
    mine = {
        "run_dir": str(tmp_path / request.param),
        "data.cache_dir": str(tmp_path),
        "mesh.data": 1,
        "optimizer.groups": (),
    }
    config = megajax.recipe(request.param, TINY | mine | TINY_RECIPES[request.param])
    return megajax.Run(config, jax.devices()[:1])


def test_every_tiny_recipe_is_in_the_list():
    assert set(TINY_RECIPES) == {name for name in configs.recipes() if name.endswith("_tiny")}


def test_a_step_and_an_evaluation_by_hand_work_with_every_tiny_recipe(tiny_run):
    state, metrics = tiny_run.step(tiny_run.init(), tiny_run.batch())
    assert all(type(value) is float for value in metrics.values()) and metrics["skipped"] == 0
    assert ("expert_load/7" in metrics) == tiny_run.config.run_dir.endswith("moe_tiny")
    assert 0 < tiny_run.loss(state, tiny_run.eval_batch()) < 10


@pytest.mark.slow
def test_every_tiny_recipe_is_trained_restored_planned_and_generates_or_says_why_not(tiny_run, few):
    assert megajax.Run(megajax.override(tiny_run.config, {"mesh.data": 8})).train() == "finished"
    last = [line["loss"] for line in tiny_run.metrics() if "loss" in line][-1]
    state, metrics = tiny_run.step(tiny_run.restore(2), tiny_run.batch(2))
    assert metrics["loss"] == pytest.approx(last, rel=1e-5) and int(state.step) == 3  # sums in another order
    assert tiny_run.plan().fits
    if tiny_run.config.model.kind in ("bert", "t5", "retro"):
        with pytest.raises(ValueError, match=f"model.kind={tiny_run.config.model.kind}"):
            tiny_run.generate("abc", max_tokens=2)
    else:
        texts = [tiny_run.generate("abc", weights, max_tokens=2, temperature=0.0) for weights in (None, state)]
        assert texts[0] == texts[1]


def test_run_is_loaded_restored_and_continued_on_another_mesh(trained):
    again = megajax.load_run(
        trained.config.run_dir, {"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 1, "mesh.context": 2}, jax.devices()[:4]
    )
    state = again.restore(2)
    assert int(state.step) == 2 and again.mesh.shape["context"] == 2
    _, metrics = again.step(state, again.batch(2))
    last = [line["loss"] for line in trained.metrics() if "loss" in line][-1]
    assert metrics["loss"] == pytest.approx(last, rel=1e-5)  # sums of float32 in another order


@pytest.fixture
def few(monkeypatch):
    """An engine that compiles little: the defaults take half a minute."""
    few = ServingConfig(max_rows=2, max_batch_tokens=16, page_size=16, max_length=64)
    monkeypatch.setattr(library, "Engine", functools.partial(library.Engine, serving=few))


def test_generation_uses_the_given_weights_or_the_newest_saved(trained, few):
    mesh = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 2}
    run = megajax.load_run(trained.config.run_dir, mesh, jax.devices()[:2])
    saved = run.generate("abc", max_tokens=4, temperature=0.0)
    assert run.generate(["abc"], run.restore(), max_tokens=4, temperature=0.0) == saved
    with pytest.raises(ValueError, match="max_tokens=0"):
        run.generate("abc", max_tokens=0)


def losses(run: megajax.Run) -> list[float]:
    return [line["loss"] for line in run.metrics() if "loss" in line]


def test_the_batches_of_the_config_given_as_ones_own_are_the_same_training(trained, tmp_path):
    run = make(tmp_path, **MESH)
    assert run.train(batches=(trained.batch(step) for step in itertools.count())) == "finished"
    assert losses(run) == losses(trained)
    with pytest.raises(ValueError, match="the run began with other data, .*data.tokenizer: None -> bytes"):
        make(tmp_path, **MESH, training_steps=4).train()


def test_training_on_rows_of_ones_own_resumes_after_what_was_read(tmp_path):
    def train_on_rows(name: str, **more) -> megajax.Run:
        run = make(tmp_path / name, **MESH, **more)
        texts = [f"{number} is a number" * number for number in range(20)]
        run.train(batches=datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset().repeat(9))
        return run

    wanted = losses(train_on_rows("whole"))
    train_on_rows("stopped", launch_exit_at_step=2)
    assert losses(train_on_rows("stopped")) == wanted and len(set(wanted)) == 3


def cross_entropy(logits_BTV, batch):
    log_probs = jax.nn.log_softmax(logits_BTV[..., : TINY["model.vocab_size"]])
    of_labels = jnp.take_along_axis(log_probs, batch["labels"][..., None], -1)[..., 0]
    return -(of_labels * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def test_a_loss_of_ones_own_has_gradients(trained, state):
    batch = trained.batch(1)
    value, gradients = trained.value_and_grad(cross_entropy, state, batch)
    assert value == pytest.approx(trained.loss(state, batch), rel=1e-5)
    step = 0.1 / sum(float((g**2).sum()) for g in jax.tree.leaves(gradients))
    moved = state._replace(params=jax.tree.map(lambda w, g: w - step * g, state.params, gradients))
    assert trained.loss(moved, batch) == pytest.approx(value - 0.1, abs=0.03)  # to first order


def test_logits_are_those_of_any_part_and_their_loss_is_the_perplexity(trained, state):
    text = "some text of several bytes"
    tokens = [trained.datasets.tokenizer.eod_id, *trained.datasets.tokenizer.encode(text)]
    logits_TV = trained.logits(tokens, state)
    assert (logits_TV.shape, logits_TV.dtype) == ((len(tokens), TINY["model.vocab_size"]), np.float32)
    np.testing.assert_allclose(trained.logits([tokens[:9]] * 3)[2], logits_TV[:9], atol=1e-5)
    log_probs = np.asarray(jax.nn.log_softmax(logits_TV))
    wanted = -log_probs[np.arange(len(tokens) - 1), tokens[1:]].mean()
    for found in (trained.perplexity(text), trained.perplexity([text, text], state)):
        assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["documents"] == 2 and found["bits_per_byte"] == pytest.approx(wanted / np.log(2), rel=1e-5)
    with pytest.raises(ValueError, match="the model reads 1 to"):
        trained.logits([])


def test_an_evaluation_is_that_of_training(trained, state):
    (wanted,) = [line for line in trained.metrics() if "eval_loss" in line]
    assert trained.evaluate(state)["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)


def test_a_run_takes_the_name_of_a_recipe():
    with pytest.raises(ValueError, match="did you mean gpt_tiny"):
        megajax.Run("gpt_tny")


def test_a_batch_that_the_step_cannot_take_is_refused(trained):
    state = trained.restore()
    batch = trained.batch()
    with pytest.raises(ValueError, match="a batch of 6 is not divisible by 4 = 4 .*use 8 sequences"):
        trained.step(state, {name: array[:6] for name, array in batch.items()})
    with pytest.raises(ValueError, match="the batch has no labels, positions; batch"):
        trained.loss(state, {name: batch[name] for name in batch.keys() - {"labels", "positions"}})
    with pytest.raises(ValueError, match="differ in their first dim"):
        trained.loss(state, batch | {"labels": batch["labels"][:4]})


def test_what_does_not_fit_the_devices_or_the_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mesh: data.3. does not match the number of devices, 8; .*cpu_devices=3"):
        make(tmp_path, mesh_data=3)
    with pytest.raises(ValueError, match="run=.* does not exist"):
        megajax.load_run(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=f'a Hugging Face folder, not a run; .*"hugging_face:{tmp_path}"'):
        megajax.load_run(tmp_path)
    megajax.use_cpu_devices(8)  # there are eight
    with pytest.raises(ValueError, match="JAX has started on 8 x cpu already"):
        megajax.use_cpu_devices(4)


def test_plan_prints_and_says_whether_it_fits():
    small = megajax.plan(megajax.recipe("gpt_tiny"), "a100")
    large = megajax.plan(megajax.recipe("gpt_1p3b", {"training.global_batch_size": 512}))
    assert small.fits and not large.fits
    assert str(small).startswith("plan of gpt_tiny\n") and "1 x A100" in str(small)
    assert "<td>" in small._repr_html_() and set(small.memory_bytes) >= {"weights", "optimizer"}
    figure = megajax.figures.memory(small, large)
    assert len(figure.axes[0].patches) == 2 * len(small.memory_bytes)


def test_a_search_gives_configurations_the_fastest_first():
    found = megajax.search(megajax.recipe("gpt2_124m"), 8)
    assert all(config.mesh.num_devices == 8 for config in found)
    speeds = [
        float(dict(megajax.plan(config).rows)["step time, estimate"].split()[0]) for config in found[:1] + found[-1:]
    ]
    assert len(found) > 5 and speeds[0] < speeds[1]


def test_figures_show_the_losses_the_mask_and_the_parts_on_each_device(trained):
    lines = megajax.figures.loss(trained.metrics()).axes[0].lines
    batches, means, evaluations = lines
    assert [len(line.get_xdata()) for line in lines] == [3, 3, 1] and batches.get_alpha() < 0.5
    assert means.get_ydata().tolist() == [line["mean_loss"] for line in trained.metrics() if "loss" in line]
    segments = [[1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 2, 2], [1, 1, 1, 2, 2, 2]]
    batch = {"tokens": np.zeros((3, 6)), "segment_ids": np.array(segments)}
    (axes,) = megajax.figures.attention_mask(batch, window=2).axes  # the sequence that shows something
    shown = axes.images[0].get_array()
    assert axes.get_title() == "sequence 2, 2 documents"
    assert shown.sum(1).tolist() == [1, 2, 2, 1, 2, 2] and not shown[3, 2]
    plain = megajax.figures.attention_mask({"tokens": batch["tokens"]}).axes[0]
    assert plain.images[0].get_array().sum() == 21 and plain.get_title() == "sequence 0, 1 document"
    (axes,) = megajax.figures.sharding(trained, "layers.dense.mlp.up").axes
    # fsdp splits the rows, tensor the columns; data holds copies: devices 0 and 4.
    assert [text.get_text() for text in axes.texts] == ["0,4", "1,5", "2,6", "3,7"]
    assert megajax.figures.mesh(trained).axes[0].images[0].get_array().shape == (3, 8)
    with pytest.raises(ValueError, match="parameter=mlp is unknown; use one of embedding"):
        megajax.figures.sharding(trained, "mlp")


def test_sharding_over_a_pipeline_has_one_panel_per_stage(tmp_path):
    run = make(tmp_path, mesh_data=4, mesh_pipeline=2, training_microbatch_size=1)
    panels = megajax.figures.sharding(run, "layers.dense.mlp.up").axes
    assert [axes.texts[0].get_text() for axes in panels] == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ValueError, match="mesh.pipeline=2: only training supports pipelines"):
        run.generate("abc")
