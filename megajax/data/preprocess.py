"""Text to tokens: python -m megajax.data.preprocess --input FILES --output_prefix P --tokenizer T

Reads .jsonl (one document per line, fields --json_keys), .parquet (one per row, columns --json_keys) and any other file
as one document; .jsonl and text may be .gz or .zst; of a folder, all files at any depth. Writes P.bin and P.idx
(Megatron's indexed dataset) and P.meta.json: tokenizer, counts, sha256 of P.bin and of every input file as stored. With
several keys, each makes a dataset P_KEY. --tokenizer=sentencepiece:VOCAB trains on the input first and keeps the model
as P.tokenizer.model.

--split_sentences: one sequence per sentence (for BERT). --conversations: each document is a conversation (messages,
ShareGPT, Alpaca, or prompt and completion, recognised by their fields) whose sequences alternate between context (no
loss) and answer (loss), starting with a context; sequences may be empty. --append_eod (the default) ends the last
sequence of a document with the tokenizer's end-of-document token, unless the template has written it. With
--image_token or --audio_token, conversations have images or clips of sound, in .jsonl, .json and .tar files, and
P.images says where these are (docs/data.md). An existing dataset is only replaced with --overwrite.

The output does not depend on --workers: batches of documents are encoded in order, at most a few per worker at a time,
so memory is constant. `merge`, `verify` and `inspect` as first argument run these commands instead.

Several machines: --part=3/16 encodes the third of 16 parts of the input (scripts/preprocess.slurm), and `merge` joins
them; --ray=ADDRESS does both on a Ray cluster. Both write what one process writes, byte for byte, and leave finished
parts as they are when they are started again.
"""

import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from megajax.data import inspect
from megajax.data.blend_file import RECORD_SUFFIXES
from megajax.data.indexed.dataset import prefix_of
from megajax.data.prepare.documents import MAX_DOCUMENT_BYTES, Reader
from megajax.data.prepare.merge import merge
from megajax.data.prepare.on_ray import encode_on_ray
from megajax.data.prepare.parts import MAX_PARTS, Part, parse_part
from megajax.data.prepare.read_input import expand
from megajax.data.prepare.train_tokenizer import train_tokenizer
from megajax.data.prepare.write_tokens import output_prefixes, preprocess, refuse_to_overwrite
from megajax.data.tokenizers.chat_template import load_chat_template
from megajax.data.tokenizers.load import load_tokenizer, tokenizer_file
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.fields.ranges import Range
from megajax.media.kinds import KINDS
from megajax.terminal.announce import announced
from megajax.terminal.command_line import errors_in_one_line, parse
from megajax.terminal.progress import progress_bar

PART_BYTES = 1 << 30  # of a part on a Ray cluster
# The files of a folder that are read if there are images beside them.
WITH_IMAGES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".tar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Text to tokens. Other commands: merge, verify, inspect; each has its --help."""

    input: tuple[str, ...]
    """Folders, files or patterns: .jsonl, .parquet or text files."""
    output_prefix: str
    """P of P.bin, P.idx, P.meta.json."""
    tokenizer: str = "bytes"
    """bytes, null:VOCAB, PATH.model, PATH/tokenizer.json, PATH.tiktoken, a folder with one of them, or
    sentencepiece:VOCAB to train one."""
    json_keys: tuple[str, ...] = ()
    """Fields of .jsonl, columns of .parquet; default: text, or those of the form of conversations; several write P_KEY
    each."""
    split_sentences: bool = False
    """One sequence per sentence, for BERT."""
    conversations: bool = False
    """Conversations, for supervised fine-tuning: messages, ShareGPT, Alpaca or prompt and completion, recognised by
    their fields."""
    chat_template: str | None = None
    """Jinja file; default: the tokenizer's, else ChatML."""
    workers: int | None = None
    """Processes; default: all cores, and with --ray one for each part."""
    append_eod: bool = True
    """End every document with the end-of-document token; --no-append_eod: do not."""
    overwrite: bool = False
    """Replace an existing dataset."""
    on_error: Literal["raise", "skip"] = "raise"
    """What to do with unreadable documents."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """Longer lines, text files and images, as stored but unpacked, count as unreadable."""
    image_token: str | None = None
    """Conversations have images, and this special token of the tokenizer stands for each, such as <|image_pad|>."""
    audio_token: str | None = None
    """The same for clips of sound: WAV files of 16 bits at 16 kHz."""
    images: str | None = None
    """Folder of the images and clips that records name; default: the folder of the record's file."""
    part: str | None = None
    """I/N: encode this part of N alone, as P-I-of-N; `merge` joins the parts."""
    ray: str | None = None
    """Encode the parts on this Ray cluster, and join them: auto, HOST:PORT or ray://HOST:PORT."""
    num_parts: Annotated[int, Range(at_least=1, at_most=MAX_PARTS)] | None = None
    """With --ray; default: one for each GiB of input."""

    @property
    def media_tokens(self) -> dict[str, str]:
        tokens = {"image": self.image_token, "audio": self.audio_token}
        return {name: token for name, token in tokens.items() if token is not None}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in ("merge", "verify"):
        from megajax.data.prepare import merge

        return getattr(merge, f"main_{arguments[0]}")(arguments[1:])
    if arguments and arguments[0] == "inspect":
        return inspect.main(arguments[1:])
    with errors_in_one_line():
        flags = parse(Options, arguments, "python -m megajax.data.preprocess")
        try:
            metas = _run(flags)
        except OSError as error:
            sys.exit(f"error: {error}")
    for prefix, meta in metas.items():
        print(
            f"{prefix}: {meta['num_documents']:,} documents{_forms(meta)}, {meta['num_tokens']:,} tokens "
            f"({meta['dtype']}) of the tokenizer {meta['tokenizer']}, {meta['num_bytes']:,} bytes of text, "
            + _num_media(meta)
            + f"{meta['num_skipped']} skipped"
        )


def _forms(meta: dict) -> str:
    return f" in the form {' and '.join(meta['record_forms'])}" if meta["record_forms"] else ""


def _num_media(meta: dict) -> str:
    if "num_images" not in meta:
        return ""
    names = [kind.plural for kind in KINDS if kind.token in meta]
    return f"{meta['num_images']:,} {' and '.join(names)}, "


def _check_media(flags: Options) -> None:
    if flags.images is not None and not flags.media_tokens:
        raise ValueError("--images: name the token that stands for an image, too, such as --image_token='<image>'")
    if not flags.media_tokens:
        return
    name, token = next(iter(flags.media_tokens.items()))
    if not flags.conversations:
        raise ValueError(f"--{name}_token is only used with --conversations")
    if flags.json_keys:
        raise ValueError(
            f"--json_keys is not used with --{name}_token, which reads records of several forms; leave it out"
        )
    if flags.tokenizer.startswith("sentencepiece:"):
        raise ValueError(
            f"--tokenizer={flags.tokenizer} will not have the token --{name}_token={token}; name a tokenizer that has "
            "it"
        )
    if flags.images is not None and not os.path.isdir(flags.images):
        raise ValueError(f"--images={flags.images} is no folder")


def _check_parts(flags: Options) -> None:
    if flags.part and flags.ray:
        raise ValueError("--part is not used with --ray, which encodes all parts; leave one of them out")
    if flags.num_parts and not flags.ray:
        raise ValueError("--num_parts is only used with --ray; --part=I/N says it itself")
    if flags.part and flags.tokenizer.startswith("sentencepiece:"):
        raise ValueError(
            f"--tokenizer={flags.tokenizer} is trained on all input, not on a part; train it on a sample first, and "
            "name its .model"
        )


def _run(flags: Options) -> dict[str, dict]:
    if flags.conversations and flags.split_sentences:
        raise ValueError("--split_sentences is not allowed with --conversations; leave one of them out")
    output_prefix = prefix_of(flags.output_prefix)
    form = "conversations" if flags.conversations else "sentences" if flags.split_sentences else "documents"
    if flags.chat_template and form != "conversations":
        raise ValueError("--chat_template is only used with --conversations")
    _check_media(flags)
    _check_parts(flags)
    part = parse_part(flags.part) if flags.part else None
    json_keys = flags.json_keys or (("messages",) if form == "conversations" else ("text",))
    if not flags.overwrite and part is None:
        for prefix in output_prefixes(output_prefix, json_keys):
            refuse_to_overwrite(prefix)
    suffixes = RECORD_SUFFIXES if flags.conversations else ("",)
    files = expand(flags.input, WITH_IMAGES if flags.media_tokens else suffixes)
    spec = tokenizer_file(flags.tokenizer)
    template = None
    if spec.startswith("sentencepiece:"):
        if form == "conversations":
            template = load_chat_template(BytesTokenizer(), flags.chat_template)
        reader = Reader(json_keys, form, template, flags.max_document_bytes)
        with announced("training the tokenizer"):
            spec = train_tokenizer(files, spec, f"{output_prefix}.tokenizer", reader, flags.on_error)
    tokenizer = load_tokenizer(spec)
    if form == "conversations":
        template = load_chat_template(tokenizer, flags.chat_template, flags.media_tokens)
    encode = functools.partial(
        preprocess,
        files,
        output_prefix,
        tokenizer,
        spec,
        json_keys=json_keys,
        form=form,
        template=template,
        append_eod=flags.append_eod,
        on_error=flags.on_error,
        max_document_bytes=flags.max_document_bytes,
        image_folder=flags.images,
        overwrite=flags.overwrite,
    )
    total = sum(os.path.getsize(path) for path in files)
    with progress_bar("tokens") as advance:
        if flags.ray:
            num_parts = flags.num_parts or min(MAX_PARTS, max(1, -(-total // PART_BYTES)))
            num_workers = flags.workers or 1
            encode = functools.partial(encode, num_workers=num_workers)
            for _ in encode_on_ray(flags.ray, encode, num_parts, num_workers):
                advance(total // num_parts, total)
            return _join(output_prefix, json_keys, num_parts)
        return encode(
            num_workers=(os.cpu_count() or 1) if flags.workers is None else flags.workers,
            part=part,
            progress=lambda done: advance(done, total // (part.count if part else 1)),
        )


def _join(output_prefix: str, json_keys: Sequence[str], num_parts: int) -> dict[str, dict]:
    """Merges the parts, and then removes them."""
    parts = [Part(number, num_parts).prefix(output_prefix) for number in range(1, num_parts + 1)]
    of_keys = list(zip(*(output_prefixes(path, json_keys) for path in parts), strict=True))
    metas = {}
    with announced("merging the parts"):
        for prefix, of_key in zip(output_prefixes(output_prefix, json_keys), of_keys, strict=True):
            metas[prefix] = merge(of_key, prefix) or {}
    for path in itertools.chain(*of_keys):
        for suffix in (".meta.json", ".bin", ".idx"):
            os.remove(path + suffix)
    return metas


if __name__ == "__main__":
    main()
