"""Datasets of labelled texts, which are read from .jsonl and .csv files instead of sources of tokens."""

import numpy as np

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts, Datasets, Source
from megajax.data.prepare.text_corpus import find_files
from megajax.data.samples.classification import ClassificationDataset, Labels, read_labelled
from megajax.data.samples.gpt import split_ranges
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.masking_tokens import masking_tokens
from megajax.terminal.announce import announced


def labelled_datasets(config: DataConfig, amounts: Amounts) -> tuple[Datasets, Labels]:
    """As build_datasets (data/datasets.py), of the labelled texts in data.text; and their classes.

    Which examples are held out depends on data.split only, not on their order, which often goes by label.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    special = masking_tokens(tokenizer)
    with announced("reading labelled texts"):
        files, labels = read_labelled([path for _, path in find_files(config.text)], tokenizer)
    examples = [example for file in files for example in file.examples]
    order = np.random.default_rng(0).permutation(len(examples))

    def part(which: int, num_samples: int) -> ClassificationDataset:
        begin, end = split_ranges(config.split, len(examples))[which] or (0, 0)
        if begin == end:
            raise ValueError(
                f"data.split={config.split} leaves no {('training', 'evaluation')[which]} examples of the "
                f"{len(examples)} in data.text; give it a larger share"
            )
        chosen = [examples[i] for i in order[begin:end]]
        return ClassificationDataset(chosen, num_samples, amounts.sequence_length, amounts.seed, special)

    train = part(0, amounts.num_train_samples)
    record = {
        "tokenizer": tokenizer.identity,
        "sequence_length": amounts.sequence_length,
        "seed": amounts.seed,
        "format": {"kind": "classification", "classes": list(labels.classes), "of_words": labels.of_words},
        "files": [
            {
                "prefix": file.path,
                "sequences": len(file.examples),
                "tokens": file.num_tokens,
                "sha256": file.sha256,
                "fingerprint": file.sha256,
                "holds_out_last": False,
            }
            for file in files
        ],
        "split": list(config.split),
        "weights": [],
        "changes": [],
        "num_samples": amounts.num_train_samples,
    }
    num_samples = amounts.num_train_samples
    source = Source("data.text", train.tokens_per_epoch, num_samples, len(train.examples))
    datasets = Datasets(
        train=train,
        eval=part(1, amounts.num_eval_samples) if amounts.num_eval_samples else None,
        tokenizer=tokenizer,
        train_tokens_per_epoch=train.tokens_per_epoch,
        eval_bytes_per_token=None,
        sources=(source,),
        record=record,
        is_mock=False,
        num_token_ids=special.vocab_size,
    )
    return datasets, labels
