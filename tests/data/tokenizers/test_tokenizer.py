"""Tokenizers: exact round trips, stable identities, refusals that name the field."""

import argparse
import base64
import json
import pickle
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.prepare.documents import Reader
from megajax.data.prepare.train_tokenizer import train_tokenizer
from megajax.data.tokenizers.chat_template import CHATML, load_chat_template
from megajax.data.tokenizers.load import check_tokenizer_spec, load_saved_tokenizer, load_tokenizer, save_tokenizer

STDLIB_FILES = [argparse.__file__, string.__file__, Path(argparse.__file__).with_name("decimal.py")]
STDLIB_FILES += [Path(argparse.__file__).with_name(name) for name in ("ast.py", "textwrap.py", "typing.py")]
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


def trained(files, prefix, size):
    return train_tokenizer(files, f"sentencepiece:{size}", str(prefix), Reader(), "raise")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return trained([str(path) for path in STDLIB_FILES], tmp_path_factory.mktemp("model") / "t", 600)


def write_tiktoken(path: Path, side: dict | None = None) -> str:
    """A vocabulary of the 256 bytes and some pairs; `side` is written beside it."""
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"  ", b"\n\n", "é".encode()]
    path.write_bytes(b"".join(base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(tokens)))
    if side is not None:
        Path(f"{path}.json").write_text(json.dumps(side))
    return str(path)


SPECIAL = {"<|endoftext|>": 262, "<|im_start|>": 300}


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory) -> str:
    pytest.importorskip("tiktoken")
    return write_tiktoken(tmp_path_factory.mktemp("model") / "t.tiktoken", {"special_tokens": SPECIAL})


def make_tokenizer_json(folder: Path) -> str:
    """A byte-level BPE with a special token, <a>, and an added one that is not special, <tag>."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<a>", "<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(path) for path in STDLIB_FILES[:2]], trainer)
    made.add_tokens(["<tag>"])
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def json_file(tmp_path_factory) -> str:
    return make_tokenizer_json(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "tiktoken", "tokenizer.json"])
def exact(request):
    fixtures = {"sentencepiece": "model", "tiktoken": "tiktoken_file", "tokenizer.json": "json_file"}
    return load_tokenizer(request.getfixturevalue(fixtures[request.param]) if request.param in fixtures else "bytes")


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
    again = trained([str(path) for path in STDLIB_FILES], tmp_path / "again", 600)
    assert Path(again).read_bytes() == Path(model).read_bytes()
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode("        ")) == 1
    assert load_tokenizer(again).identity == tokenizer.identity


def test_tokenizers_pickle(model, tiktoken_file, json_file):
    for tokenizer in map(load_tokenizer, ("bytes", "null:10", model, tiktoken_file, json_file)):
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


def test_text_that_becomes_a_special_token_when_normalised_is_refused_in_a_template(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name in ("<unk>", "<s>"):
        made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode_template("a <s> other") == [0, 2, 1]
    wide = "\uff1cs\uff1e"
    assert 2 not in tokenizer.encode(wide)
    with pytest.raises(ValueError, match=f"'{wide}' becomes the special token <s> when .* normalises it"):
        tokenizer.encode_template(f"a {wide}")


def test_hugging_face_file_finds_the_end_token(tmp_path):
    make_tokenizer_json(tmp_path)
    tokenizer = load_tokenizer("tokenizer.json", str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (401, 1)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<a>"}}')
    assert load_tokenizer("tokenizer.json", str(tmp_path)).eod_id == 0


def test_text_never_becomes_special_tokens_and_templates_do(exact):
    names = list(exact.special_tokens)
    assert names or exact.identity == "bytes"
    text = "x " + " y ".join(names) + "\n"
    safe, template = exact.encode(text), exact.encode_template(text)
    assert not set(safe) & set(exact.special_tokens.values())
    assert [i for i in template if i in exact.special_tokens.values()] == list(exact.special_tokens.values())
    assert exact.decode(safe) == text
    assert exact.encode(text) == safe  # encoding a template leaves no trace
    for name, i in exact.special_tokens.items():
        assert exact.token_id(name) == i


def test_token_id_is_that_of_the_exact_piece(model, tiktoken_file, json_file):
    for path in (model, tiktoken_file, json_file):
        tokenizer = load_tokenizer(path)
        for text in ("e", "the"):
            assert tokenizer.token_id(text) is None or tokenizer.decode([tokenizer.token_id(text)]) == text
        assert tokenizer.token_id("e") is not None
        assert tokenizer.token_id("no such piece") is None
    assert load_tokenizer(model).token_id("</s>") == 1
    assert load_tokenizer(tiktoken_file).token_id("the") == 257
    assert load_tokenizer(json_file).token_id("<tag>") == 400
    assert load_tokenizer("bytes").token_id("e") is None
    null = load_tokenizer("null:100")
    assert [null.token_id(text) for text in ("7", "99", "100", "-1", "07", "e")] == [7, 99, None, None, None, None]


def test_tiktoken_file_gives_the_ids_of_the_package(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    path = write_tiktoken(tmp_path / "x.tiktoken", {"pattern": r"\w+|\W+", "special_tokens": {"<|endoftext|>": 300}})
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (301, 300)
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, Path(path).read_bytes().splitlines())
    }
    peer = tiktoken.Encoding("x", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
    for text in ("the other one, the", "  é\n\n"):
        assert tokenizer.encode(text) == peer.encode_ordinary(text)
    assert tokenizer.decode([257, 299, 300]) == "the<|endoftext|>"  # 299 is no token
    plain = load_tokenizer(write_tiktoken(tmp_path / "y.tiktoken"))
    assert (plain.vocab_size, plain.eod_id, plain.special_tokens) == (262, None, {})
    assert plain.identity != tokenizer.identity


@pytest.mark.parametrize(
    "side, message",
    [
        ({"special_tokens": {"<e>": 97}}, "two tokens of .* have the same id"),
        ({"special_tokens": ["<e>"]}, "special_tokens in .*x.tiktoken.json must be names with their ids"),
        ({"pattern": "("}, "pattern of .*x.tiktoken.json cannot be used"),
        ({"specials": {}}, r"has \['specials'\]; known are pattern and special_tokens"),
    ],
)
def test_tiktoken_side_files_that_cannot_be_meant_are_refused(tmp_path, side, message):
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write_tiktoken(tmp_path / "x.tiktoken", side))


def test_a_run_keeps_its_tokenizer_with_all_that_belongs_to_it(model, tiktoken_file, tmp_path):
    (tmp_path / "source").mkdir()
    json_file = make_tokenizer_json(tmp_path / "source")
    (tmp_path / "source" / "tokenizer_config.json").write_text('{"eos_token": "<a>", "chat_template": "T"}')
    for number, path in enumerate((model, tiktoken_file, json_file)):
        folder, tokenizer = tmp_path / str(number), load_tokenizer(path)
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        saved = load_saved_tokenizer(folder, path)
        assert Path(saved.path).parent == folder
        for name in ("identity", "eod_id", "vocab_size", "special_tokens"):
            assert getattr(saved, name) == getattr(tokenizer, name)
    assert load_chat_template(saved).source == "T"
    assert load_saved_tokenizer(tmp_path, "bytes").identity == "bytes"


def test_the_chat_template_lies_beside_the_tokenizer_or_is_chatml(tmp_path):
    path = make_tokenizer_json(tmp_path)
    assert load_chat_template(load_tokenizer("bytes")).source == CHATML
    assert load_chat_template(load_tokenizer(path)).source == CHATML
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"eos_token": {"content": "<a>"}, "add_bos_token": True, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(load_tokenizer(path))
    assert template.render([]) == "<a>"
    assert pickle.loads(pickle.dumps(template)).render([]) == "<a>"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of images"}')
    assert load_chat_template(load_tokenizer(path)).source == "of images"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_chat_template(load_tokenizer(path)).source == "file"
    (tmp_path / "own").write_text("own")
    assert load_chat_template(load_tokenizer(path), str(tmp_path / "own")).source == "own"
    with pytest.raises(ValueError, match="--chat_template=.*none: the file does not exist"):
        load_chat_template(load_tokenizer(path), str(tmp_path / "none"))
    (tmp_path / "own").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template: "):
        load_chat_template(load_tokenizer(path), str(tmp_path / "own"))


@pytest.mark.parametrize("spec", ["gpt2", "null:", "null:x", "sentencepiece:", "null", "bytes2"])
def test_specs_that_are_not_known_are_refused(spec):
    with pytest.raises(ValueError, match=f"data.tokenizer={spec}"):
        check_tokenizer_spec(spec)


def test_missing_and_broken_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="none.model does not exist"):
        load_tokenizer(str(tmp_path / "none.model"))
    for name in ("broken.model", "tokenizer.json", "x.tiktoken"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(ValueError, match=name):
            load_tokenizer(str(tmp_path / name))


def test_too_many_pieces_for_the_text_is_refused(tmp_path):
    (tmp_path / "small.txt").write_text("one two three\n" * 3)
    with pytest.raises(ValueError, match="data.tokenizer=sentencepiece:5000"):
        trained([str(tmp_path / "small.txt")], tmp_path / "t", 5000)
