"""The text of a compiled program, read."""

import pytest

from benchmarks.compiled import differences, measure
from benchmarks.hlo import Program, shape_bytes

TEXT = """\
HloModule jit_train_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%gemm_computation (parameter_0: bf16[8,4], parameter_1: bf16[4,4]) -> bf16[8,4] {
  %parameter_0 = bf16[8,4]{1,0} parameter(0)
  %parameter_1 = bf16[4,4]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %state = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %attention = (s32[], bf16[8,4]{1,0}) custom-call(%state), custom_call_target="__cudnn$fmhaSoftmax"
}

%scattered (operand: bf16[8,4]) -> bf16[1,4] {
  %operand = bf16[8,4]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = bf16[1,4]{1,0} reduce-scatter(%operand), dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[8,4], weight: bf16[1,4]) -> bf16[1,4] {
  %x = bf16[8,4]{1,0} parameter(0), metadata={op_name="batch[\\'x\\']"}
  %weight = bf16[1,4]{1,0} parameter(1)
  %all-gather-start = (bf16[1,4]{1,0}, bf16[4,4]{1,0}) all-gather-start(%weight), dimensions={0}
  %tuple = (s32[], bf16[8,4]{1,0}, /*index=2*/f32[2]{0}) tuple(%x)
  %while.1 = (s32[], bf16[8,4]{1,0}) while(%tuple), condition=%condition, body=%body
  %all-gather-done = bf16[4,4]{1,0} all-gather-done(%all-gather-start)
  %gemm_fusion_dot.1 = bf16[8,4]{1,0} fusion(%x, %all-gather-done), kind=kCustom, calls=%gemm_computation
  %async-start = ((bf16[8,4]{1,0}), bf16[1,4]{1,0}, s32[]) async-start(%gemm_fusion_dot.1), calls=%scattered
  %transpose.7 = bf16[1024,1024]{0,1} transpose(%x), dimensions={1,0}
  %wrapped_copy.2 = f32[512,1024]{1,0} fusion(%x), kind=kLoop, calls=%gemm_none
  %copy.3 = f32[8]{0} copy(%x)
  ROOT %async-done = bf16[1,4]{1,0} async-done(%async-start), calls=%scattered
}

%condition (state: (s32[], bf16[8,4])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

%gemm_none (x: bf16[8,4]) -> f32[512,1024] {
  ROOT %x.1 = f32[512,1024]{1,0} parameter(0)
}
"""


@pytest.fixture
def program() -> Program:
    return Program(TEXT)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[8,128]{1,0}", 2048),
        ("(bf16[2]{0}, (s32[], f8e4m3fn[3]{0}), pred[5])", 4 + 4 + 3 + 5),
        ("s4[6]", 3),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert shape_bytes(shape) == size


def test_collectives_are_found_with_both_ends_and_the_larger_side(program):
    assert program.scheduled
    gather, scatter = program.collectives(program.entry)
    names = [line.name for line in program.computations[program.entry]]
    assert (gather.kind, gather.bytes) == ("all-gather", 4 * 4 * 2)
    assert (names[gather.start], names[gather.end]) == ("all-gather-start", "all-gather-done")
    assert (scatter.kind, scatter.bytes) == ("reduce-scatter", 8 * 4 * 2)
    assert (names[scatter.start], names[scatter.end]) == ("async-start", "async-done")


def test_attention_in_a_loop_counts_as_work_and_a_copy_does_not(program):
    gather, scatter = program.collectives(program.entry)
    assert [line.name for line in program.matmuls_under(program.entry, gather)] == ["while.1"]
    assert program.matmuls_under(program.entry, scatter) == []


def test_what_is_measured(program):
    assert measure(program) == {
        "all-gather.bytes": 32,
        "all-gather.exposed": 0,
        "all-gather.number": 1,
        "copies.bytes": 2 * 2**20,
        "copies.number": 1,
        "kernels.number": 3,
        "reduce-scatter.bytes": 64,
        "reduce-scatter.exposed": 1,
        "reduce-scatter.number": 1,
        "transposes.bytes": 2 * 2**20,
        "transposes.number": 1,
    }


def test_bytes_may_move_two_percent_and_counts_only_down():
    recorded = {"memory.peak.bytes": 1000, "copies.number": 5, "kernels.number": 7}
    assert differences({"memory.peak.bytes": 1020, "copies.number": 0, "kernels.number": 7}, recorded) == []
    left = differences({"memory.peak.bytes": 970, "copies.number": 6, "all-to-all.number": 1}, recorded)
    assert left == [
        "all-to-all.number: 1, recorded 0",
        "copies.number: 6, recorded 5 (+20.0%)",
        "memory.peak.bytes: 970, recorded 1,000 (-3.0%)",
    ]
