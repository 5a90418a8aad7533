"""Files of conversations in data.paths, tokenized once and cached."""

import hashlib
import json
import logging
import os

from megajax.data.blend_file import RECORD_SUFFIXES
from megajax.data.config import DataConfig
from megajax.data.prepare.documents import MESSAGES
from megajax.data.prepare.read_input import expand
from megajax.data.prepare.text_corpus import num_workers
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.temporary import build_once
from megajax.data.tokenizers.chat_template import find_chat_template, load_chat_template
from megajax.data.tokenizers.load import load_tokenizer
from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")
# Increase when the same files would give other tokens.
FORMAT = 1


def prepare_conversations(path: str, config: DataConfig) -> str:
    """Prefix of the dataset that `preprocess --conversations` makes of a file, a folder or a pattern, with the
    tokenizer of the config and its chat template; built on the first call.

    Cached in `data.cache_dir/conversations-HASH/`; the hash covers names, sizes and times of the files, tokenizer and
    template. Raises ValueError, with file and line, for what is no conversation.
    """
    files = expand([path], RECORD_SUFFIXES, "data.paths")
    tokenizer = load_tokenizer(config.tokenizer)
    template = load_chat_template(tokenizer)
    stats = [(file, os.stat(file)) for file in files]
    facts = [FORMAT, tokenizer.identity, template.identity]
    facts += [(os.path.relpath(file, path), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = os.path.join(config.cache_dir, f"conversations-{key}")

    def build(temporary: str) -> None:
        logger.info("preparing the conversations of %s in %s (once)", path, folder)
        if find_chat_template(tokenizer) is None:
            logger.info("the tokenizer %s has no chat template: conversations are written as ChatML", config.tokenizer)
        with announced(f"tokenizing {path}"):
            preprocess(
                files, os.path.join(temporary, "tokens"), tokenizer, config.tokenizer, json_keys=(MESSAGES,),
                form="conversations", template=template, append_eod=tokenizer.eod_id is not None,
                num_workers=num_workers(files),
            )  # fmt: skip

    build_once(folder, build, "the same conversations")
    return os.path.join(folder, "tokens")
