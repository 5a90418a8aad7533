"""Tokenizers of files, each by the library of its format: SentencePiece, Hugging Face tokenizer.json, tiktoken."""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Sequence

from megajax.data.tokenizers.tokenizer import MERGES, VOCABULARY, Tokenizer, beside, configured_tokens, read_json

# SentencePiece encodes a space as this character, so the character itself must be encoded as bytes.
SPACE_MARK = "\u2581"
# Names of the end-of-document token, for files that do not specify it.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
# How GPT-4 (cl100k_base) splits text into words before merging bytes; the pattern is part of the vocabulary.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


class FileTokenizer(Tokenizer):
    """Pickles as its path."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return type(self), (self.path,)


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model file. Exact for any text if the model was trained by `train_on_lines`.

    Its special tokens are the control pieces of the model. User-defined pieces are recognised in any text: the library
    cannot disable this. In `encode_template` the text after a special token is encoded as a separate text, with the
    leading space that some models add.

    Raises ValueError if the model cannot be read or has no end-of-sentence token.
    """

    def __init__(self, path: str):
        import sentencepiece

        with open(path, "rb") as file:
            proto = file.read()
        super().__init__(path)
        self.identity = "sentencepiece:" + hashlib.sha256(proto).hexdigest()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except RuntimeError as error:
            raise ValueError(f"data.tokenizer: {path} is not a SentencePiece model ({error})") from None
        self.vocab_size = self._model.get_piece_size()
        if not self.vocab_size:
            raise ValueError(f"data.tokenizer: {path} has no tokens; is it complete?")
        self.eod_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        control = (i for i in range(self.vocab_size) if self._model.is_control(i))
        self.special_tokens = {self._model.id_to_piece(i): i for i in control}
        pieces = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._space_mark = pieces if all(self._model.is_byte(piece) for piece in pieces) else None

    def encode(self, text: str) -> list[int]:
        if SPACE_MARK not in text or self._space_mark is None:
            return self._model.encode(text)
        parts = [self._model.encode(part) for part in text.split(SPACE_MARK)]
        return parts[0] + [i for part in parts[1:] for i in self._space_mark + part]

    def encode_template(self, text: str) -> list[int]:
        # the longest name first: one may be a prefix of another
        names = sorted(self.special_tokens, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        ids = []
        for number, part in enumerate(parts):
            ids += [self.special_tokens[part]] if number % 2 else self.encode(part) if part else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])

    def token_bytes(self) -> list[bytes]:
        """What each token adds inside a text; nothing for special tokens."""

        def added(i: int) -> bytes:
            piece = self._model.id_to_piece(i)
            if self._model.is_control(i) or self._model.is_unknown(i):
                return b""
            return bytes([int(piece[3:-1], 16)]) if self._model.is_byte(i) else piece.replace(SPACE_MARK, " ").encode()

        return [added(i) for i in range(self.vocab_size)]

    def token_id(self, text: str) -> int | None:
        found = self._model.piece_to_id(text)  # the unknown piece if there is none
        return found if self._model.id_to_piece(found) == text else None


def tokenizer_json(path: str) -> bytes:
    """Content of a tokenizer.json, or what it would be for vocab.json and merges.txt."""
    if os.path.basename(path) != VOCABULARY:
        with open(path, "rb") as file:
            return file.read()
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    merges = beside(path, MERGES)
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(path, merges))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"data.tokenizer: {path} and {merges} are not a byte-level BPE ({error})") from None
    prefix = bool(read_json(beside(path, "tokenizer_config.json")).get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = tokenizer.get_vocab()
    special = configured_tokens(path).values() or [name for name in END_NAMES[:1] if name in vocabulary]
    added = read_json(beside(path, "added_tokens.json"))
    for name, number in sorted(added.items(), key=lambda item: item[1]):
        tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False, special=name in special)])
        if tokenizer.token_to_id(name) != number:
            raise ValueError(
                f"data.tokenizer: added_tokens.json beside {path} gives {name} the id {number}, which does not follow "
                "the vocabulary; write tokenizer.json with transformers"
            )
    tokenizer.add_special_tokens([name for name in dict.fromkeys(special) if name not in added])
    return tokenizer.to_str().encode()


class HuggingFaceTokenizer(FileTokenizer):
    """A tokenizer.json, read by the `tokenizers` package; special tokens are neither added nor hidden.

    vocab.json, with merges.txt next to it, is a tokenizer.json of GPT-2's byte-level BPE.

    Its special tokens are the added tokens marked `special`; other added tokens (tags such as `<tool_call>` in some
    files, runs of spaces in others) are recognised in any text: the library cannot disable this.
    The end-of-document token is `eos_token` in tokenizer_config.json next to the file, else the first name of
    END_NAMES in the vocabulary. Whether decoding is exact depends on the file.
    """

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"data.tokenizer={path} needs the package tokenizers; pip install 'megajax[tokenizers]'"
            ) from None
        content = tokenizer_json(path)
        super().__init__(path)
        self.identity = "tokenizer.json:" + hashlib.sha256(content).hexdigest()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"data.tokenizer: {path} is not a tokenizer.json ({error})") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"data.tokenizer: {path} has no tokens; is it complete?")
        self.vocab_size = max(vocabulary.values()) + 1
        names = (configured_tokens(path).get("eos_token"), *END_NAMES)
        self.eod_id = next((vocabulary[name] for name in names if name in vocabulary), None)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self._tokenizer.encode_special_tokens = True  # as ordinary text
        self._found_normalized = self._find_normalized(added)

    def _find_normalized(self, added: dict) -> dict[int, str]:
        """Special tokens that are matched in normalised text, which may contain their names where the text does not,
        except the token for unknown text."""
        if self._tokenizer.normalizer is None:
            return {}
        found = {i: token.content for i, token in added.items() if token.special and token.normalized}
        with contextlib.suppress(Exception):  # from a vocabulary without a token for unknown text
            for unknown in self.encode("\U0010fffd") if found else []:
                found.pop(unknown, None)
        return found

    @functools.cached_property
    def _template_tokenizer(self):
        # a second object, because encode_special_tokens is mutable state shared by threads; it is not saved in the file
        return type(self._tokenizer).from_str(self._tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_template(self, text: str) -> list[int]:
        encoding = self._template_tokenizer.encode(text, add_special_tokens=False)
        if self._found_normalized:
            for i, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if i in self._found_normalized and text[begin:end].strip() != self._found_normalized[i]:
                    raise ValueError(
                        f"{text[begin:end]!r} becomes the special token {self._found_normalized[i]} when {self.path} "
                        "normalises it; take it out"
                    )
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def as_json(self) -> str:
        """The contents of a tokenizer.json."""
        return self._tokenizer.to_str()

    @property
    def start_ids(self) -> list[int]:
        """Tokens that the file puts before a text (<s>), and `encode` omits."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [i for i, _ in itertools.takewhile(lambda mark: mark[1], marks)]


class TiktokenTokenizer(FileTokenizer):
    """PATH.tiktoken: lines of a token in base64 and its rank, which is its id; the `tiktoken` package encodes.

    PATH.tiktoken.json may hold {"pattern": how to split text into words, by default CL100K_PATTERN, "special_tokens":
    {name: id}, by default none}; the end-of-document token is the first special token in END_NAMES.
    Exact for any text; bytes that are not UTF-8 decode to U+FFFD, unused ids to nothing.
    Raises ValueError if a file cannot be read, a byte has no token, or two tokens have the same id.
    """

    def __init__(self, path: str):
        try:
            import tiktoken
        except ImportError:
            raise ValueError(f"data.tokenizer={path} needs the package tiktoken; pip install 'megajax[data]'") from None
        with open(path, "rb") as file:
            content = file.read()
        ranks = _read_ranks(content, path)
        side = read_json(path + ".json")
        if unknown := sorted(side.keys() - {"pattern", "special_tokens"}):
            raise ValueError(f"data.tokenizer: {path}.json has {unknown}; known are pattern and special_tokens")
        pattern = side.get("pattern", CL100K_PATTERN)
        special = side.get("special_tokens", {})
        if not isinstance(special, dict) or not all(type(i) is int and i >= 0 for i in special.values()):
            raise ValueError(f"data.tokenizer: special_tokens in {path}.json must be names with their ids")
        ids = [*ranks.values(), *special.values()]
        if len(set(ids)) < len(ids):
            raise ValueError(f"data.tokenizer: two tokens of {path} and {path}.json have the same id")
        facts = hashlib.sha256(content + json.dumps([pattern, special], sort_keys=True).encode())
        super().__init__(path)
        self.identity = "tiktoken:" + facts.hexdigest()
        self.special_tokens = special
        self.vocab_size = max(ids) + 1
        self.eod_id = next((special[name] for name in END_NAMES if name in special), None)
        self._ranks = ranks
        self._known = set(ids)
        try:
            self._encoding = tiktoken.Encoding(path, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except (ValueError, TypeError) as error:
            raise ValueError(f"data.tokenizer: pattern of {path}.json cannot be used ({error})") from None

    def encode(self, text: str) -> list[int]:
        return self._encode(self._encoding.encode_ordinary, text)

    def encode_template(self, text: str) -> list[int]:
        return self._encode(functools.partial(self._encoding.encode, allowed_special="all"), text)

    def _encode(self, encode, text: str) -> list[int]:
        try:
            return encode(text)
        except BaseException as error:  # a panic of the library is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(
                f"tiktoken fails on this text ({error}); the usual cause is 100,000 consecutive spaces or more"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode_bytes([int(i) for i in ids if int(i) in self._known]).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text; nothing for special tokens and unused ids."""
        found = [b""] * self.vocab_size
        for token, rank in self._ranks.items():
            found[rank] = token
        return found

    def token_id(self, text: str) -> int | None:
        return self.special_tokens.get(text, self._ranks.get(text.encode()))


def _read_ranks(content: bytes, path: str) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"data.tokenizer: {path} line {number} is not a token in base64 and its rank ({error})"
            ) from None
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"data.tokenizer: {path} must have a token for each of the 256 bytes; is it complete?")
    return ranks
