"""The batch of a step is a pure function, continuous in samples, and ramps up as Megatron-LM's does."""

import types
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.config import TrainingConfig
from megajax.training.loop import Trainer


def megatron_batch_size(consumed: int, start: int, increment: int, samples: int, final: int) -> int:
    """core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator.update, in exact arithmetic."""
    if consumed > samples or start == final or samples == 0:
        return final
    samples_per_increment = Fraction(samples, (final - start) // increment)
    return min(start + int(consumed / samples_per_increment) * increment, final)


rampups = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 30), st.integers(0, 5000)).map(
    lambda t: ((t[0], t[1], t[3]), t[0] + t[1] * t[2])
)


@given(rampups, st.integers(1, 400))
def test_rampup_is_megatrons_and_samples_are_continuous(rampup_and_final, num_steps):
    rampup, final = rampup_and_final
    schedule = BatchSchedule(final, None, rampup)
    consumed = 0
    for step in range(num_steps):
        batch = schedule(step)
        assert batch.first_sample == consumed == schedule.num_samples(step)
        assert batch.size == megatron_batch_size(consumed, *rampup, final)
        consumed += batch.size
    assert schedule.num_samples(num_steps) == consumed


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 5), st.integers(0, 1000), st.integers(0, 100))
def test_rampup_keeps_the_microbatch_and_changes_their_number(microbatch, start, increments, samples, step):
    final = microbatch * (start + increments)
    schedule = BatchSchedule(final, microbatch, (microbatch * start, microbatch, samples))
    batch = schedule(step)
    assert batch.microbatch == microbatch
    assert batch.size == batch.num_microbatches * microbatch == schedule.num_samples(step + 1) - batch.first_sample


@given(st.integers(1, 100), st.integers(0, 10**9))
def test_without_rampup_every_batch_has_the_global_size(size, step):
    batch = BatchSchedule(size, None, None)(step)
    assert (batch.first_sample, batch.num_microbatches, batch.microbatch) == (step * size, 1, size)


def test_small_rampup_by_hand():
    schedule = BatchSchedule(8, 2, (2, 2, 12))  # sizes 2, 4, 6 for 4 samples each, or the step that crosses it
    assert [schedule(step).size for step in range(6)] == [2, 2, 4, 6, 8, 8]
    assert schedule.sizes == [2, 4, 6, 8]
    assert [schedule(step).num_microbatches for step in range(6)] == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("rampup", [(3, 2, 10), (16, 2, 10)])
def test_rampup_that_does_not_reach_the_batch_is_refused(rampup):
    with pytest.raises(ValueError, match="training.batch_size_rampup"):
        BatchSchedule(8, None, rampup)


def test_a_rampup_over_very_many_samples_costs_no_time_and_one_of_very_many_sizes_is_refused():
    schedule = BatchSchedule(4, None, (2, 1, 10**18))
    assert schedule(10**17).size == 2 and schedule(10**18).size == 4
    with pytest.raises(ValueError, match="has 2147483647 batch sizes.* use an increment of at least 2149634"):
        BatchSchedule(2**31 - 1, None, (1, 1, 10))
    assert len(BatchSchedule(2**31 - 1, None, (2**31 - 1 - 2149634 * 998, 2149634, 10)).sizes) == 999


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([None, 1, 2, 3]), st.integers(1, 64))
def test_config_that_passes_the_check_loses_no_sample(data, fsdp, microbatch_size, size):
    mesh = MeshConfig(data=data, fsdp=fsdp)
    config = TrainingConfig(global_batch_size=size, microbatch_size=microbatch_size, sequence_length=8)
    if size % (data * fsdp * (microbatch_size or 1)):
        with pytest.raises(ValueError, match=f"training.global_batch_size={size} is not divisible"):
            config.check_on(mesh)
    else:
        config.check_on(mesh)
        assert config.schedule(mesh)(0).size == size
        assert config.schedule(mesh)(0).microbatch % mesh.batch_shards == 0


def test_a_resume_with_another_batch_size_is_refused_unless_it_is_allowed():
    """It would skip samples, or read them twice."""
    trainer = types.SimpleNamespace(
        config=TrainingConfig(global_batch_size=16),
        program=types.SimpleNamespace(mesh_config=MeshConfig()),
        data_config=DataConfig(),
    )
    Trainer.check_samples(trainer, 100, {"consumed_samples": 1600})
    with pytest.raises(ValueError, match="has read 800 samples, and would resume at sample 1600.*data.allow_change"):
        Trainer.check_samples(trainer, 100, {"consumed_samples": 800})
    trainer.data_config = DataConfig(allow_change=True)
    Trainer.check_samples(trainer, 100, {"consumed_samples": 800})
