"""The text corpus: held-out files, one build, a fast second call."""

import multiprocessing
import time

import numpy as np
import pytest

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.prepare.text_corpus import TextForm, find_files, prepare_text
from megajax.data.tokenizers.load import load_tokenizer
from megajax.models.decoder import DecoderConfig
from megajax.tasks.language import Language


@pytest.fixture
def config(tmp_path) -> DataConfig:
    rng = np.random.default_rng(0)
    for i in range(60):
        folder = tmp_path / "text" / f"f{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"document {i}\n" + "word " * int(rng.integers(100, 400)))
    pattern = str(tmp_path / "text" / "**" / "*.txt")
    return DataConfig(source="text", text=(pattern,), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))


def _documents(prefix: str) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer("bytes")
    return [tokenizer.decode(dataset.read(i).tolist()) for i in range(len(dataset))]


def test_every_file_is_either_training_or_held_out(config, tmp_path):
    train, held_out, spec = prepare_text(config, TextForm())
    assert spec == "bytes"
    want = sorted(path.read_text() for path in (tmp_path / "text").rglob("*.txt"))
    train, held_out = _documents(train), _documents(held_out)
    assert sorted(train + held_out) == want
    share = sum(map(len, held_out)) / sum(map(len, want))
    assert 0.03 < share < 0.08  # 5 %, in whole files of about 1.7 % each


def test_the_second_call_only_looks(config):
    first = prepare_text(config, TextForm())
    start = time.process_time()
    assert prepare_text(config, TextForm()) == first
    assert time.process_time() - start < 0.2  # takes about 1 ms; the rest is a busy machine


def test_a_changed_file_is_prepared_again(config, tmp_path):
    first = prepare_text(config, TextForm())
    (tmp_path / "text" / "f0" / "0.txt").write_text("changed")
    assert prepare_text(config, TextForm())[0] != first[0]


def test_processes_that_prepare_at_once_agree(config, tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.starmap(prepare_text, [(config, TextForm())] * 3)
    assert len(set(results)) == 1
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_folder_is_the_pattern_of_all_its_files(config, tmp_path):
    folder = str(tmp_path / "text")
    (tmp_path / "text" / "empty.txt").touch()  # as held-out text it would be no use
    assert len(find_files((folder,))) == 60
    assert find_files((folder,)) == find_files((f"{folder}/**/*",)) == find_files((f"{folder}/",))


def test_texts_that_cannot_be_used_are_refused(config, tmp_path):
    with pytest.raises(ValueError, match="data.text: no file with text matches"):
        prepare_text(DataConfig(source="text", text=("/nowhere/*.txt",), tokenizer="bytes"), TextForm())
    with pytest.raises(ValueError, match="at least two files"):
        one = (str(tmp_path / "text" / "f0" / "0.txt"),)
        prepare_text(DataConfig(source="text", text=one, tokenizer="bytes", cache_dir=str(tmp_path / "c")), TextForm())


def test_the_standard_library_becomes_training_data_with_its_own_tokenizer(tmp_path):
    config = DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:2048", cache_dir=str(tmp_path))
    start = time.perf_counter()
    datasets = Language().datasets(
        config, DecoderConfig(), Amounts(256, 1, num_train_samples=1000, num_eval_samples=10)
    )
    assert time.perf_counter() - start < 25  # about 3 s on an idle core
    assert datasets.tokenizer.vocab_size == 2048
    assert datasets.train_tokens_per_epoch > 2_000_000
    assert 2 < datasets.eval_bytes_per_token < 4
    text = datasets.tokenizer.decode(datasets.train[0]["tokens"])
    assert datasets.tokenizer.decode(datasets.tokenizer.encode(text)) == text
