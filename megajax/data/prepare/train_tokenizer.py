"""Trains a tokenizer on the input of preprocess."""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence

from megajax.data.prepare.documents import Reader
from megajax.data.prepare.read_input import read_batches, read_file
from megajax.data.tokenizers.load import check_tokenizer_spec
from megajax.data.tokenizers.train_sentencepiece import TRAIN_BYTES, train_on_lines


def train_tokenizer(files: Sequence[str], spec: str, prefix: str, reader: Reader, on_error: str) -> str:
    """Trains the tokenizer `sentencepiece:VOCAB` on documents of the files; returns the path PREFIX.model.

    Reads the beginning of each file, TRAIN_BYTES in total, in proportion to file sizes, so that the first folder does
    not dominate. Raises ValueError if the text has fewer pieces or, with on_error="raise", for a document that cannot
    be read.
    """
    check_tokenizer_spec(spec)
    reader.check(files)
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    return train_on_lines(_lines(files, reader, on_error), prefix, int(spec.removeprefix("sentencepiece:")))


def _lines(files: Sequence[str], reader: Reader, on_error: str) -> Iterator[str]:
    total = max(1, sum(os.path.getsize(path) for path in files))
    for path in files:
        left = max(1, int(min(1, TRAIN_BYTES / total) * os.path.getsize(path)))
        lines = (line for text in _texts(path, reader, on_error) for line in io.StringIO(text, newline=""))
        for line in lines:
            if line.strip():
                yield line.rstrip("\r\n")
            left -= len(line)
            if left <= 0:
                break


def _texts(path: str, reader: Reader, on_error: str) -> Iterator[str]:
    suppressed = () if on_error == "raise" else (ValueError,)  # `preprocess` reports them
    with contextlib.closing(read_batches([path], reader, {})) as batches:
        for batch in batches:
            if batch.records is None:
                with contextlib.suppress(*suppressed):
                    yield "".join(reader.file_texts(read_file(path, reader)[0], path)[0])
                continue
            for read, _ in reader.documents(path, batch.records, batch.first):
                with contextlib.suppress(*suppressed):
                    yield "\n".join("".join(sequences) for sequences in read().texts)
