"""What a replay says of a step: whether it is what it was, and where it went non-finite."""

import math
import re

import pytest

from megajax.training.faults.nonfinite import Found, Loop, Origin
from megajax.training.replay import describe, describe_gradients, recorded_metrics, verdict

NAN = math.nan


@pytest.mark.parametrize(
    "now, then, same, changed, want",
    [
        ((2.5, 1.5), (2.5, 1.5), True, [], "reproduced: both runs and metrics.jsonl are bitwise identical"),
        ((2.5, NAN), (2.5, None), True, [], "reproduced: both runs"),
        ((2.5, 1.5), (2.5, None), True, [], "not reproduced: .* 2.5, not finite; probably a transient hardware fault"),
        ((NAN, NAN), (2.5, 1.5), True, [], "not reproduced: .* probably a transient hardware fault"),
        ((2.5, 1.5), (2.5, 1.5000001), True, [], "not reproduced"),
        ((2.5, 1.5), (2.5, 1.5000001), True, ["mesh.fsdp: 1 -> 2"], "reproduced except for rounding: .*mesh.fsdp: 1"),
        ((2.5, NAN), (2.5, 1.5), True, ["mesh.fsdp: 1 -> 2"], "not reproduced: .*fault or a change: mesh.fsdp"),
        ((2.5, 1.5), (2.5, 1.5), False, [], "the two runs differ: this device or program is not deterministic"),
        ((2.5, 1.5), None, True, [], "both runs are bitwise identical; metrics.jsonl has no line for this step"),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_two_runs_and_the_record(now, then, same, changed, want):
    names = ("loss", "grad_norm")
    recorded = None if then is None else dict(zip(names, then, strict=True))
    got = verdict(dict(zip(names, now, strict=True)), same, recorded, changed)
    assert re.match(want, got), got


def origin(primitive, name_stack, loops=(), places=("megajax/ops/matmul.py:40 matmul",)):
    output, wide = Found("bfloat16", (8, 4), 1, 2, 3e38), Found("bfloat16", (8, 2), 0, 0, 2e38)
    return Origin(primitive, places, name_stack, loops, output, (wide,))


def test_an_origin_is_described_by_pass_layer_microbatch_location_and_counts():
    microbatch, layers = Loop("megajax/training/step.py:90 train_step", 1, 4), "megajax/layers/stack.py:80 _scan"
    found = origin("dot_general", "jvp()", (microbatch, Loop(layers, 3, 12)))
    _, first, place, inputs, _ = describe([found], 12, ok=False)
    assert first == ("  1. dot_general, forward pass, microbatch 1, layer 3: bfloat16[8,4], 1 NaN and 2 infinite of 32")
    assert place == "     at megajax/ops/matmul.py:40 matmul" and inputs == "     of bfloat16[8,2] up to 2e+38"
    # Two layers per iteration, as in a model whose layers alternate.
    lines = describe([origin("mul", "transpose(jvp())", (Loop(layers, 3, 6),))] * 7, 12, ok=False)
    assert "mul, backward pass, layers 6 to 7:" in lines[1] and lines[-1] == "  and 2 more"


def test_non_finite_arguments_are_named():
    found = [origin("argument", "", places=(path,)) for path in ("[0].params['w']", "[1]['loss_mask']")]
    lines = describe(found, 12, ok=False)
    assert "before the step: params['w'], bfloat16[8,4], 1 NaN" in lines[1]
    assert "before the step: batch['loss_mask']" in lines[2]


def test_without_origins_the_compiled_program_is_what_is_left():
    assert describe([], 12, ok=True) == ["all values are finite, except for masked ones"]
    assert "only the compiled program differs" in describe([], 12, ok=False)[0]


def test_gradients_are_listed_by_what_is_wrong_with_them():
    norms = {f"layer {number}": float(number) for number in range(9)}
    (line,) = describe_gradients(norms)
    assert line == "largest gradient norms: layer 8 8, layer 7 7, layer 6 6, layer 5 5, layer 4 4"
    (line,) = describe_gradients(norms | {"embedding": NAN})
    assert line == "gradient norms that are not finite: embedding (nan)"


@pytest.mark.fault
def test_damage_in_the_record_is_passed_over(tmp_path):
    assert recorded_metrics(tmp_path, 3) is None
    lines = [
        b'{"step": 3, "loss": \xff}',
        b"[]",
        b"null",
        b'{"step": 3, "loss": 2.5, "grad_norm": null, "x": 1}',
        b'{"st',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert recorded_metrics(tmp_path, 3) == {"loss": 2.5, "grad_norm": None}
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": "2.5", "grad_norm": [1]}\n')
    assert recorded_metrics(tmp_path, 3) is None
