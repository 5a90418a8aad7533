"""The length of a run in epochs: its steps, warm-up and evaluations, and how often data is read."""

import dataclasses
import json
from collections import Counter

import pytest

import configs
from megajax import run
from megajax.config import Config
from megajax.overrides import override
from megajax.training.config import TrainingConfig

NUM_CONVERSATIONS = 100


@pytest.fixture
def fields(tmp_path) -> dict:
    lines = [json.dumps({"prompt": "Q" * (i % 40), "response": "A"}) for i in range(NUM_CONVERSATIONS)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    return {
        "data.paths": tmp_path / "chat.jsonl", "data.tokenizer": "bytes", "data.cache_dir": tmp_path / "cache",
        "training.global_batch_size": 4, "training.sequence_length": 128, "optimizer.warmup_steps": 50,
        "run_dir": tmp_path / "run",
    }  # fmt: skip


def recipe(fields, **changes) -> Config:
    return override(configs.recipe("gpt_tiny"), fields | {name.replace("__", "."): v for name, v in changes.items()})


def read(config: Config) -> list[int]:
    """The conversations that a run trains on."""
    train = run.load_data(config).train
    return train.document_index[
        : train.sample_index[config.training.steps * config.training.global_batch_size]
    ].tolist()


def test_conversations_are_read_three_times_and_evaluated_ten_times(fields):
    config = recipe(fields, training__eval_every_steps=None)
    assert config.training.epochs == 3
    config = config.check_on(1)
    training = config.training
    assert training.epochs is None and training.eval_every_steps == training.steps // 10
    assert config.optimizer.warmup_steps == training.steps // 10 > 0
    counts = Counter(read(config))
    assert len(counts) == 97  # of the rest, by data.split, evaluations are made
    assert min(counts.values()) == 3 and sum(counts.values()) < 3.2 * 97
    assert recipe(fields, training__epochs=6).check_on(1).training.steps == pytest.approx(2 * training.steps, abs=1)


def test_steps_that_are_given_stay_and_the_warm_up_is_a_tenth(fields):
    config = recipe(fields, training__steps=90, training__eval_every_steps=None)
    assert config.check_on(1).training == dataclasses.replace(config.training, eval_every_steps=9)
    assert (config.training.steps, config.training.epochs, config.optimizer.warmup_steps) == (90, None, 50)
    del fields["optimizer.warmup_steps"]
    assert recipe(fields, training__steps=90).optimizer.warmup_steps == 9
    resumed = override(recipe(fields), {"training.steps": 7})
    assert (resumed.training.steps, resumed.training.epochs) == (7, None)


def test_data_that_is_read_more_than_four_times_is_named(fields, caplog):
    """Samples that are not full do not count as several epochs."""
    fields["training.sequence_length"] = 4096
    for epochs, is_warned in ((4, False), (5, True)):
        caplog.clear()
        run.load_data(recipe(fields, training__epochs=epochs, training__global_batch_size=1).check_on(1))
        assert ("times: beyond 4 epochs" in caplog.text) == is_warned


def test_epochs_of_text(fields, tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name * 800)
    del fields["data.paths"]
    config = recipe(fields, data__text=tmp_path / "*.txt", training__epochs=2.5)
    train = run.load_data(config.check_on(1)).train
    assert config.check_on(1).training.steps == -(-2.5 * train.tokens_per_epoch // (128 * 4))
    assert config.check_on(1).training.eval_every_steps == configs.recipe("gpt_tiny").training.eval_every_steps


def test_steps_of_a_batch_that_grows():
    training = TrainingConfig(global_batch_size=8, batch_size_rampup=(2, 2, 24))
    schedule = training.schedule(Config().mesh)
    for num_samples in (1, 24, 25, 400):
        steps = training.steps_of(num_samples)
        assert schedule.num_samples(steps - 1) < num_samples <= schedule.num_samples(steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training.epochs": 2, "training.steps": 5}, "both say how long the run is"),
        ({"training.epochs": 2, "data.source": "mock", "data.paths": ""}, "mock documents have no end; use --training"),
        ({"training.epochs": 0}, "training.epochs=0.0 must be"),
    ],
)
def test_what_has_no_number_of_epochs_is_refused(fields, changes, message):
    with pytest.raises(ValueError, match=message):
        override(configs.recipe("gpt_tiny"), fields | changes).check_on(1)
