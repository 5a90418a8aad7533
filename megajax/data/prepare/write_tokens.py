"""Writes indexed datasets and their meta.json from input files, for `python -m megajax.data.preprocess` and
data.text."""

import collections
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.indexed.images import ImageTable, ImageTableWriter, image_table_path
from megajax.data.indexed.meta import COUNTS, make_meta, read_meta, write_meta
from megajax.data.prepare.conversation_records import shortened
from megajax.data.prepare.documents import MAX_DOCUMENT_BYTES, Reader
from megajax.data.prepare.encode import Block, Encoder, encode_in_order
from megajax.data.prepare.parts import Part, Piece, finished_part, part_facts, pieces_of
from megajax.data.prepare.read_input import read_batches, read_pieces
from megajax.data.tokenizers.chat_template import ChatTemplate, load_chat_template
from megajax.data.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("megajax")


def preprocess(
    files: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    tokenizer_spec: str,
    *,
    json_keys: Sequence[str] = ("text",),
    form: str = "documents",
    template: ChatTemplate | None = None,
    append_eod: bool = True,
    num_workers: int = 1,
    on_error: str = "raise",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    image_folder: str | None = None,
    progress: Callable[[int], None] | None = None,
    part: Part | None = None,
    overwrite: bool = False,
) -> dict[str, dict]:
    """Encodes `files`, in this order, as an indexed dataset, or one per key; returns prefix -> its meta.json.

    form: "documents", "sentences" or "conversations"; template: for conversations; default: the tokenizer's. on_error:
    "raise" stops at the first document that cannot be read or exceeds max_document_bytes (ValueError with file and
    line); "skip" omits, logs and counts such documents. Empty documents are omitted; with several keys, a record with
    an empty text for one key becomes a document without sequences there. Input without any text is refused
    (ValueError). progress: called with the number of input bytes done.

    With a template that has tokens of media, conversations have images or clips, and `PREFIX.images` says which.
    image_folder: see Reader. They are read, and one that is missing or damaged counts as a document that cannot be
    read.

    part: encodes this part of the files alone, as the dataset part.prefix(output_prefix), which `merge` joins with the
    others. One that was finished before is left as it is; one of other files or settings is refused (ValueError),
    unless `overwrite`.
    """
    if form == "conversations":
        template = template or load_chat_template(tokenizer)
    reader = Reader(tuple(json_keys), form, template, max_document_bytes, image_folder)
    reader.check(files)
    pieces = [Piece(path) for path in files]
    if part is not None:
        if reader.media_tokens:
            raise ValueError("--part and --ray: datasets with images or sound are not merged; preprocess all at once")
        pieces = pieces_of(part, [(path, reader.may_be_cut(path)) for path in files])
    if reader.recognises_forms:
        reader = dataclasses.replace(reader, record_forms=_record_forms([piece.path for piece in pieces], reader))
    facts: dict[str, Any] = {
        "tokenizer": tokenizer_spec,
        "tokenizer_identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "append_eod": append_eod,
        "form": form,
        "chat_template": template.identity if template else None,
        "record_forms": sorted(set(reader.record_forms.values())),
    }
    if part is not None:
        facts["part"] = part_facts(part, files, on_error=on_error, max_document_bytes=max_document_bytes)
    prefixes = output_prefixes(part.prefix(output_prefix) if part else output_prefix, json_keys)
    facts_of = {prefix: facts | {"json_key": key} for prefix, key in zip(prefixes, json_keys, strict=True)}
    if part is not None and (finished := finished_part(facts_of, overwrite)):
        logger.info("%s: this part was finished before", part.prefix(output_prefix))
        return finished
    encoder = Encoder(tokenizer, reader, append_eod)
    written = _write(
        pieces, prefixes, output_prefix, encoder, num_workers, on_error, progress, is_part=part is not None
    )
    if reader.media_tokens:
        facts = _media_facts(encoder, output_prefix)
        facts_of = {prefix: of_key | facts for prefix, of_key in facts_of.items()}
    metas = {}
    for prefix, (inputs, digest) in written.items():
        metas[prefix] = make_meta(facts_of[prefix], inputs, str(encoder.dtype), digest)
        write_meta(prefix, metas[prefix])
    return metas


def _write(
    pieces: Sequence[Piece],
    prefixes: Sequence[str],
    output_prefix: str,
    encoder: Encoder,
    num_workers: int,
    on_error: str,
    progress: Callable[[int], None] | None,
    *,
    is_part: bool,
) -> dict[str, tuple[list[dict], str]]:
    """Writes the datasets, one per key of the reader -> {prefix: (what meta.json says of each input, digest)}."""
    reader = encoder.reader
    counts = [[collections.Counter() for _ in pieces] for _ in prefixes]
    digests: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype)) for prefix in prefixes]
        image_writers = [stack.enter_context(ImageTableWriter(output_prefix))] if reader.media_tokens else []
        batches = read_pieces(pieces, reader, digests)
        results = stack.enter_context(contextlib.closing(encode_in_order(batches, encoder, num_workers)))
        for batch, encoded in results:
            for of_file in encoded:
                _report(of_file.skipped, on_error)
                for writer, count, block in zip(writers, counts, of_file.blocks, strict=True):
                    writer.add_tokens(block.tokens)
                    writer.add_index(block.lengths, block.sequences)
                    count[of_file.file].update(_count(block), num_skipped=len(of_file.skipped))
                for writer in image_writers:
                    writer.add(of_file.images)
                if of_file.sha256:
                    digests[of_file.file] = of_file.sha256
            if progress is not None:
                progress(batch.num_bytes)
        if not is_part:
            for key, count in zip(reader.json_keys, counts, strict=True):
                _refuse_empty(pieces, key if len(prefixes) > 1 else None, sum(count, collections.Counter()))
    for prefix in prefixes:
        if not reader.media_tokens and os.path.exists(image_table_path(prefix)):
            os.remove(image_table_path(prefix))  # of the dataset that this one replaces
    return {
        prefix: (_inputs(pieces, digests, count), writer.digest.hexdigest())
        for prefix, writer, count in zip(prefixes, writers, counts, strict=True)
    }


def _media_facts(encoder: Encoder, prefix: str) -> dict[str, Any]:
    table = ImageTable(prefix)
    facts: dict[str, Any] = {"num_images": len(table), "images_sha256": table.fingerprint()}
    for kind, token in encoder.reader.media_tokens.items():
        facts |= {kind.token: token, f"{kind.name}_id": encoder.media_ids[kind]}
    return facts


def _inputs(pieces: Sequence[Piece], digests: dict[int, str], counts: Sequence[collections.Counter]) -> list[dict]:
    """What meta.json says of each input file, or piece of it: `begin` if it is not its beginning."""
    inputs = []
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        file = {"path": piece.path, "sha256": digests.get(number)} | {name: count[name] for name in COUNTS}
        inputs.append(file | ({"begin": piece.begin} if piece.begin else {}))
    return inputs


def _record_forms(files: Sequence[str], reader: Reader) -> dict[str, str]:
    """Path -> the form of the first conversation in the file; logged."""
    found = {}
    for path in files:
        with contextlib.closing(read_batches([path], reader, {})) as batches:
            first = next(batches, None)
            name = reader.first_form(first.records or ()) if first else None
        if name:
            found[path] = name
    for form in sorted(set(found.values())):
        paths = [path for path, name in found.items() if name == form]
        logger.info("conversations in the form %s: %s", form, shortened(paths))
    return found


def output_prefixes(output_prefix: str, json_keys: Sequence[str]) -> list[str]:
    """Prefixes of the datasets that `preprocess` writes: one, or one per key."""
    return [output_prefix] if len(json_keys) == 1 else [f"{output_prefix}_{key}" for key in json_keys]


def refuse_to_overwrite(prefix: str) -> None:
    """Raises ValueError if a dataset with this prefix exists."""
    existing = next((path for path in (f"{prefix}.bin", f"{prefix}.idx") if os.path.exists(path)), None)
    if existing is None:
        return
    meta = read_meta(prefix)
    what = f" (tokenizer {meta['tokenizer']}, documents {meta['num_documents']:,})" if meta else ""
    raise ValueError(
        f"--output_prefix={prefix}: {existing} exists{what}; use another prefix, or --overwrite to replace it"
    )


def _refuse_empty(pieces: Sequence[Piece], key: str | None, count: collections.Counter) -> None:
    """Raises ValueError if the files have given no token."""
    if count["num_tokens"]:
        return
    files = [piece.path for piece in pieces]
    of_key = f" in the field {key!r}" if key else ""
    raise ValueError(
        f"no text{of_key} in {shortened(files)} (documents skipped: {count['num_skipped']}): there is nothing to "
        "write; name other files"
    )


def _count(block: Block) -> dict[str, int]:
    return {
        "num_documents": len(block.sequences),
        "num_sequences": len(block.lengths),
        "num_tokens": len(block.tokens),
        "num_bytes": block.num_text_bytes,
    }


def _report(skipped: list[str], on_error: str) -> None:
    for message in skipped:
        if on_error == "raise":
            raise ValueError(f"{message}; repair it, or leave it out with preprocess --on_error=skip")
        logger.warning("skipped: %s", message)
