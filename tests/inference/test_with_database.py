"""Texts that are continued while neighbours are looked up: what the model writes is what it computes for the whole."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.inference.tokens.sampling import Sampling
from megajax.inference.with_database import WriterWithDatabase
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.models.retro import RetroConfig
from megajax.precision import PrecisionConfig
from megajax.retrieval.inputs import NO_TOKEN

M, K, R = 4, 2, 6
VOCAB = 40
CONFIG = RetroConfig(
    num_layers=2, embed_dim=16, num_heads=2, vocab_size=VOCAB, position="rope", init_std=0.5, retrieval_layers=(0,),
    chunk_length=M, num_neighbours=K, neighbour_length=R,
)  # fmt: skip


class Letters:
    """A token for each letter."""

    eod_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 48 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + 48) for token in tokens)


@pytest.fixture(scope="module")
def opened():
    model = Model(CONFIG, PrecisionConfig(compute="float32"), ExecutionConfig())
    weights = model.init(0)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return SimpleNamespace(model=model, mesh=mesh, tokenizer=Letters(), start_ids=(), restore=lambda: weights)


def neighbours_of(chunks) -> np.ndarray:
    """The chunk backwards, and what follows it."""
    found = np.full((len(chunks), K, R), NO_TOKEN, np.int32)
    for number, chunk in enumerate(chunks):
        found[number, 0, :M] = chunk[::-1]
        found[number, 1] = (np.arange(R) + chunk[0]) % VOCAB
    return found


SAMPLING = Sampling(max_tokens=11, temperature=0.0)


def test_each_token_is_what_the_whole_text_gives_with_the_neighbours_of_its_chunks(opened):
    asked = []

    def look_up(chunks):
        asked.extend(tuple(chunk.tolist()) for chunk in chunks)
        return neighbours_of(chunks)

    (found,) = WriterWithDatabase(opened, look_up).write(["3<:852"], SAMPLING)
    assert (found.prompt_tokens, len(found.tokens), found.finish_reason) == (6, 11, "length")
    text = np.array([*Letters().encode("3<:852"), *found.tokens])
    chunks = text[:16].reshape(4, M)
    assert asked == [tuple(chunk) for chunk in chunks.tolist()]
    padded = np.zeros(20, np.int32)
    padded[:17] = text
    batch = {
        "tokens": padded[None],
        "positions": np.arange(20, dtype=np.int32)[None],
        "neighbour_tokens": np.concatenate([neighbours_of(chunks), np.full((1, K, R), NO_TOKEN, np.int32)])[None],
    }
    module = opened.model.module(opened.restore())
    with jax.set_mesh(opened.mesh):
        logits = module.logits(module.hidden(jax.tree.map(jnp.asarray, batch))[0])[0, :, :VOCAB]
    assert np.argmax(logits, -1)[5:16].tolist() == found.tokens
    (without,) = WriterWithDatabase(opened, None).write(["3<:852"], SAMPLING)
    assert without.tokens != found.tokens


def test_stop_texts_and_settings(opened):
    writer = WriterWithDatabase(opened, neighbours_of)
    (whole,) = writer.write(["3<:"], SAMPLING)
    stop = whole.text[4:6]
    (found,) = writer.write(["3<:"], dataclasses.replace(SAMPLING, stop=(stop,)))
    assert (found.text, found.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    with pytest.raises(ValueError, match="prompt='' has no tokens"):
        writer.write([""], SAMPLING)
    with pytest.raises(ValueError, match="presence_penalty=1.0 is not supported by model.kind=retro"):
        writer.write(["3"], dataclasses.replace(SAMPLING, presence_penalty=1.0))
