"""Trains a SentencePiece tokenizer on lines of text, or on text files."""

import io
import os
from collections.abc import Iterable, Iterator, Sequence

# Enough text for a few thousand pieces; more only costs time.
TRAIN_BYTES = 4_000_000


def train_sentencepiece(files: Sequence[str], model_prefix: str, vocab_size: int) -> str:
    """Trains on the text of UTF-8 files, at most TRAIN_BYTES, evenly from all files -> MODEL_PREFIX.model.

    Raises ValueError if the text has fewer than vocab_size pieces.
    """
    return train_on_lines(_lines_of_files(files), model_prefix, vocab_size)


def train_on_lines(lines: Iterable[str], model_prefix: str, vocab_size: int) -> str:
    """Trains a byte-pair SentencePiece model on lines of text; returns the path MODEL_PREFIX.model.

    Lossless: characters outside the vocabulary are encoded as bytes, text is not normalised, all spaces are kept and
    runs of them (indentation) become pieces; newline and tab are separate pieces. Deterministic. 2,048 pieces from
    TRAIN_BYTES take about 1 s. Raises ValueError if the text has fewer than vocab_size pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
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
            f"give more text, or change the number of pieces as the trainer says ({error})"
        ) from None
    with open(model_prefix + ".model", "wb") as file:
        file.write(model.getbuffer())
    return model_prefix + ".model"


def _lines_of_files(files: Sequence[str]) -> Iterator[str]:
    """Lines from the same fraction of every file, so that the first folder does not dominate the sample."""
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
