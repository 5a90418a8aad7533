"""Merges and verifies datasets of `preprocess`: `python -m megajax.data.preprocess merge` and `verify`.

    merge --input P1 P2 ... --output_prefix P     the documents of P1, then those of P2, ...
    verify --prefix P [P ...]                     P.bin against P.meta.json; exit status 1 if anything is wrong

Both read in blocks: memory does not grow with the data.
"""

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.data.indexed.dataset import HEADER, WRITE_BLOCK, IndexedDataset, IndexedDatasetWriter, prefix_of
from megajax.data.indexed.images import ImageTable, image_table_path
from megajax.data.indexed.meta import COUNTS, make_meta, read_meta, write_meta
from megajax.data.prepare.parts import check_complete, joined
from megajax.data.prepare.write_tokens import refuse_to_overwrite
from megajax.terminal.command_line import errors_in_one_line, parse
from megajax.terminal.one_line import print_error

BLOCK_BYTES = 1 << 24


def merge(prefixes: Sequence[str], output_prefix: str) -> dict | None:
    """Concatenates the datasets as `output_prefix`; returns its meta.json, None if they have none.

    The files equal those that `preprocess` makes of all inputs in this order. Raises ValueError if the datasets differ
    in dtype, tokenizer, form of the documents or end-of-document token, if only some have a meta.json, if one is
    damaged, or if they are parts (parts.py), but not all of them in order.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    metas = [read_meta(prefix) for prefix in prefixes]
    _check(datasets, metas, output_prefix)
    with IndexedDatasetWriter(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            for tokens in _token_blocks(dataset):
                writer.add_tokens(tokens)
            lengths = dataset.lengths
            boundaries = dataset.document_indices
            for begin in range(0, len(lengths), WRITE_BLOCK):
                writer.add_index(lengths[begin : begin + WRITE_BLOCK], np.zeros(0, np.int64))
            for begin in range(0, len(boundaries) - 1, WRITE_BLOCK):
                sequences = np.diff(boundaries[begin : begin + WRITE_BLOCK + 1])
                writer.add_index(np.zeros(0, np.int32), sequences)
    known = [meta for meta in metas if meta is not None]
    if not known:
        return None
    inputs = joined([file for meta in known for file in meta["inputs"]])
    facts = {key: value for key, value in known[0].items() if key not in (*COUNTS, "dtype", "sha256", "inputs", "part")}
    facts["record_forms"] = sorted({form for meta in known for form in meta.get("record_forms", ())})
    meta = make_meta(facts, inputs, str(writer.dtype), writer.digest.hexdigest())
    write_meta(output_prefix, meta)
    return meta


def _check(datasets: Sequence[IndexedDataset], metas: Sequence[dict | None], output_prefix: str) -> None:
    first = datasets[0]
    for dataset, meta in zip(datasets, metas, strict=True):
        if os.path.abspath(dataset.prefix) == os.path.abspath(output_prefix):
            raise ValueError(f"merge: --output_prefix={output_prefix} is one of the inputs; choose another")
        if dataset.dtype != first.dtype:
            raise ValueError(
                f"merge: {dataset.prefix}.bin holds {dataset.dtype}, {first.prefix}.bin {first.dtype}; "
                "preprocess one of them again"
            )
        if os.path.exists(image_table_path(dataset.prefix)):
            raise ValueError(f"merge: {dataset.prefix} has images, which are not merged; preprocess its input again")
        index_size = HEADER.size + 12 * len(dataset) + 8 * len(dataset.document_indices)
        if os.path.getsize(dataset.prefix + ".idx") != index_size:
            raise ValueError(f"merge: {dataset.prefix}.idx has modes of sequences (multimodal), which are not merged")
        if (meta is None) != (metas[0] is None):
            without = dataset.prefix if meta is None else first.prefix
            raise ValueError(f"merge: {without}.meta.json does not exist, so its tokenizer is unknown; merge "
                             "datasets that all have one, or none")  # fmt: skip
        if meta is None or metas[0] is None:
            continue
        for key in ("tokenizer_identity", "vocab_size", "eod_id", "append_eod", "form", "chat_template", "json_key"):
            if meta.get(key) != metas[0].get(key):
                raise ValueError(
                    f"merge: {key} is {meta.get(key)} in {dataset.prefix}.meta.json and {metas[0].get(key)} in "
                    f"{first.prefix}.meta.json; preprocess one of them again with the settings of the other"
                )
        if not isinstance(meta.get("inputs"), list):
            raise ValueError(f"merge: {dataset.prefix}.meta.json does not list its input files; preprocess it again")
    check_complete([dataset.prefix for dataset in datasets], [meta for meta in metas if meta is not None])


def _token_blocks(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    with open(dataset.prefix + ".bin", "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield np.frombuffer(block, dataset.dtype)


def verify(prefix: str) -> str:
    """Returns a one-line summary. Raises ValueError, naming the file, if anything is wrong.

    Checks that .bin and .idx belong together, that the tokenizer has every token id, the counts, and the sha256; of
    images, the sha256 of the table, and that their files are there, as large as they were.
    """
    dataset = IndexedDataset(prefix)
    meta = read_meta(prefix)
    if meta is None:
        raise ValueError(f"{prefix}.meta.json does not exist: there is nothing to check the tokens against")
    digest = hashlib.sha256()
    num_tokens = 0
    for tokens in _token_blocks(dataset):
        digest.update(tokens.data)
        bad = (tokens < 0) | (tokens >= meta["vocab_size"])
        if bad.any():
            found = int(bad.argmax())
            raise ValueError(_describe_bad_token(dataset, num_tokens + found, int(tokens[found]), meta["vocab_size"]))
        num_tokens += len(tokens)
    counts = {"num_tokens": num_tokens, "num_documents": len(dataset.document_indices) - 1}
    for name, count in counts.items():
        if count != meta[name]:
            raise ValueError(f"{prefix}.bin: {name} is {count}, {prefix}.meta.json says {meta[name]}; they belong to "
                             "different builds: build it again")  # fmt: skip
    if digest.hexdigest() != meta["sha256"]:
        raise ValueError(
            f"{prefix}.bin: its sha256 is {digest.hexdigest()}, {prefix}.meta.json says {meta['sha256']}; the tokens "
            "have been changed or damaged: copy or build it again"
        )
    images = f"{_verify_images(prefix, meta):,} images, " if "num_images" in meta else ""
    return (
        f"{prefix}: OK, {num_tokens:,} tokens of {counts['num_documents']:,} documents, {images}sha256 {meta['sha256']}"
    )


def _verify_images(prefix: str, meta: dict) -> int:
    """Number of images."""
    table = ImageTable(prefix)
    found = table.fingerprint()
    if found != meta.get("images_sha256"):
        raise ValueError(
            f"{image_table_path(prefix)}: its sha256 is {found}, {prefix}.meta.json says {meta.get('images_sha256')}; "
            "it has been changed or damaged: copy or build it again"
        )
    table.check_files()
    return len(table)


def _describe_bad_token(dataset: IndexedDataset, index: int, token: int, vocab_size: int) -> str:
    ends = np.cumsum(dataset.lengths, dtype=np.int64)
    number = int(np.searchsorted(ends, index, side="right"))
    position = index - int(ends[number] - dataset.lengths[number])
    return (
        f"{dataset.prefix}.bin: token {token} at position {position} of sequence {number} is not one of the "
        f"{vocab_size} ids of the tokenizer; the file is damaged: copy or build it again"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Joins datasets."""

    input: tuple[str, ...]
    """Prefixes of .bin/.idx files, in order."""
    output_prefix: str
    """P of P.bin, P.idx, P.meta.json."""
    overwrite: bool = False
    """Replace an existing dataset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Checks datasets."""

    prefix: tuple[str, ...]
    """Prefixes of .bin/.idx/.meta.json files."""


def main_merge(arguments: Sequence[str]) -> None:
    with errors_in_one_line():
        flags = parse(MergeOptions, arguments, "python -m megajax.data.preprocess merge")
        output_prefix = prefix_of(flags.output_prefix)
        if not flags.overwrite:
            refuse_to_overwrite(output_prefix)
        try:
            merge([prefix_of(path) for path in flags.input], output_prefix)
        except OSError as error:
            sys.exit(f"error: {error}")
        dataset = IndexedDataset(output_prefix)
    num_documents = len(dataset.document_indices) - 1
    num_tokens = int(dataset.lengths.sum(dtype=np.int64))
    print(f"{output_prefix}: {num_documents:,} documents, {num_tokens:,} tokens ({dataset.dtype})")


def main_verify(arguments: Sequence[str]) -> None:
    with errors_in_one_line():
        flags = parse(VerifyOptions, arguments, "python -m megajax.data.preprocess verify")
        prefixes = [prefix_of(path) for path in flags.prefix]
    wrong = 0
    for prefix in prefixes:
        try:
            print(verify(prefix))
        except (ValueError, OSError) as error:
            print_error(error)
            wrong += 1
    sys.exit(1 if wrong else 0)
