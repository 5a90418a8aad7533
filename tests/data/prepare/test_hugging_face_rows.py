"""Datasets of Hugging Face in folders; those of the hub are in tests/weights/hugging_face/test_hub.py."""

import datasets
import pytest

from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.prepare.hugging_face_rows import rows_of
from megajax.data.prepare.record_files import prepare_records
from megajax.data.prepare.text_corpus import CONVERSATIONS, TextForm
from megajax.overrides import override

TEXTS = [f"text {i}" for i in range(600)]
CHATS = [[dict(role="user", content=f"{i}?"), dict(role="assistant", content=f"{i}!")] for i in range(3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same texts as four kinds of folders, and conversations."""
    folder = tmp_path_factory.mktemp("rows")
    texts = datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS})
    texts.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": texts, "test": texts.select([5])}).save_to_disk(folder / "saved_parts")
    texts.to_parquet(folder / "parquet" / "train-00000-of-00001.parquet")
    texts.select([5]).to_parquet(folder / "parquet" / "test-00000-of-00001.parquet")
    texts.to_csv(folder / "csv" / "train.csv")
    datasets.Dataset.from_dict({"messages": CHATS, "text": TEXTS[:3]}).save_to_disk(folder / "chats")
    return folder


def written(path: str, tmp_path, form: TextForm = TextForm()) -> list[str]:
    config = DataConfig("indexed", (path,), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    config.check()
    dataset = IndexedDataset(prepare_records(path, config, form))
    return [bytes(token for token in dataset.read(i) if token < 256).decode() for i in range(len(dataset))]


@pytest.mark.parametrize("name", ["saved", "saved_parts", "parquet", "csv"])
def test_all_kinds_of_folders_give_the_rows_in_order(name, folders, tmp_path):
    assert written(f"hugging_face:{folders / name}", tmp_path) == TEXTS


def test_a_split_and_its_first_rows(folders, tmp_path):
    assert written(f"hugging_face:{folders / 'parquet'}:default:test", tmp_path) == TEXTS[5:6]
    assert written(f"hugging_face:{folders / 'saved_parts'}::test", tmp_path) == TEXTS[5:6]
    assert written(f"hugging_face:{folders / 'parquet'}::train[:300]", tmp_path) == TEXTS[:300]


def test_the_columns_choose_the_task_and_the_task_the_columns(folders, tmp_path):
    path = f"hugging_face:{folders / 'chats'}"
    assert override(Config(), {"data.paths": path, "data.tokenizer": "bytes"}).task.kind == "conversations"
    texts = f"hugging_face:{folders / 'saved'}"
    assert override(Config(), {"data.paths": texts, "data.tokenizer": "bytes"}).task.kind == "language"
    assert written(path, tmp_path) == TEXTS[:3]
    assert "".join(written(path, tmp_path, CONVERSATIONS)).count("assistant") == 3


def test_what_cannot_be_read_is_one_line(folders, tmp_path):
    parquet = f"hugging_face:{folders / 'parquet'}"
    for path, form, message in (
        (f"{parquet}::dev", TextForm(), r"Bad split: dev. Available splits: \['train', 'test'\]"),
        (f"hugging_face:{folders / 'saved'}::test", TextForm(), r"Bad split: test. Available splits: \['train'\]"),
        (f"{parquet}:small", TextForm(), "BuilderConfig 'small' not found"),
        (f"{parquet}::train[:x]", TextForm(), r"the split 'train\[:x\]' is no name"),
        (f"hugging_face:{folders / 'saved'}", CONVERSATIONS, "no conversation: it has the fields 'id', 'text'"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            written(path, tmp_path, form)
        assert "\n" not in str(error.value) and str(folders) in str(error.value)
    with pytest.raises(ValueError, match="data.tokenizer is empty, and hugging_face:.* is not tokenized yet"):
        DataConfig("indexed", (parquet,)).with_tokenizer(300)


def test_a_name_is_read_as_a_name_a_revision_a_configuration_and_a_split():
    assert rows_of("hugging_face:org/name") == ("org/name", None, "train", None)
    assert rows_of("hugging_face:org/name@v1:part:test[:50]") == ("org/name@v1", "part", "test", 50)
