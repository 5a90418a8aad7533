"""A task, a source of batches and a stack before the body: each arrives in a file of its own. Toys of them train, plan,
resume and evaluate on every mesh.

The task has an array, a loss and metrics of its own: a policy gradient. One variant computes its samples from indices,
the other makes them from the weights of the moment, as rollouts do. The model adds to the embeddings of the tokens what
a tower with a width of its own makes of patches.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import run
from megajax.config import Config
from megajax.data.datasets import Datasets, Source
from megajax.data.tokenizers.load import load_tokenizer
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.linear import Linear
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import constrain
from megajax.models.decoder import Decoder, DecoderConfig
from megajax.models.interface import BatchArray, LossTerms
from megajax.ops.attention_mask import FULL
from megajax.overrides import override
from megajax.planning.plan import plan_device, plan_rows
from megajax.tasks.interface import TASKS, Task, rate
from megajax.training.batches import BatchPlacer, device_batches
from megajax.training.config import LaunchConfig
from runs import run_of, toy_config

T, STEPS, VOCAB = 16, 4, 64

# ----------------------------------------------------------------------------- a task


@dataclasses.dataclass(frozen=True)
class ToyPolicy(Task):
    kind: Literal["toy_policy"] = "toy_policy"
    entropy_bonus: float = 0.01

    @property
    def heads(self):
        return ("next_token",)

    def arrays(self, model, sequence_length):
        inputs = model.inputs(sequence_length, packed=False)
        labels = inputs["tokens"]
        mask = labels._replace(dtype=jnp.float32)
        return inputs | {"labels": labels, "loss_mask": mask, "advantages": BatchArray((), (), jnp.float32)}

    def datasets(self, data, model, amounts):
        build = functools.partial(Samples, self.arrays(model, amounts.sequence_length))
        train = build(amounts.seed, amounts.num_train_samples)
        return Datasets(
            train=train,
            eval=build(amounts.seed + 1, amounts.num_eval_samples) if amounts.num_eval_samples else None,
            tokenizer=load_tokenizer(data.tokenizer),
            train_tokens_per_epoch=1,
            eval_bytes_per_token=None,
            sources=(Source("toy", 1, len(train), len(train)),),
            record={"seed": amounts.seed},
            is_mock=True,
            num_token_ids=VOCAB,
        )

    def loss(self, module, h, batch, options):
        weights = batch["loss_weights"]
        scores = module.log_probs(h, batch["labels"], entropy=True)
        gain = batch["advantages"][:, None] * scores.log_probs + self.entropy_bonus * scores.entropy
        rates = {"right": rate(scores.top == batch["labels"], weights > 0)} if options.evaluates else {}
        return LossTerms(-jnp.sum(weights * gain), metrics={"entropy": jnp.mean(scores.entropy)}, rates=rates)


@dataclasses.dataclass(frozen=True)
class Samples:
    """Sample i: random numbers in the shapes and dtypes of the arrays of the task."""

    arrays: dict
    seed: int
    count: int

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng((self.seed, i))

        def draw(spec):
            is_whole = np.issubdtype(spec.dtype, np.integer)
            drawn = rng.integers(0, VOCAB, spec.shape) if is_whole else rng.standard_normal(spec.shape)
            return drawn.astype(spec.dtype)

        sample = {name: draw(spec) for name, spec in sorted(self.arrays.items())}
        sample |= {"loss_mask": (sample["loss_mask"] < 1).astype(np.float32), "positions": np.arange(T, dtype=np.int32)}
        return sample


# ----------------------------------------------------------------------------- batches made from the weights


@dataclasses.dataclass(frozen=True)
class ToyRollouts(ToyPolicy):
    kind: Literal["toy_rollouts"] = "toy_rollouts"

    def source(self, datasets, schedule, data, model, mesh):
        return Rollouts(datasets.train, schedule)


class Rollouts:
    """Replaces the advantages by numbers that depend on the weights and on how often it has been asked in all."""

    reads_weights = True

    def __init__(self, samples, schedule):
        self.samples = samples
        self.schedule = schedule
        self.num_made = 0

    def batches(self, start, stop, rows_of, weights):
        for step in range(start, stop):
            first, num_microbatches, size = self.schedule(step)
            shape = (num_microbatches, size)
            rows = first + np.arange(num_microbatches * size).reshape(shape)[:, rows_of(size)]
            samples = [self.samples[i] for i in rows.reshape(-1)]
            batch = {name: np.stack([s[name] for s in samples]).reshape(*rows.shape, *a.shape)
                     for name, a in samples[0].items()}  # fmt: skip
            self.num_made += 1
            total = float(jnp.sum(jnp.abs(weights()["embedding"])))
            yield batch | {"advantages": batch["advantages"] * np.float32(total / 100 + self.num_made)}

    def saved(self, step):
        return {"num_made": self.num_made}

    def restore(self, saved):
        self.num_made = saved["num_made"]


# ----------------------------------------------------------------------------- a stack before the body


@dataclasses.dataclass(frozen=True)
class SeeingConfig(DecoderConfig):
    """Patches float32 [8, 4] beside the tokens."""

    kind: Literal["toy_seeing"] = "toy_seeing"

    def build(self, rngs, dtype, execution, stages):
        return Seeing(self, dtype, execution, stages, rngs=rngs)

    @property
    def tower(self):
        return DecoderConfig(
            num_layers=1, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=VOCAB, position="none", init_std=0.2
        )

    def make_stacks(self, execution):
        ((layer,),) = self.tower.stacks(execution).values()
        layer = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, mask=FULL))
        return {"tower": (layer,)} | super().make_stacks(execution)

    @property
    def stack_roles(self):
        return super().stack_roles | {"tower": "embed"}

    def inputs(self, sequence_length, *, packed):
        patches = BatchArray((None, None), (8, 4), jnp.float32)
        return super().inputs(sequence_length, packed=packed) | {"patches": patches}


class Seeing(Decoder):
    def __init__(self, config, dtype, execution, stages, *, rngs):
        super().__init__(config, dtype, execution, stages, rngs=rngs)
        self.patch_in = Linear((4,), (8,), ("head_dim", "head_dim"), 0.2, rngs=rngs)
        self.patch_out = Linear((8,), (config.embed_dim,), ("head_dim", "embed"), 0.2, rngs=rngs)

    def embed(self, batch, key):
        x_BTD = super().embed(batch, key)
        x_BPW = constrain(self.patch_in(batch["patches"].astype(self.dtype)), "batch", "sequence", None)
        x_BPW, _, _ = self.tower(x_BPW, {})
        seen_BD = self.patch_out(jnp.mean(x_BPW, axis=1))
        return constrain(x_BTD + seen_BD[:, None], "batch", "sequence", None)


# ----------------------------------------------------------------------------- what all must do

MODEL = dict(
    num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=VOCAB, position="rope", norm="rmsnorm", biases=(),
    activation="swiglu", init_std=0.2,
)  # fmt: skip
CASES = {
    "policy": (DecoderConfig(**MODEL), ToyPolicy()),
    "rollouts": (DecoderConfig(**MODEL), ToyRollouts()),
    "seeing": (SeeingConfig(**MODEL), ToyPolicy()),
}
MESHES = [dict(tensor=2), dict(fsdp=2), dict(pipeline=2), dict(context=2)]


def config_of(case, run_dir, mesh=MeshConfig(), **training):
    model, task = CASES[case]
    training = dict(steps=STEPS, sequence_length=T) | training
    return toy_config(run_dir, mesh, training, model=model, task=task)


def numbers(lines):
    names = ("loss", "entropy", "eval_loss", "eval_right")
    return [[line[name] for name in names if name in line] for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{case: lines of metrics} of a run on one device."""
    found = {}

    def of(case):
        if case not in found:
            with pytest.MonkeyPatch.context() as monkeypatch:
                found[case] = run_of(config_of(case, tmp_path_factory.mktemp("runs") / "run"), monkeypatch)
        return found[case]

    return of


DEFAULT = {
    ("policy", "tensor"), ("policy", "context"), ("rollouts", "pipeline"), ("seeing", "pipeline"), ("seeing", "fsdp"),
}  # fmt: skip


@pytest.mark.parametrize("case, mesh", [
    pytest.param(case, mesh, marks=[] if (case, *mesh) in DEFAULT else pytest.mark.slow)
    for case in CASES for mesh in MESHES
], ids=str)  # fmt: skip
def test_it_trains_resumes_and_evaluates_the_same_on_every_mesh(case, mesh, trained, tmp_path, monkeypatch):
    mesh = MeshConfig(**mesh)
    microbatches = dict(microbatch_size=4) if mesh.pipeline > 1 else {}
    config = config_of(case, tmp_path / "run", mesh, **microbatches)
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    lines = run_of(config, monkeypatch)
    expected = numbers(trained(case))
    assert [len(line) for line in expected] == [2, 2, 2, 2, 2, 2]  # training lines, and two evaluations
    np.testing.assert_allclose(numbers(lines), expected, rtol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_it_resumes_bit_for_bit(case, trained, tmp_path, monkeypatch):
    """Rollouts that did not save how many they have made would begin again."""
    config = config_of(case, tmp_path / "run")
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert numbers(run_of(config, monkeypatch)) == numbers(trained(case))


def test_batches_made_from_the_weights_are_not_made_ahead(tmp_path):
    asked = []

    def weights():
        asked.append(len(asked))
        return {"embedding": jnp.ones(3)}

    config = config_of("rollouts", tmp_path / "run")
    schedule = config.training.schedule(config.mesh)
    source = Rollouts(run.load_data(config).train, schedule)
    placer = BatchPlacer(config.make_program(make_mesh(config.mesh, jax.devices()[:1])), config.training)
    batches = device_batches(source, schedule, placer, start=0, stop=STEPS, weights=weights)
    for step in range(STEPS):
        next(batches)
        assert len(asked) == step + 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_planned_and_all_ranks_hold_a_stack_before_the_body(case, mesh, tmp_path):
    mesh = MeshConfig(**mesh)
    config = config_of(case, tmp_path / "run", mesh, **(dict(microbatch_size=4) if mesh.pipeline > 1 else {}))
    config.check()
    model = config.make_model()
    rows = dict(plan_rows(config.make_program(), config.training, plan_device("h100"), compiles=False))
    assert f"({model.num_parameters():,})" in rows["parameters"] and rows["verdict"].startswith("fits")
    of_tower = 1 if case == "seeing" else 0
    assert len(model.layers_run) == 2 + of_tower
    without = config_of("policy", tmp_path / "run").make_model().training_flops(T).matmuls
    assert (model.training_flops(T).matmuls > without) == (case == "seeing")


def test_an_engine_gives_no_pages_to_a_stack_before_the_body(tmp_path):
    model = config_of("seeing", tmp_path / "run").make_model()
    sizes = PoolSizes(num_pages=1, page_size=8, num_rows=1, dtype=jnp.float32)
    assert set(model.config.new_pages(sizes, model.execution)) == {"layers"}


def test_a_task_is_chosen_on_the_command_line(tmp_path):
    config = override(config_of("policy", tmp_path / "run"), ["--task.kind=toy_rollouts", "--task.entropy_bonus=0.5"])
    assert config.task == ToyRollouts(entropy_bonus=0.5) and TASKS.of("toy_policy") is ToyPolicy
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="--task.entropy_bonus is a field of task.kind=toy_policy and toy_rollouts"):
        override(config, ["--task.kind=language", "--task.entropy_bonus=0.5"])
