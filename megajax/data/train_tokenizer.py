"""Trains a SentencePiece tokenizer, on text files or on the documents of a dataset that is to be made."""

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence

from megajax.data.read_input import Reader, read_batches, read_file
from megajax.data.tokenizer import check_tokenizer_spec

# Enough text for a few thousand pieces; more only costs time.
TRAIN_BYTES = 4_000_000


def train_sentencepiece(files: Sequence[str], model_prefix: str, vocab_size: int) -> str:
    """Trains on the text of UTF-8 files, at most TRAIN_BYTES, taken evenly over the files -> MODEL_PREFIX.model.

    Raises ValueError if the text has fewer pieces than asked for.
    """
    return _train(_lines_of_files(files), model_prefix, vocab_size)


def _train(lines: Iterable[str], model_prefix: str, vocab_size: int) -> str:
    """Trains a byte-pair SentencePiece model on lines of text; returns the path MODEL_PREFIX.model.

    Lossless: bytes stand for characters outside the vocabulary, text is not normalised, spaces are kept one by one
    and runs of them (indentation) become pieces; newline and tab are pieces of their own. Deterministic. 2,048
    pieces of TRAIN_BYTES take about 1 s. Raises ValueError if the text has fewer pieces than asked for.
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
            f"give more text, or fewer or more pieces as the trainer says ({error})"
        ) from None
    with open(model_prefix + ".model", "wb") as file:
        file.write(model.getbuffer())
    return model_prefix + ".model"


def _lines_of_files(files: Sequence[str]) -> Iterator[str]:
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


def train_tokenizer(files: Sequence[str], spec: str, output_prefix: str, reader: Reader, on_error: str) -> str:
    """Trains the tokenizer `sentencepiece:VOCAB` on documents of the files; returns the path P.tokenizer.model.

    Reads from the beginning of each file its share of TRAIN_BYTES. Raises ValueError if the text does not have so many
    pieces, or, with on_error="raise", for a document that cannot be read.
    """
    check_tokenizer_spec(spec)
    reader.check(files)
    os.makedirs(os.path.dirname(output_prefix) or ".", exist_ok=True)
    size = int(spec.removeprefix("sentencepiece:"))
    return _train(_lines_of_documents(files, reader, on_error), f"{output_prefix}.tokenizer", size)


def _lines_of_documents(files: Sequence[str], reader: Reader, on_error: str) -> Iterator[str]:
    total = max(1, sum(os.path.getsize(path) for path in files))
    for path in files:
        left = max(1, TRAIN_BYTES * os.path.getsize(path) // total)
        for text in _texts(path, reader, on_error):
            lines = text[:left].splitlines()
            yield from (line for line in lines if line.strip())
            left -= len(text)
            if left <= 0:
                break


def _texts(path: str, reader: Reader, on_error: str) -> Iterator[str]:
    passed_over = () if on_error == "raise" else (ValueError,)  # `preprocess` reports them
    with contextlib.closing(read_batches([path], reader, {})) as batches:
        for batch in batches:
            if batch.records is None:
                with contextlib.suppress(*passed_over):
                    yield "".join(reader.file_texts(read_file(path)[0], path)[0])
                continue
            for read, _ in reader.documents(batch):
                with contextlib.suppress(*passed_over):
                    yield "\n".join("".join(sequences) for sequences in read())
