"""Special tokens of encoder-decoders: those of a tokenizer that has them, otherwise ids beyond its own."""

import pytest
import tokenizers

from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.span_tokens import NUM_ADDED, SpanTokens

TEXT = "Thank you <extra_id_0> me to <extra_id_1> week"


def test_ids_are_added_to_a_tokenizer_without_sentinels():
    tokenizer = load_tokenizer("bytes")
    tokens = SpanTokens.of(tokenizer)
    assert (tokens.eos_id, tokens.pad_id, tokens.vocab_size) == (256, 257, 257 + NUM_ADDED)
    assert tokens.sentinel_ids == tuple(range(258, 358))
    ids = tokens.encode(TEXT)
    assert ids == [*b"Thank you ", 258, *b" me to ", 259, *b" week"]
    assert tokens.decode([tokens.pad_id, *ids, tokens.eos_id]) == TEXT
    with pytest.raises(ValueError, match="<extra_id_100> is not a sentinel; the last is <extra_id_99>"):
        tokens.encode("<extra_id_100>")


def test_those_of_t5_are_used(tmp_path):
    """As T5's tokenizer numbers them: the sentinels count down from the end of the vocabulary."""
    words = ["Thank", "you", "me", "to", "week"]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<pad>", "</s>", *(f"<extra_id_{i}>" for i in reversed(range(3)))])
    model.save(str(tmp_path / "tokenizer.json"))
    tokens = SpanTokens.of(load_tokenizer(str(tmp_path / "tokenizer.json")))
    assert (tokens.pad_id, tokens.eos_id, tokens.sentinel_ids, tokens.vocab_size) == (0, 1, (10, 9, 8), 11)
    assert tokens.encode(TEXT) == [3, 4, 10, 5, 6, 9, 7]
    assert tokens.decode([0, *tokens.encode(TEXT), 1]) == TEXT


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no end-of-document token, which ends the spans"):
        SpanTokens.of(load_tokenizer(str(tmp_path / "tokenizer.json")))
