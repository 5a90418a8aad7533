"""Tokenizers by their spec, and in the directories of runs.

`load_tokenizer(spec)` understands: `bytes`, or with special tokens `bytes:<image>,<end>`; `null:VOCAB`; `PATH.model`
(SentencePiece); `PATH/tokenizer.json`; `PATH.tiktoken`; `PATH/vocab.json` (GPT-2, with merges.txt next to it); a folder
with one of IN_FOLDER; `hugging_face:ORG/NAME` on the hub.
"""

import os
import shutil

from megajax import hub
from megajax.data.tokenizers.libraries import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    tokenizer_json,
)
from megajax.data.tokenizers.tokenizer import VOCABULARY, BytesTokenizer, NullTokenizer, Tokenizer, beside

# Files next to the tokenizer file that are copied with it: special tokens, chat template, generation settings.
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
IN_FOLDER = "tokenizer.json", "tokenizer.model"  # what a folder is read by
FILE_TOKENIZERS = {".model": SentencePieceTokenizer, ".json": HuggingFaceTokenizer, ".tiktoken": TiktokenTokenizer}


def tokenizer_file(spec: str) -> str:
    """The spec; of a folder, such as one of Hugging Face or a run, or of a name of the hub, that of the file in
    it. Raises ValueError for a folder without one."""
    spec = hub.local(spec, hub.TOKENIZER_FILES)
    if spec == "bytes" or not os.path.isdir(spec):
        return spec
    found = [path for name in IN_FOLDER if os.path.isfile(path := os.path.join(spec, name))]
    if not found:
        raise ValueError(f"data.tokenizer={spec}: the folder has neither {' nor '.join(IN_FOLDER)}; name a file")
    return found[0]


def check_tokenizer_spec(spec: str) -> None:
    """Raises ValueError if `load_tokenizer` cannot understand the text; opens no file."""
    spec = tokenizer_file(spec)
    name, _, size = spec.partition(":")
    if name in ("null", "sentencepiece") and not size.isdecimal():
        raise ValueError(f"data.tokenizer={spec}: write {name}:VOCAB, for example {name}:2048")
    if name not in ("bytes", "null", "sentencepiece") and not spec.endswith(tuple(FILE_TOKENIZERS)):
        raise ValueError(
            f"data.tokenizer={spec} is not known; use bytes, null:VOCAB, sentencepiece:VOCAB (with data.text), "
            "PATH.model, PATH/tokenizer.json, PATH.tiktoken or a folder with one of them"
        )


def load_tokenizer(spec: str, folder: str = ".") -> Tokenizer:
    """The tokenizer of a spec; paths are relative to `folder`. Raises ValueError if it is unknown or missing."""
    check_tokenizer_spec(spec)
    spec = tokenizer_file(spec)
    if spec.partition(":")[0] == "bytes":
        return BytesTokenizer(tuple(filter(None, spec.partition(":")[2].split(","))))
    if spec.startswith("null:"):
        return NullTokenizer(int(spec.removeprefix("null:")))
    if spec.startswith("sentencepiece:"):
        raise ValueError(
            f"data.tokenizer={spec} is trained on data.text and exists with data.source=text only; use PATH.model"
        )
    path = os.path.join(folder, spec)
    if not os.path.isfile(path):
        raise ValueError(f"data.tokenizer={spec}: file {path} does not exist")
    return FILE_TOKENIZERS[os.path.splitext(spec)[1]](path)


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike) -> None:
    """Copies the file of a tokenizer, if it has one, to folder/tokenizer.model, .json or .tiktoken, with
    BESIDE_TOKENIZER, so that a run is self-contained."""
    path = tokenizer.path
    if path is None:
        return
    suffix = os.path.splitext(path)[1]
    copies = {"tokenizer" + suffix: path, f"tokenizer{suffix}.json": path + ".json"}
    copies |= {name: beside(path, name) for name in BESIDE_TOKENIZER}
    for name, source in copies.items():
        target = os.path.join(folder, name)
        if os.path.basename(source) == VOCABULARY:
            with open(target, "wb") as file:
                file.write(tokenizer_json(source))
        elif os.path.exists(source) and not os.path.exists(target):
            shutil.copyfile(source, target)


def load_saved_tokenizer(folder: str | os.PathLike, spec: str) -> Tokenizer:
    """The tokenizer saved in `folder` by save_tokenizer, or that of `spec` if it needs no file."""
    for suffix in FILE_TOKENIZERS:
        if os.path.exists(os.path.join(folder, "tokenizer" + suffix)):
            return load_tokenizer(os.path.join(folder, "tokenizer" + suffix))
    return load_tokenizer(spec)
