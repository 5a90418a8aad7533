"""Tokenizers: exact round trips, stable identities, refusals that name the field."""

import argparse
import pickle
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.tokenizer import check_tokenizer_spec, load_tokenizer, train_sentencepiece

STDLIB_FILES = [argparse.__file__, string.__file__, Path(argparse.__file__).with_name("decimal.py")]
STDLIB_FILES += [Path(argparse.__file__).with_name(name) for name in ("ast.py", "pathlib.py", "typing.py")]
HARD_TEXTS = [
    "",
    " ",
    "  two leading, two trailing  ",
    "\tif x:\n\t\treturn  1\r\n\n\n        # eight\n",
    "naïve café, 漢字 🎉 \u00a0\u200b\ufeff",
    "the space mark \u2581 itself, \u2581\u2581 twice",
    "\x00 null, <s></s><unk><0x0A> literally",
]
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \t\n\u2581ab(")), max_size=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return train_sentencepiece([str(path) for path in STDLIB_FILES], str(tmp_path_factory.mktemp("model") / "t"), 600)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def exact(request, model):
    return load_tokenizer(model if request.param == "sentencepiece" else "bytes")


def test_source_files_round_trip_exactly(exact):
    for path in STDLIB_FILES:
        text = Path(path).read_bytes().decode()
        ids = exact.encode(text)
        assert exact.decode(ids) == text
        assert 0 <= min(ids) <= max(ids) < exact.vocab_size
        assert exact.eod_id not in ids


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_round_trip_exactly(exact, text):
    assert exact.decode(exact.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_any_text_round_trips_exactly(exact, text):
    assert exact.decode(exact.encode(text)) == text


def test_training_is_deterministic_and_learns_indentation(model, tmp_path):
    again = train_sentencepiece([str(path) for path in STDLIB_FILES], str(tmp_path / "again"), 600)
    assert Path(again).read_bytes() == Path(model).read_bytes()
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode("        ")) == 1
    assert load_tokenizer(again).identity == tokenizer.identity


def test_tokenizers_pickle(model):
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer("null:10"), load_tokenizer(model)):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert (copy.identity, copy.vocab_size, copy.eod_id) == (
            tokenizer.identity,
            tokenizer.vocab_size,
            tokenizer.eod_id,
        )


def test_bytes_are_utf8_and_end_documents_with_256():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 256]) == "\ufffd"


def test_null_reads_integers():
    tokenizer = load_tokenizer("null:100")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (100, 99)
    assert tokenizer.encode("7 8\n99") == [7, 8, 99]
    assert tokenizer.decode([7, 8]) == "7 8"
    with pytest.raises(ValueError, match="null:100"):
        tokenizer.encode("100")


def test_hugging_face_file_loads_and_finds_the_end_token(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<a>", "<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(path) for path in STDLIB_FILES[:2]], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("tokenizer.json", str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (400, 1)
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<a>"}}')
    assert load_tokenizer("tokenizer.json", str(tmp_path)).eod_id == 0


@pytest.mark.parametrize("spec", ["gpt2", "null:", "null:x", "sentencepiece:", "null", "bytes2"])
def test_specs_that_are_not_known_are_refused(spec):
    with pytest.raises(ValueError, match=f"data.tokenizer={spec}"):
        check_tokenizer_spec(spec)


def test_missing_and_broken_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="none.model does not exist"):
        load_tokenizer(str(tmp_path / "none.model"))
    for name in ("broken.model", "tokenizer.json"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(ValueError, match=name):
            load_tokenizer(str(tmp_path / name))


def test_too_many_pieces_for_the_text_is_refused(tmp_path):
    (tmp_path / "small.txt").write_text("one two three\n" * 3)
    with pytest.raises(ValueError, match="data.tokenizer=sentencepiece:5000"):
        train_sentencepiece([str(tmp_path / "small.txt")], str(tmp_path / "t"), 5000)
