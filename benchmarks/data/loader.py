"""Tokens/s per core that the loader reads: python -m benchmarks.data.loader [--sequence_length=4096] [--seconds=5]

GPT samples of a synthetic indexed dataset (documents of 500 tokens on average, uint16) in batches of 8, read on demand
by one thread, so that all work is that of one core: with separate documents (segment_ids), as one document, and with
positions restarting. For comparison, an H100 trains on 62.7k tokens/s of gpt_1p3b (README).
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.command_line import only, run
from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.loader import step_batches
from megajax.models.decoder import DecoderConfig
from megajax.tasks.language import Language

NUM_DOCUMENTS = 100_000
MEAN_TOKENS = 500
VOCAB = 50_000
BATCH = 8
MOST_STEPS = 20_000
TASKS = {
    "segment ids": Language(),
    "one document": Language(cross_document_attention=True),
    "segment ids, positions restart": Language(reset_positions=True),
}


def write(prefix: Path) -> None:
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in rng.geometric(1 / MEAN_TOKENS, NUM_DOCUMENTS):
            writer.add_document([rng.integers(0, VOCAB, length).astype(np.uint16)])


def tokens_per_second(config: DataConfig, task: Language, sequence_length: int, seconds: float) -> float:
    amounts = Amounts(sequence_length, seed=0, num_train_samples=BATCH * MOST_STEPS, num_eval_samples=0)
    dataset = task.datasets(config, DecoderConfig(), amounts).train

    def schedule(step: int) -> tuple[int, int, int]:
        """(first sample, number of microbatches, samples)."""
        return step * BATCH, 1, BATCH

    batches = step_batches(dataset, schedule, np.arange, start_step=0, num_steps=MOST_STEPS, config=config)
    for _ in range(20):
        next(batches)
    steps = 0
    start = time.perf_counter()
    for _ in batches:
        steps += 1
        if time.perf_counter() - start > seconds:
            break
    return steps * BATCH * sequence_length / (time.perf_counter() - start)


def main(arguments: list[str]) -> None:
    values = only(arguments, {"sequence_length": "4096", "seconds": "5"})
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "x")
        paths = (str(Path(folder) / "x"),)
        fields = dict(tokenizer=f"null:{VOCAB}", cache_dir=folder)
        config = DataConfig("indexed", paths, split=(1, 0, 0), **fields)
        for name, task in TASKS.items():
            found = tokens_per_second(config, task, int(values["sequence_length"]), float(values["seconds"]))
            print(f"{name:<32} {found / 1e6:.1f} million tokens/s", flush=True)


if __name__ == "__main__":
    run(main)
