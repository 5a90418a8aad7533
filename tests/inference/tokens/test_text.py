"""Text that is released token by token equals the text of all tokens, and never has to be taken back."""

import time

import numpy as np
import pytest

from megajax.data.tokenizers.tokenizer import BytesTokenizer, NullTokenizer
from megajax.inference.tokens.text import TextStream


def released(tokens, stop=(), prompt=(), tokenizer=None):
    """-> (what each token releases, and what the end releases; the stop text)."""
    stream = TextStream(tokenizer or BytesTokenizer(), prompt, stop)
    parts = []
    for token in tokens:
        parts.append(stream.add(token))
        if stream.stopped_by is not None:
            return parts, stream.stopped_by
    return [*parts, stream.finish()], None


def test_characters_appear_when_they_are_complete():
    parts, _ = released("aé😀b".encode())
    assert parts == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_a_character_may_begin_in_the_prompt():
    first, *rest = "é!".encode()
    assert "".join(released(rest, prompt=[65, first])[0]) == "é!"


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_give_the_text_of_all_of_them(seed):
    tokens = np.random.default_rng(seed).choice([65, 66, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF], 150).tolist()
    assert "".join(released(tokens)[0]) == BytesTokenizer().decode(tokens)


def test_text_that_may_begin_a_stop_text_is_held_back():
    parts, stop = released(b"ab STOx ST", stop=("STOP", "never"))
    assert parts == ["a", "b", " ", "", "", "", "STOx", " ", "", "", "ST"] and stop is None
    parts, stop = released(b"ab STOP now", stop=("STOP", "TO"))
    assert ("".join(parts), stop) == ("ab S", "TO")


def test_tokens_with_spaces_between_them_keep_these():
    assert released([3, 4, 5], prompt=[1, 2], tokenizer=NullTokenizer(10))[0] == [" 3", " 4", " 5", ""]


class Words:
    """Tokens of several characters."""

    words = ("a", "b", "ab", "ba", "aab", "bbab")

    @classmethod
    def decode(cls, ids):
        return "".join(cls.words[i] for i in ids)


def test_the_stop_text_that_ends_first_stops_however_tokens_split_it():
    generator = np.random.default_rng(0)
    for _ in range(500):
        tokens = generator.integers(len(Words.words), size=20).tolist()
        text = Words.decode(tokens)
        stop = ["".join(generator.choice(list("ab"), generator.integers(3, 9))) for _ in range(4)]
        ends = [(text.index(each) + len(each), -len(each), each) for each in stop if each in text]
        end, _, first = min(ends, default=(len(text), 0, None))
        parts, found = released(tokens, stop, tokenizer=Words)
        assert found == first and "".join(parts) == text[: end - len(first or "")]


def test_matching_stop_texts_takes_linear_time():
    stop = ["a" * 255 + "b", *("c" + "a" * length for length in range(240, 255))]
    begin = time.process_time()
    parts, _ = released(b"a" * 5000, stop)
    assert len("".join(parts)) == 5000 and time.process_time() - begin < 0.5
