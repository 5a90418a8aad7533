"""A small corpus of real text for laptops: text files on this machine, tokenized once and cached.

`data.text=("stdlib",)` is the source code of Python's own standard library: about 11 MB of real text that every
machine has. About 5 % of the bytes (whole files, chosen by a hash of their names) are held out for evaluation.
"""

import glob
import hashlib
import itertools
import json
import logging
import os
import sysconfig
from typing import Literal, NamedTuple

from megajax.data.config import DataConfig
from megajax.data.prepare.documents import Reader
from megajax.data.prepare.read_input import as_pattern
from megajax.data.prepare.train_tokenizer import train_tokenizer
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.temporary import build_once
from megajax.data.tokenizers.load import FILE_TOKENIZERS, load_tokenizer
from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")
HELD_OUT_FRACTION = 0.05
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
# Increase when the same files would give other tokens.
FORMAT = 1


class TextForm(NamedTuple):
    """What a tokenized text file, or dataset of Hugging Face, consists of."""

    sequences: Literal["documents", "sentences", "conversations"] = "documents"
    appends_end: bool = True
    """Whether an end-of-document token follows each document."""


CONVERSATIONS = TextForm("conversations")


def prepare_text(config: DataConfig, form: TextForm) -> tuple[str, str, str]:
    """(prefix of the training data, prefix of the held-out data, tokenizer spec), built on the first call.

    Cached in `data.cache_dir/text-HASH/`; the hash covers names, sizes and times of the files and the tokenizer.
    Built in a temporary folder and renamed; a second process on the machine waits for the first. Raises ValueError
    if no file is found or one is not UTF-8.
    """
    files = find_files(config.text)
    folder = os.path.join(config.cache_dir, "text-" + _key(config, form, files))
    build_once(folder, lambda temporary: _build(files, config, form, folder, temporary), "the same text")
    spec = config.tokenizer
    if spec.startswith("sentencepiece:"):
        spec = os.path.join(folder, "tokenizer.model")
    return os.path.join(folder, "train"), os.path.join(folder, "eval"), spec


def find_files(entries: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, path) of every file that is not empty, in a fixed order. Names decide which files are held out, so they
    are relative."""
    files = []
    for entry in entries:
        pattern = as_pattern(entry)
        root = sysconfig.get_path("stdlib") if entry == "stdlib" else _fixed_folder(pattern)
        found = _standard_library(root) if entry == "stdlib" else glob.glob(pattern, recursive=True)
        found = [path for path in found if os.path.isfile(path) and os.path.getsize(path)]
        found = sorted((os.path.relpath(path, root), path) for path in found)
        if not found:
            raise ValueError(
                f"data.text: no file with text matches {entry}; use stdlib, a folder or a pattern such as "
                "'docs/**/*.txt'"
            )
        files += found
    return files


def _standard_library(root: str) -> list[str]:
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return paths


def _fixed_folder(pattern: str) -> str:
    """The part of a pattern before the first folder with a wildcard."""
    parts = itertools.takewhile(lambda part: not glob.has_magic(part), os.path.dirname(pattern).split(os.sep))
    return os.sep.join(parts) or (os.sep if os.path.isabs(pattern) else ".")


def _key(config: DataConfig, form: TextForm, files: list[tuple[str, str]]) -> str:
    stats = [(name, os.stat(path)) for name, path in files]
    facts = [FORMAT, config.text, config.tokenizer, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
    facts += [] if form.appends_end else [form.sequences, "no end of documents"]
    if config.tokenizer.endswith(tuple(FILE_TOKENIZERS)):
        facts.append(load_tokenizer(config.tokenizer).identity)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _held_out(files: list[tuple[str, str]]) -> set[str]:
    """Paths of the held-out files: in the order of the hashes of their names, up to HELD_OUT_FRACTION of the bytes."""
    budget = HELD_OUT_FRACTION * sum(os.path.getsize(path) for _, path in files)
    chosen = set()
    size = 0
    for _, path in sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest()):
        # skip a large file that would far exceed the budget
        if size + os.path.getsize(path) <= 1.2 * budget:
            chosen.add(path)
            size += os.path.getsize(path)
        if size >= budget:
            break
    return chosen or {min(files, key=lambda file: (os.path.getsize(file[1]), file[0]))[1]}


def _build(files: list[tuple[str, str]], config: DataConfig, form: TextForm, folder: str, temporary: str) -> None:
    if len(files) < 2:
        raise ValueError(
            f"data.text: {files[0][1]} alone cannot be split into training and evaluation text; name at least two files"
        )
    chosen = _held_out(files)
    held_out = [path for _, path in files if path in chosen]
    training = [path for _, path in files if path not in chosen]
    logger.info("preparing %d text files in %s (once)", len(files), folder)
    spec = config.tokenizer
    if spec.startswith("sentencepiece:"):
        with announced(f"training the tokenizer {spec}"):
            spec = train_tokenizer(training, spec, os.path.join(temporary, "tokenizer"), Reader(), "skip")
    tokenizer = load_tokenizer(spec)
    for part, paths in (("train", training), ("eval", held_out)):
        prefix = os.path.join(temporary, part)
        workers = num_workers(paths)
        # A broad pattern also matches files that are not text: they are logged and skipped.
        with announced(f"tokenizing {len(paths):,} text files"):
            preprocess(
                paths, prefix, tokenizer, os.path.basename(spec), form=form.sequences,
                append_eod=form.appends_end, num_workers=workers, on_error="skip",
            )  # fmt: skip


def num_workers(paths: list[str]) -> int:
    """Starting a process costs about as much as tokenizing 5 MB, a second."""
    size = sum(os.path.getsize(path) for path in paths)
    return min(os.cpu_count() or 1, 1 + size // 20_000_000)
