"""The pattern of a decoder says which layers have a window, rotary embedding and experts."""

import re

import pytest

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.pattern import pattern_of, read_pattern

MIXTURE = dict(moe=MoeConfig(8), biases=())


@pytest.mark.parametrize("pattern, attention, feed_forward", [
    ("", "ffffff", "eeeeee"), ("de", "ffffff", "dedede"), ("ed2", "ffffff", "eddedd"),
    ("d3e58", "f" * 61, "ddd" + "e" * 58), ("w2f", "wwfwwf", "eeeeee"), ("f3n/de", "fffnff", "dedede"),
])  # fmt: skip
def test_a_pattern_is_repeated_over_the_layers(pattern, attention, feed_forward):
    number = len(attention)
    window = 4 if "w" in attention else None
    config = DecoderConfig(num_layers=number, pattern=pattern, position="rope", window=window, **MIXTURE)
    config.check(MeshConfig(), 16, ExecutionConfig())
    assert "".join(map(config.attention_letter, range(number))) == attention
    assert "".join("e" if config.has_experts(layer) else "d" for layer in range(number)) == feed_forward


@pytest.mark.parametrize("text", ["w5f", "d3e58", "f3n/de", "wf/d2e", ""])
def test_the_shortest_pattern_of_letters_is_found(text):
    pattern = read_pattern(text)
    assert pattern_of(pattern.attention * 3, pattern.feed_forward * 2) == text
    assert pattern_of(pattern.attention, pattern.feed_forward) == text


@pytest.mark.parametrize("fields, message", [
    (dict(pattern="x"), "model.pattern='x' must be letters with counts"),
    (dict(pattern="d0e"), "model.pattern='d0e'"),
    (dict(pattern="w99999f"), "model.pattern='w99999f'"),
    (dict(pattern="w/"), "model.pattern='w/'"),
    (dict(pattern="de/w"), "model.pattern='de/w'"),
    (dict(num_layers=4, pattern="d4e", **MIXTURE), "model.pattern=d4e gives none of the model.num_layers=4 layers"),
    (dict(pattern="de"), "set --model.moe.num_experts"),
    (dict(pattern="wf"), "model.pattern=wf and model.window=None contradict each other"),
    (dict(pattern="f", window=4), "model.pattern=f and model.window=4 contradict each other"),
    (dict(pattern="fn"), "model.position=learned has none anywhere"),
])  # fmt: skip
def test_what_contradicts_it_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DecoderConfig(**fields).check(MeshConfig(), 16, ExecutionConfig())
