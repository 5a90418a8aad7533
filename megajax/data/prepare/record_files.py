"""Files of conversations and datasets of Hugging Face in data.paths, tokenized once and cached."""

import hashlib
import json
import logging
import os

from megajax.data.blend_file import RECORD_SUFFIXES, is_dataset
from megajax.data.config import DataConfig
from megajax.data.prepare.documents import MESSAGES
from megajax.data.prepare.hugging_face_rows import rows_of
from megajax.data.prepare.read_input import expand
from megajax.data.prepare.text_corpus import CONVERSATIONS, TextForm, num_workers
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.temporary import build_once
from megajax.data.tokenizers.chat_template import find_chat_template, load_chat_template
from megajax.data.tokenizers.load import load_tokenizer
from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")
# Increase when the same files would give other tokens.
FORMAT = 1


def prepare_records(path: str, config: DataConfig, form: TextForm = CONVERSATIONS) -> str:
    """Prefix of the dataset that `preprocess` makes of a file, a folder or a pattern of conversations, or of a dataset
    of Hugging Face, with the tokenizer of the config and, for conversations, its chat template; built on the first
    call.

    Cached in `data.cache_dir/conversations-HASH/` or `documents-HASH/`; the hash covers names, sizes and times of the
    files or the commit on the hub, tokenizer, form and template. Raises ValueError, with file and line, for what cannot
    be read in this form.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    facts: list = [FORMAT, tokenizer.identity]
    template = None
    if form == CONVERSATIONS:
        template = load_chat_template(tokenizer)
        facts.append(template.identity)
    if is_dataset(path):
        files = [path]
        rows = rows_of(path)
        facts += [form, rows, rows.version]
        workers = num_workers(rows.files) if rows.is_local else os.cpu_count() or 1
    else:
        files = expand([path], RECORD_SUFFIXES, "data.paths")
        stats = [(file, os.stat(file)) for file in files]
        facts += [(os.path.relpath(file, path), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
        workers = num_workers(files)
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = os.path.join(config.cache_dir, f"{form.sequences}-{key}")

    def build(temporary: str) -> None:
        logger.info("preparing the %s of %s in %s (once)", form.sequences, path, folder)
        if template is not None and find_chat_template(tokenizer) is None:
            logger.info("the tokenizer %s has no chat template: conversations are written as ChatML", config.tokenizer)
        with announced(f"tokenizing {path}"):
            preprocess(
                files, os.path.join(temporary, "tokens"), tokenizer, config.tokenizer,
                json_keys=("text",) if template is None else (MESSAGES,), form=form.sequences, template=template,
                append_eod=form.appends_end and (template is None or tokenizer.eod_id is not None),
                num_workers=workers,
            )  # fmt: skip

    build_once(folder, build, f"the same {form.sequences}")
    return os.path.join(folder, "tokens")
