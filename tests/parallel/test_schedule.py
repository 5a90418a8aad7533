"""Tables of schedules: every pass once, in order, and every message used one tick after it was sent."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.mesh.config import MeshConfig
from megajax.parallel.schedule import bubble, make_stages, make_table, parse_layout

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "numbers.npz")
SIZES = dict(num_ranks=st.integers(1, 6), num_microbatches=st.integers(1, 13))
CASES = st.fixed_dictionaries(SIZES | dict(num_chunks=st.integers(1, 4)))


def ticks(table, name: str, num_ranks: int) -> dict:
    """{(stage, microbatch): tick}."""
    found = {}
    microbatch, chunk = getattr(table, name), getattr(table, f"{name}_chunk")
    for tick, rank in zip(*np.nonzero(microbatch >= 0), strict=True):
        key = int(chunk[tick, rank]) * num_ranks + int(rank), int(microbatch[tick, rank])
        assert key not in found, "a pass that happens twice"
        found[key] = int(tick)
    return found


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_every_pass_happens_once_and_messages_are_used_one_tick_later(case):
    table, P, M = make_table(**case), case["num_ranks"], case["num_microbatches"]
    num_stages = P * case["num_chunks"]
    forward, backward = ticks(table, "forward", P), ticks(table, "backward", P)
    everything = {(stage, i) for stage in range(num_stages) for i in range(M)}
    assert set(forward) == set(backward) == everything
    for stage, i in everything:
        if stage > 0:
            assert forward[stage, i] == forward[stage - 1, i] + 1
            assert backward[stage - 1, i] == backward[stage, i] + 1
    for i in range(M):
        assert forward[num_stages - 1, i] <= backward[num_stages - 1, i]
        assert table.embed[forward[0, i]] == table.loss[forward[num_stages - 1, i]] == i
        assert table.embed_backward[backward[0, i]] == i
    for column in (table.embed, table.loss, table.embed_backward):
        assert sorted(column[column >= 0]) == list(range(M))


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_a_slot_holds_one_microbatch_until_its_backward_pass(case):
    table, P, M, V = make_table(**case), *(case[n] for n in ("num_ranks", "num_microbatches", "num_chunks"))
    assert table.num_slots <= min(M * V, V * P + P - 1)
    for rank in range(P):
        held = {}
        for tick in range(len(table.embed)):
            row = lambda name, tick=tick, rank=rank: int(getattr(table, name)[tick, rank])
            if row("forward") >= 0:
                assert 0 <= row("forward_slot") < table.num_slots and row("forward_slot") not in held
                held[row("forward_slot")] = row("forward"), row("forward_chunk")
            if row("backward") >= 0:
                assert held.pop(row("backward_slot")) == (row("backward"), row("backward_chunk"))
        assert not held
    held = {}
    for tick in range(len(table.embed)):
        if table.loss[tick] >= 0:
            assert 0 <= table.loss_slot[tick] < table.num_loss_slots and table.loss_slot[tick] not in held
            held[table.loss_slot[tick]] = table.loss[tick]
        if table.loss_slot_read[tick] >= 0:
            assert held.pop(table.loss_slot_read[tick]) == table.backward[tick, -1]
    assert not held


@pytest.mark.parametrize(("microbatches", "chunks", "group"), [(4, 2, 2), (8, 4, 4), (6, 3, 2)])
def test_order_on_each_rank_is_megatrons(microbatches, chunks, group):
    wanted = ORACLE[f"schedule_table/m{microbatches}_v{chunks}_g{group}"]
    table = make_table(group, microbatches, chunks)
    for rank in range(group):
        for name, chunk_of in (("forward", lambda c: c), ("backward", lambda c: chunks - 1 - c)):
            microbatch, chunk = getattr(table, name)[:, rank], getattr(table, f"{name}_chunk")[:, rank]
            busy = microbatch >= 0
            np.testing.assert_array_equal(np.stack([microbatch[busy], chunk_of(chunk[busy])], 1), wanted)


def test_no_more_is_held_with_more_microbatches():
    assert make_table(4, 8).num_slots == make_table(4, 64).num_slots == 7
    assert make_table(4, 64, 2).num_slots == 11
    assert make_table(4, 64).num_loss_slots == 1


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(4, 8, 1), (4, 8, 2), (2, 6, 3), (1, 5, 1)])
def test_bubble_is_the_time_in_which_a_rank_waits(ranks, microbatches, chunks):
    """A tick lasts as long as its longest rank, a backward pass twice a forward pass."""
    table = make_table(ranks, microbatches, chunks)
    forward, backward = table.forward >= 0, table.backward >= 0
    total = (forward.any(1) + 2 * backward.any(1)).sum()
    assert 1 - 3 * microbatches * chunks / total == pytest.approx(bubble(ranks, microbatches, chunks))


def test_forward_only_is_as_long_as_the_forward_passes():
    table = make_table(4, 6, 2, backward=False)
    assert not (table.backward >= 0).any() and len(table.embed) == max(ticks(table, "forward", 4).values()) + 1


def test_layout_reads_megatrons_letters():
    assert parse_layout("Ett|ttt|t*4|tL") == [2, 3, 4, 1]
    assert parse_layout("Et*3|(tt|)*3L") == [3, 2, 2, 2, 0]
    with pytest.raises(ValueError, match=r"mesh.pipeline_layout=tx\|t: 'x' is unknown"):
        parse_layout("tx|t")


def test_layers_are_spread_evenly_with_the_smaller_stages_first():
    stages = make_stages(MeshConfig(pipeline=4, virtual_stages=2), 11)
    assert [len(stage) for chunk in stages.layers for stage in chunk] == [1, 1, 1, 1, 1, 2, 2, 2]
    assert [number for chunk in stages.layers for stage in chunk for number in stage] == list(range(11))
    assert make_stages(MeshConfig(), 11) is None


def test_rows_of_a_kind_are_padded_to_the_fullest_stage():
    stages = make_stages(MeshConfig(pipeline=2, pipeline_layout="tt|ttt"), 5)
    np.testing.assert_array_equal(stages.rows(set(range(5))), [[0, 1, -1, 2, 3, 4]])
    np.testing.assert_array_equal(stages.rows({1, 4}), [[1, 4]])
