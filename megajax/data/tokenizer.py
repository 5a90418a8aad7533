"""Tokenizers behind one small interface: bytes, null, SentencePiece, Hugging Face tokenizer.json.

`load_tokenizer(spec)` understands: `bytes`; `null:VOCAB`; `PATH.model` (SentencePiece); `PATH/tokenizer.json`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

# SentencePiece writes a space as this character, so the character itself must go around it, as bytes.
SPACE_MARK = "\u2581"
# Names of the end-of-document token in tokenizer.json files that do not say it themselves.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
# Enough text for a few thousand pieces; more only costs time.
TRAIN_BYTES = 4_000_000


class Tokenizer(Protocol):
    """Ids are 0 to vocab_size - 1. decode(encode(text)) == text unless the implementation says otherwise.

    eod_id: the end-of-document token, or None where the tokenizer has none.
    identity: a hash of everything that decides the ids; data and checkpoints record it.
    """

    vocab_size: int
    eod_id: int | None
    identity: str

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class BytesTokenizer:
    """One token a byte of UTF-8; id 256 ends a document. Bytes that are not UTF-8 decode to U+FFFD."""

    vocab_size, eod_id, identity = 257, 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer:
    """Text is token ids with spaces between them; the last id ends a document. For tokens made elsewhere."""

    def __init__(self, vocab_size: int):
        if vocab_size < 1:
            raise ValueError(f"data.tokenizer=null:{vocab_size}: the vocabulary must have at least one id")
        self.vocab_size, self.eod_id, self.identity = vocab_size, vocab_size - 1, f"null:{vocab_size}"

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)} are not within data.tokenizer={self.identity}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


class SentencePieceTokenizer:
    """A SentencePiece model file. Exact for any text if the model was trained by `train_sentencepiece`.

    Raises ValueError if the model cannot be read or has no end-of-sentence token.
    """

    def __init__(self, path: str):
        import sentencepiece

        with open(path, "rb") as file:
            proto = file.read()
        self.path, self.identity = path, "sentencepiece:" + hashlib.sha256(proto).hexdigest()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise ValueError(f"data.tokenizer: {path} is not a SentencePiece model ({error})") from None
        self.vocab_size = self._model.get_piece_size()
        self.eod_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        pieces = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._space_mark = pieces if all(self._model.is_byte(piece) for piece in pieces) else None

    def __reduce__(self):
        return type(self), (self.path,)

    def encode(self, text: str) -> list[int]:
        if SPACE_MARK not in text or self._space_mark is None:
            return self._model.encode(text)
        parts = [self._model.encode(part) for part in text.split(SPACE_MARK)]
        return parts[0] + [i for part in parts[1:] for i in self._space_mark + part]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` package; special tokens are neither added nor hidden.

    The end-of-document token is `eos_token` of tokenizer_config.json beside the file, else the first name of
    END_NAMES that is in the vocabulary. How exact decoding is depends on the file.
    """

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"data.tokenizer={path} needs the package tokenizers; pip install 'megajax[tokenizers]'"
            ) from None
        with open(path, "rb") as file:
            content = file.read()
        self.path, self.identity = path, "tokenizer.json:" + hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"data.tokenizer: {path} is not a tokenizer.json ({error})") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = (self._configured_end(), *END_NAMES)
        self.eod_id = next((vocabulary[name] for name in names if name in vocabulary), None)

    def _configured_end(self) -> str | None:
        path = os.path.join(os.path.dirname(self.path), "tokenizer_config.json")
        if not os.path.exists(path):
            return None
        with open(path) as file:
            token = json.load(file).get("eos_token")
        return token["content"] if isinstance(token, dict) else token

    def __reduce__(self):
        return type(self), (self.path,)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def check_tokenizer_spec(spec: str) -> None:
    """Raises ValueError if `load_tokenizer` cannot understand the text; opens no file."""
    name, _, size = spec.partition(":")
    if name in ("null", "sentencepiece") and not size.isdecimal():
        raise ValueError(f"data.tokenizer={spec}: write {name}:VOCAB, for example {name}:2048")
    if name not in ("bytes", "null", "sentencepiece") and not spec.endswith((".model", ".json")):
        raise ValueError(
            f"data.tokenizer={spec} is not known; use bytes, null:VOCAB, sentencepiece:VOCAB (with data.text), "
            "PATH.model or PATH/tokenizer.json"
        )


def load_tokenizer(spec: str, folder: str = ".") -> Tokenizer:
    """The tokenizer a spec names; relative paths are below `folder`. ValueError if unknown or not there."""
    check_tokenizer_spec(spec)
    if spec == "bytes":
        return BytesTokenizer()
    if spec.startswith("null:"):
        return NullTokenizer(int(spec.removeprefix("null:")))
    if spec.startswith("sentencepiece:"):
        raise ValueError(
            f"data.tokenizer={spec} is trained on data.text and exists with data.source=text only; use PATH.model"
        )
    path = os.path.join(folder, spec)
    if not os.path.isfile(path):
        raise ValueError(f"data.tokenizer={spec}: file {path} does not exist")
    return SentencePieceTokenizer(path) if spec.endswith(".model") else HuggingFaceTokenizer(path)


def train_sentencepiece(files: Sequence[str], model_prefix: str, vocab_size: int) -> str:
    """Trains a byte-pair SentencePiece model on UTF-8 text files; returns the path MODEL_PREFIX.model.

    Lossless: bytes stand for characters outside the vocabulary, text is not normalised, spaces are kept one by one
    and runs of them (indentation) become pieces; newline and tab are pieces of their own. Deterministic. Reads at
    most TRAIN_BYTES, taken evenly over the files; 2,048 pieces take about 1 s.
    """
    import sentencepiece

    model_path = model_prefix + ".model"
    with open(model_path, "wb") as out:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_sample_lines(files),
                model_writer=out,
                model_type="bpe",
                vocab_size=vocab_size,
                character_coverage=0.9995,
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                treat_whitespace_as_suffix=True,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                max_sentencepiece_length=32,
                max_sentence_length=1 << 16,
                user_defined_symbols=["\n", "\t"],
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(
                f"data.tokenizer=sentencepiece:{vocab_size} cannot be trained on this text; "
                f"try fewer pieces or more text ({error})"
            ) from None
    return model_path


def _sample_lines(files: Sequence[str]) -> Iterator[str]:
    """Lines of an equal share of every file, so that a folder that sorts first does not fill the sample."""
    total = sum(os.path.getsize(path) for path in files)
    share = min(1.0, TRAIN_BYTES / max(total, 1))
    for path in files:
        with open(path, encoding="utf-8", errors="ignore", newline="") as file:
            yield from _head(file, max(1, int(os.path.getsize(path) * share)))


def _head(lines: Iterable[str], num_characters: int) -> Iterator[str]:
    for line in lines:
        if line.strip():
            yield line.rstrip("\r\n")
        num_characters -= len(line)
        if num_characters <= 0:
            return


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike) -> None:
    """Copies the file of a tokenizer that has one to folder/tokenizer.model or .json, so that a run stands alone."""
    path = getattr(tokenizer, "path", None)
    if path is not None:
        target = os.path.join(folder, "tokenizer" + os.path.splitext(path)[1])
        if not os.path.exists(target):
            shutil.copyfile(path, target)


def load_saved_tokenizer(folder: str | os.PathLike, spec: str) -> Tokenizer:
    """The tokenizer that save_tokenizer left in `folder`, or the one of `spec` if that needs no file."""
    for name in ("tokenizer.model", "tokenizer.json"):
        if os.path.exists(os.path.join(folder, name)):
            return load_tokenizer(os.path.join(folder, name))
    return load_tokenizer(spec)
