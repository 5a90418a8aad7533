"""Batches: one global order, whoever reads it, from whatever step."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megajax.data.indexed_dataset import IndexedDatasetWriter
from megajax.data.loader import DataConfig, build_datasets, check_vocab_size, step_batches
from megajax.data.preprocess import preprocess
from megajax.data.tokenizer import load_tokenizer

DATA = Path(__file__).parents[1] / "oracles" / "data"
STEPS, MICROBATCHES, BATCH = 6, 2, 4


@pytest.fixture
def config(tmp_path) -> DataConfig:
    paths = (str(DATA / "a"), str(DATA / "b"))
    return DataConfig("indexed", paths, (0.7, 0.3), split=(90, 10, 0), tokenizer="null:1000", cache_dir=str(tmp_path))


@pytest.fixture
def dataset(config):
    return build_datasets(config, sequence_length=16, seed=7, num_train_samples=60, num_eval_samples=0).train


def schedule(step):
    return step * MICROBATCHES * BATCH, MICROBATCHES, BATCH


def batches(dataset, config, rows_of, start_step=0, schedule=schedule):
    return list(step_batches(dataset, schedule, rows_of, start_step=start_step, num_steps=STEPS, config=config))


def everything(batch_size):
    return np.arange(batch_size)


def test_batches_hold_consecutive_samples_by_step_microbatch_and_row(dataset, config):
    got = batches(dataset, config, everything)
    assert len(got) == STEPS
    for step, batch in enumerate(got):
        assert {value.shape for value in batch.values()} == {(MICROBATCHES, BATCH, 16)}
        for m in range(MICROBATCHES):
            for b in range(BATCH):
                sample = dataset[step * MICROBATCHES * BATCH + m * BATCH + b]
                for key, value in sample.items():
                    assert batch[key].dtype == value.dtype
                    assert np.array_equal(batch[key][m, b], value)


@pytest.mark.parametrize("num_readers", [1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_number_of_readers_reads_the_same_global_batches(dataset, config, num_readers, interleaved):
    want = batches(dataset, config, everything)
    whole = [{key: np.full_like(value, -1) for key, value in batch.items()} for batch in want]
    for reader in range(num_readers):

        def rows_of(batch_size, reader=reader):
            rows = np.arange(batch_size)
            return rows[reader::num_readers] if interleaved else np.split(rows, num_readers)[reader]

        for step, batch in enumerate(batches(dataset, config, rows_of)):
            for key, value in batch.items():
                whole[step][key][:, rows_of(BATCH)] = value
    for got, batch in zip(whole, want, strict=True):
        for key in batch:
            assert np.array_equal(got[key], batch[key])


@pytest.mark.parametrize("start_step", [1, 4, STEPS])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_resuming_at_a_step_continues_the_same_sequence(dataset, config, start_step, num_threads):
    config = dataclasses.replace(config, num_threads=num_threads)
    want = batches(dataset, config, everything)[start_step:]
    got = batches(dataset, config, everything, start_step)
    assert len(got) == len(want)
    for left, right in zip(got, want, strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in right)


def test_worker_processes_give_the_same_batches_in_order(dataset, config):
    want = batches(dataset, config, everything)
    got = batches(dataset, dataclasses.replace(config, num_workers=2), everything)
    for left, right in zip(got, want, strict=True):
        assert all(np.array_equal(left[key], right[key]) for key in right)


def test_a_batch_that_grows_keeps_the_order_of_samples(dataset, config):
    sizes = [1, 1, 2, 4, 4, 8]

    def ramp(step):
        return sum(sizes[:step]), 1, sizes[step]

    got = np.concatenate([batch["tokens"][0] for batch in batches(dataset, config, everything, schedule=ramp)])
    assert np.array_equal(got, np.stack([dataset[i]["tokens"] for i in range(sum(sizes))]))


def test_a_dataset_too_short_for_the_run_is_refused_before_the_first_step(dataset, config):
    def too_long(step):
        return step * 20, 1, 20

    with pytest.raises(ValueError, match="step 5 needs samples up to 120"):
        step_batches(dataset, too_long, everything, start_step=0, num_steps=STEPS, config=config)


def test_blend_without_weights_goes_by_tokens_and_splits_do_not_overlap(config):
    config = dataclasses.replace(config, weights=())
    data = build_datasets(config, sequence_length=16, seed=7, num_train_samples=300, num_eval_samples=20)
    counts = np.bincount(data.train.dataset_index)
    tokens = [part.tokens_per_epoch for part in data.train.datasets]
    assert data.train_tokens_per_epoch == sum(tokens)
    # sizes are rounded up, once per dataset
    assert np.allclose(counts, 300 * np.array(tokens) / sum(tokens), atol=2)
    for train, held_out in zip(data.train.datasets, data.eval.datasets, strict=True):
        assert not set(train.document_index) & set(held_out.document_index)
    assert len(data.train) >= 300
    assert len(data.eval) >= 20


def test_evaluation_paths_leave_all_of_paths_for_training(config):
    config = dataclasses.replace(config, paths=config.paths[:1], weights=(), eval_paths=(str(DATA / "c"),))
    data = build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=5)
    assert data.train_tokens_per_epoch == 1893
    assert set(data.train.document_index) == set(range(37))
    assert set(data.eval.document_index) == set(range(23))
    assert data.eval_bytes_per_token is None


def test_mock_data_needs_no_files(tmp_path):
    config = DataConfig(cache_dir=str(tmp_path))
    data = build_datasets(config, sequence_length=32, seed=1, num_train_samples=100, num_eval_samples=4)
    assert data.train[0]["tokens"].shape == (32,)
    assert max(data.train[i]["tokens"].max() for i in range(20)) < 50257
    assert not set(data.train.document_index) & set(data.eval.document_index)


@pytest.fixture
def written(tmp_path) -> str:
    (tmp_path / "a.txt").write_text("some text " * 100)
    preprocess([str(tmp_path / "a.txt")] * 50, str(tmp_path / "x"), load_tokenizer("bytes"), "bytes")
    return str(tmp_path / "x")


def test_data_knows_its_tokenizer_and_bytes_per_token(written, tmp_path):
    config = DataConfig("indexed", (written,), tokenizer="bytes", cache_dir=str(tmp_path), split=(80, 20, 0))
    sizes = dict(sequence_length=32, seed=1, num_train_samples=10, num_eval_samples=4)
    assert build_datasets(config, **sizes).eval_bytes_per_token == 1000 / 1001
    with pytest.raises(ValueError, match="data.tokenizer: .*x.bin was written with bytes"):
        build_datasets(dataclasses.replace(config, tokenizer="null:200"), **sizes)
    build_datasets(dataclasses.replace(config, tokenizer="null:257"), **sizes)


def test_an_evaluation_split_without_documents_is_refused(config):
    config = dataclasses.replace(config, split=(1, 0, 0))
    with pytest.raises(ValueError, match="data.split.*no evaluation documents"):
        build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=5)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    check_vocab_size(load_tokenizer("bytes"), 257)
    with pytest.raises(ValueError, match="model.vocab_size=256 is smaller.*--model.vocab_size=384"):
        check_vocab_size(load_tokenizer("bytes"), 256)


A = str(DATA / "a")


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(source="indexed"), "needs --data.paths"),
        (dict(source="text", tokenizer="bytes"), "needs --data.text"),
        (dict(source="indexed", paths=("none",)), "none.bin does not exist"),
        (dict(source="indexed", paths=(A,), eval_paths=("none",)), "data.eval_paths: file none.bin"),
        (dict(source="indexed", paths=(A,), weights=(1.0, 2.0)), "data.weights has 2 entries, data.paths 1"),
        (dict(source="indexed", paths=(A, A), weights=(1.0, 0.0)), "must all be positive"),
        (dict(source="text", text=("stdlib",)), "cannot read text"),
        (dict(source="indexed", paths=(A,), tokenizer="sentencepiece:99"), "needs --data.source=text"),
        (dict(paths=(A,)), "data.paths=.* is not read with data.source=mock; use --data.source=indexed"),
        (dict(text=("x",)), "use --data.source=text"),
        (dict(tokenizer="none.model"), "the file does not exist"),
        (dict(tokenizer="gpt2"), "data.tokenizer=gpt2 is not known"),
        (dict(split=(0, 1, 0)), "data.split"),
        (dict(num_threads=-1), "data.num_threads=-1"),
    ],
)
def test_wrong_settings_are_refused_with_the_way_out(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields).check()


def test_a_cut_file_is_refused_by_name(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([np.arange(100)])
    with open(tmp_path / "x.bin", "ab") as file:
        file.truncate(150)
    config = DataConfig("indexed", (str(tmp_path / "x"),), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="x.bin has 150 bytes.*expects 200"):
        build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=0)
