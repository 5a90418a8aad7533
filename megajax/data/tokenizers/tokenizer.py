"""The interface of tokenizers, those that need no file, and the files that lie beside the others."""

import json
import os
import re
from collections.abc import Mapping, Sequence

VOCABULARY = "vocab.json"  # of GPT-2's format
MERGES = "merges.txt"


class Tokenizer:
    """Ids are 0 to vocab_size - 1. decode(encode(text)) == text unless the implementation says otherwise."""

    vocab_size: int
    eod_id: int | None
    """The end-of-document token, or None if the tokenizer has none."""
    identity: str
    """A hash of everything that determines the ids; data and checkpoints record it."""
    special_tokens: Mapping[str, int] = {}
    """Name -> id of the tokens that `encode` never produces, even if the text contains their names."""
    path: str | None = None
    """Of its file, if it has one."""

    @property
    def start_ids(self) -> Sequence[int]:
        """Tokens that the file puts before a text (<s>), and `encode` omits."""
        return ()

    def encode(self, text: str) -> list[int]:
        """For untrusted text."""
        raise NotImplementedError

    def encode_template(self, text: str) -> list[int]:
        """For text rendered by a chat template; names of special tokens in it become these tokens."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def token_id(self, text: str) -> int | None:
        """The id of exactly this piece or special token, None if there is none."""
        return None


class BytesTokenizer(Tokenizer):
    """One token per byte of UTF-8; id 256 ends a document and has no name. Bytes that are not UTF-8 decode to U+FFFD.
    names: special tokens, with the ids from 257 on."""

    eod_id = 256

    def __init__(self, names: Sequence[str] = ()):
        self.special_tokens = {name: number for number, name in enumerate(names, 257)}
        self.vocab_size = 257 + len(self.special_tokens)
        self.identity = ":".join(["bytes", *([",".join(names)] if names else [])])

    def __reduce__(self):
        return type(self), (tuple(self.special_tokens),)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_template(self, text: str) -> list[int]:
        if not self.special_tokens:
            return self.encode(text)
        names = "|".join(map(re.escape, self.special_tokens))
        ids = []
        for piece in re.split(f"({names})", text):
            ids += [self.special_tokens[piece]] if piece in self.special_tokens else self.encode(piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        return self.special_tokens.get(text)

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), *[b""] * (self.vocab_size - 256)]


class NullTokenizer(Tokenizer):
    """Text is token ids separated by spaces; the last id ends a document. For data tokenized elsewhere."""

    def __init__(self, vocab_size: int):
        if vocab_size < 1:
            raise ValueError(f"data.tokenizer=null:{vocab_size}: the vocabulary must have at least one id")
        self.vocab_size = vocab_size
        self.eod_id = vocab_size - 1
        self.identity = f"null:{vocab_size}"

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} are not within data.tokenizer={self.identity}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_id(self, text: str) -> int | None:
        return int(text) if re.fullmatch("0|[1-9][0-9]*", text) and int(text) < self.vocab_size else None


def read_json(path: str) -> dict:
    """{} if there is no such file."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data.tokenizer: {path} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"data.tokenizer: {path} does not hold an object {{...}}")
    return found


def beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), name)


def configured_tokens(path: str | None) -> dict[str, str]:
    """{"bos_token": "<s>", ...} of tokenizer_config.json next to a tokenizer's file; {} without a file."""
    found: dict[str, str] = {}
    if path is None:
        return found
    for name, token in read_json(beside(path, "tokenizer_config.json")).items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a generation: the end of a document, and what generation_config.json beside its file names."""
    file = tokenizer.path
    found = read_json(beside(file, "generation_config.json")).get("eos_token_id") if file else None
    named = found if isinstance(found, list) else [found]
    return frozenset(i for i in (tokenizer.eod_id, *named) if i is not None)


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: a text has no fewer tokens than its length divided by this, unless the tokenizer
    drops some of it (repeated spaces, unknown words)."""
    # some drop the space of a first token
    return max(len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)) + 1
