"""Labelled texts, pairs and words: what is read, what a sample holds, and what is refused."""

import json

import numpy as np
import pytest

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.data.labelled import labelled_datasets
from megajax.data.samples.classification import ClassificationDataset, joined, read_labelled
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.masking_tokens import MaskingTokens, masking_tokens
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.overrides import override
from megajax.tasks.classification import Classification
from megajax.tasks.conversations import Conversations
from megajax.tasks.masked import Masked

BYTES = load_tokenizer("bytes")
SPECIAL = masking_tokens(BYTES)
CLS, SEP, _, PAD, _ = SPECIAL


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def dataset_of(files, length=8):
    examples = [example for file in files for example in file.examples]
    return ClassificationDataset(examples, len(examples), length, 0, SPECIAL)


def test_ids_beyond_the_tokenizer_stand_for_special_tokens_that_it_lacks():
    assert MaskingTokens(257, 258, 259, 260, 261) == SPECIAL
    assert masking_tokens(load_tokenizer("null:10")) == MaskingTokens(10, 11, 12, 13, 14)


def test_texts_and_pairs_from_both_kinds_of_file(tmp_path):
    lines = write(
        tmp_path / "a.jsonl", [{"text": "ab", "label": "no"}, {"text": "c", "text_pair": "d", "label": "yes"}]
    )
    (tmp_path / "b.csv").write_text('text,text_pair,label\n"x, y",,no\n')
    files, labels = read_labelled([lines, str(tmp_path / "b.csv")], BYTES)
    assert labels == (("no", "yes"), False)
    assert [file.num_tokens for file in files] == [4, 4]
    found = {tuple(sample["tokens"].tolist()): sample for sample in map(dataset_of(files).__getitem__, range(3))}
    sample = found[CLS, ord("c"), SEP, ord("d"), SEP, PAD, PAD, PAD]
    np.testing.assert_array_equal(sample["token_types"], [0, 0, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(sample["segment_ids"], [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(sample["labels"], [1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(sample["loss_mask"], [1, 0, 0, 0, 0, 0, 0, 0])


def test_the_first_token_of_a_word_has_its_label(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"words": ["ab", "c", "long"], "labels": [10, 2, 10]}])
    files, labels = read_labelled([path], BYTES)
    assert labels == (("2", "10"), True)  # in the order of the numbers
    sample = dataset_of(files, length=7)[0]
    np.testing.assert_array_equal(sample["tokens"], [CLS, *b"ab c ", SEP])
    np.testing.assert_array_equal(sample["labels"], [0, 1, 0, 0, 0, 1, 0])
    np.testing.assert_array_equal(sample["loss_mask"], [0, 1, 0, 1, 0, 1, 0])


def test_the_longer_text_is_shortened_first():
    tokens, types = joined(([1] * 9, [2] * 3), SPECIAL, 10)
    np.testing.assert_array_equal(tokens, [CLS, 1, 1, 1, 1, SEP, 2, 2, 2, SEP])
    np.testing.assert_array_equal(types, [0] * 6 + [1] * 4)


@pytest.mark.parametrize("record, message", [
    ({"label": 1}, "line 2: no text"),
    ({"text": "a"}, "line 2: label=None"),
    ({"text": "a", "label": 1.5}, "line 2: label=1.5"),
    ({"words": ["a"], "labels": [1, 2]}, "line 2: words and labels"),
    ({"words": ["a"], "labels": [1]}, "line 2: labels of texts and labels of words"),
    ({"text": "b", "label": "x"}, "at least 2 classes"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(record, message, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}, record])
    with pytest.raises(ValueError, match=message):
        read_labelled([path], BYTES)


def test_training_and_evaluation_examples_are_drawn_from_all_labels(tmp_path):
    """Files often go by label, so the last examples would all have the same one."""
    path = write(tmp_path / "a.jsonl", [{"text": str(i), "label": i // 50} for i in range(100)])
    config = DataConfig(source="text", text=(path,), tokenizer="bytes", split=(8, 2, 0))
    amounts = Amounts(sequence_length=8, seed=0, num_train_samples=160, num_eval_samples=20)
    found, labels = labelled_datasets(config, amounts)
    assert labels.classes == tuple(map(str, range(2)))
    assert (len(found.train), len(found.eval)) == (160, 20)
    texts = [{tuple(data[i]["tokens"]) for i in range(len(data))} for data in (found.train, found.eval)]
    assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 100
    assert {int(found.eval[i]["labels"][0]) for i in range(20)} == {0, 1}
    assert labelled_datasets(config, amounts)[0].record == found.record


@pytest.mark.parametrize("task, model, message", [
    (Classification(), BertConfig(head="token_classification"), "task.kind=classification needs data.source=text"),
    (Conversations(), DecoderConfig(), "conversations needs data.source=indexed or drawn or mock, not text"),
    (Masked(sentences="nsp"), BertConfig(), "use --task.sentences=none"),
])  # fmt: skip
def test_tasks_refuse_sources_that_they_do_not_read(task, model, message):
    source = "text" if isinstance(task, Conversations) else "mock"
    with pytest.raises(ValueError, match=message):
        task.check(DataConfig(source=source), model)


def test_a_model_makes_room_for_the_special_tokens():
    import configs

    config = override(configs.recipe("bert_base"), ["--data.tokenizer=bytes", "--model.vocab_size=100"])
    assert config.task.num_token_ids(config.data, 100) == 261
    assert configs.recipe("bert_base").data_with_tokenizer().tokenizer == "null:30518"
