"""Speed of preprocessing: python -m benchmarks.data.preprocess [--megabytes=8] [--vocab=8192]

MB of text per second of CPU time, so that other work on the machine matters little: `preprocess` with one worker
(reading .jsonl, tokenizing, writing, hashing), next to the tokenizer alone on the same documents. The text is the
source code of Python's standard library.
"""

import glob
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable

from benchmarks.command_line import only, run
from megajax.data.prepare.documents import Reader
from megajax.data.prepare.train_tokenizer import train_tokenizer
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.tokenizers.load import load_tokenizer


def texts(num_bytes: int) -> list[tuple[str, str]]:
    """(path, text) of files of the standard library, about num_bytes."""
    found = []
    size = 0
    root = sysconfig.get_path("stdlib")
    for path in sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True)):
        if {"site-packages", "dist-packages", "test", "tests"} & set(os.path.relpath(path, root).split(os.sep)):
            continue
        with open(path, "rb") as file:
            content = file.read()
        try:
            found.append((path, content.decode()))
        except UnicodeDecodeError:
            continue
        size += len(content)
        if size >= num_bytes:
            break
    return found


def train_tokenizer_json(documents: list[str], folder: str, vocab_size: int) -> str:
    """A byte-level BPE as GPT-2's; returns its path."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(documents, trainer)
    path = os.path.join(folder, "tokenizer.json")
    made.save(path)
    return path


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main(arguments: list[str]) -> None:
    values = only(arguments, {"megabytes": "8", "vocab": "8192"})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    files = texts(int(float(values["megabytes"]) * 1e6))
    documents = [text for _, text in files]
    megabytes = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "text.jsonl")
        with open(source, "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        specs = {
            "bytes": "bytes",
            "SentencePiece": train_tokenizer(
                [path for path, _ in files],
                f"sentencepiece:{values['vocab']}",
                os.path.join(folder, "sample"),
                Reader(),
                "raise",
            ),  # fmt: skip
            "tokenizer.json": train_tokenizer_json(documents, folder, int(values["vocab"])),
        }
        print(f"{megabytes:.1f} MB of text, {len(documents)} documents, {int(values['vocab'])} pieces")
        for name, spec in specs.items():
            tokenizer = load_tokenizer(spec)
            tokenizer.encode(documents[0])
            alone = cpu_seconds(lambda tokenizer=tokenizer: [tokenizer.encode(text) for text in documents])
            prefix = os.path.join(folder, name)
            whole = cpu_seconds(
                lambda tokenizer=tokenizer, spec=spec, prefix=prefix: preprocess([source], prefix, tokenizer, spec)
            )
            print(
                f"{name}: preprocess {megabytes / whole:.1f} MB/s per core, tokenizer alone {megabytes / alone:.1f}, "
                f"{(whole - alone) / megabytes:.3f} s per MB for the rest"
            )


if __name__ == "__main__":
    run(main)
