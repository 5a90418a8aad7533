"""The arrays of a call: what each token attends to."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.inference.config import ServingConfig
from megajax.inference.device.batches import Batches, Shapes
from megajax.inference.scheduling.work import Chunk, Prefill, Request, Sequence
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.kv_cache import PoolSizes

PAGE = 4
SIZES = PoolSizes(num_pages=64, page_size=PAGE, num_rows=4, dtype=jnp.dtype(jnp.float32))
BATCHES = Batches(SIZES, Shapes.of(SIZES, max_length=64, max_batch_tokens=64, has_kernel=True), vocab_size=10)


def test_few_programs_serve_any_request_and_the_others_come_in_stages():
    serving = ServingConfig().on("cpu")
    sizes = PoolSizes(num_pages=256, page_size=64, num_rows=serving.max_rows, dtype=jnp.dtype(jnp.float32))
    shapes = Shapes.of(sizes, max_length=8192, max_batch_tokens=serving.max_batch_tokens, has_kernel=False)
    stages = shapes.stages()
    counts = [len(stage.decode) + len(stage.prefill) for stage in stages]
    assert counts == [2, 4, 8, 12] and stages[-1] == shapes
    for stage in stages:
        assert stage.fitting_decode(stage.rows[-1], 8192 // 64) in stage.decode  # the longest sequence
        assert stage.fitting_prefill(stage.chunks[-1], stage.most_pages) in stage.prefill
        assert {*stage.decode, *stage.prefill} <= {*shapes.decode, *shapes.prefill}


@pytest.mark.parametrize(
    ("rows", "tokens", "beside", "alone"),
    [
        (256, 8192, {64: [*range(192, 961, 128)], 128: [384, 640, 896], 256: [256, 1792, 3840, 7936]}, [256, 7936]),
        (256, 1024, {64: [*range(192, 705, 128)], 128: [384, 640], 256: [256, 768]}, [256, 768]),
        (100, 1024, {64: [*range(192, 833, 128)], 100: [128, 896]}, [192, 896]),
        (32, 1024, {32: [*range(192, 961, 128)]}, [192, 960]),
        (128, 300, {128: [128, 172]}, [172]),
        (256, 64, {256: [256]}, [256]),
        (1, 64, {1: [64]}, [64]),
    ],
)
def test_calls_with_prompts_have_room_for_few_or_all_of_the_sequences_that_decode(rows, tokens, beside, alone):
    sizes = SIZES._replace(num_rows=rows)
    shapes = Shapes.of(sizes, max_length=64, max_batch_tokens=tokens, has_kernel=True, mixes=True)
    found = {shape.rows_beside for shape in shapes.prefill}
    by_rows = {number: [shape.tokens for shape in shapes.prefill if shape.rows_beside == number] for number in found}
    assert by_rows == beside | {0: alone}
    assert shapes.fitting_prefill(shapes.chunks[-1], 1, rows) in shapes.prefill  # as many as there are


@pytest.mark.parametrize(
    ("pages", "decoding", "shape"),
    [
        (16, 0, (256, 0)),
        (100, 0, (320, 64)),
        (16, 1, (320, 64)),
        (16, 64, (320, 64)),
        (16, 65, (384, 128)),
        (16, 129, (256, 256)),
    ],
)
def test_a_call_has_the_smallest_shape_with_enough_room(pages, decoding, shape):
    shapes = Shapes.of(SIZES._replace(num_rows=256), 8192, 8192, True, mixes=True)
    fitting = shapes.fitting_prefill(250, pages, decoding)
    assert (fitting.tokens, fitting.rows_beside) == shape and fitting.pages >= pages


def test_a_measured_call_has_tokens_that_write_to_slots_of_their_own():
    """As a real one: padding is in no slot, and has no experts."""
    sizes = SIZES._replace(num_rows=128, num_pages=512)
    batches = Batches(sizes, Shapes.of(sizes, 512, 512, True, mixes=True), vocab_size=10)
    shape = next(shape for shape in batches.shapes.prefill if shape.rows_beside == 128)
    batch, _, beside = batches.full_prefill(*shape)
    pages = set((batch.slots_T // PAGE).tolist())
    assert len(set(batch.slots_T.tolist())) == shape.tokens and pages == set(range(-(-shape.tokens // PAGE)))
    assert (batch.upper_T == np.arange(shape.tokens) + 1).all() and not batch.lower_T.any()
    several, _ = batches.full_decode(128, 128, 3)
    assert set((several.ends_B - several.positions_B).tolist()) == {3}
    for decoding in (beside.batch, several):
        assert len(set(decoding.table_BP[:, 0].tolist())) == 128 and (decoding.ends_B > decoding.positions_B).all()
    assert not pages & set(beside.batch.table_BP[:, 0].tolist())


def test_tokens_of_a_prompt_attend_to_their_sequence_and_padding_to_nothing_with_bounds_that_never_decrease():
    """The kernel for prompts finds the keys of a block of tokens by the bounds of its first and last token: padding
    with smaller bounds would hide them from the tokens before it."""
    rng = random.Random(0)
    for _ in range(100):
        chunks = []
        for row in range(rng.randint(1, 4)):
            length = rng.randint(1, 30)
            pages = rng.sample(range(SIZES.num_pages), -(-length // PAGE))
            request = Request([1] * length, Sampling(max_tokens=1))
            sequence = Sequence(request, 0, [1] * length, length + 1, row, pages, num_to_prefill=length)
            start = rng.randrange(length)
            chunks.append(Chunk(sequence, start, min(length, start + 16)))
        batch, *_ = BATCHES.prefill(Prefill(chunks))
        assert (np.diff(batch.lower_T) >= 0).all() and (np.diff(batch.upper_T) >= 0).all()
        token = 0
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                slots = np.arange(batch.lower_T[token], batch.upper_T[token])
                assert (slots % PAGE == np.arange(position + 1) % PAGE).all()
                assert batch.table_P[slots // PAGE].tolist() == [chunk.sequence.pages[i // PAGE]
                                                                  for i in range(position + 1)]  # fmt: skip
                token += 1
        assert (batch.lower_T[token:] == batch.upper_T[token:]).all()
