"""Batches: one global order, whoever reads it, from whatever step."""

import dataclasses
import functools
import hashlib
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts, check_same_data, check_vocab_size
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.loader import step_batches
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.tokenizers.load import load_tokenizer
from megajax.models.decoder import DecoderConfig
from megajax.tasks.conversations import Conversations
from megajax.tasks.language import Language

DATA = Path(__file__).parents[1] / "oracles" / "data"
STEPS, MICROBATCHES, BATCH = 6, 2, 8


def build_datasets(config, task=Language(), first_sample=int, **sizes):
    return task.datasets(config, DecoderConfig(), Amounts(**sizes, first_sample=first_sample))


@pytest.fixture
def config(tmp_path) -> DataConfig:
    paths = ("0.7", str(DATA / "a"), "0.3", str(DATA / "b"))
    return DataConfig("indexed", paths, split=(90, 10, 0), tokenizer="null:1000", cache_dir=str(tmp_path))


@pytest.fixture
def dataset(config):
    return build_datasets(config, sequence_length=16, seed=7, num_train_samples=100, num_eval_samples=0).train


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


def stream_hash(dataset, config, num_readers, *, interleaved=False, start_step=0) -> str:
    """Of the global batches that so many readers, each with its rows, have read together."""

    def rows_of(batch_size, reader):
        rows = np.arange(batch_size)
        return rows[reader::num_readers] if interleaved else np.split(rows, num_readers)[reader]

    readers = [batches(dataset, config, functools.partial(rows_of, reader=r), start_step) for r in range(num_readers)]
    digest = hashlib.sha256()
    for parts in zip(*readers, strict=True):
        for key in sorted(parts[0]):
            whole = np.empty((MICROBATCHES, BATCH, *parts[0][key].shape[2:]), parts[0][key].dtype)
            for reader, part in enumerate(parts):
                whole[:, rows_of(BATCH, reader)] = part[key]
            digest.update(whole.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("num_readers", [1, 2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_any_number_of_readers_reads_the_same_stream_also_when_resumed(dataset, config, num_readers, interleaved):
    for start_step in (0, 4):
        want = stream_hash(dataset, config, 1, start_step=start_step)
        assert stream_hash(dataset, config, num_readers, interleaved=interleaved, start_step=start_step) == want


def test_worker_processes_read_the_same_stream_also_when_resumed_with_another_number(dataset, config):
    workers = dataclasses.replace(config, num_workers=2)
    want = stream_hash(dataset, config, 1, start_step=3)
    assert stream_hash(dataset, workers, 2, start_step=3) == want


@pytest.mark.parametrize("start_step", [1, 4, STEPS])
def test_resuming_at_a_step_continues_the_same_sequence(dataset, config, start_step):
    want = batches(dataset, config, everything)[start_step:]
    got = batches(dataset, config, everything, start_step)
    assert len(got) == len(want)
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
    config = dataclasses.replace(config, paths=config.paths[1::2])
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
    config = dataclasses.replace(config, paths=config.paths[1:2], eval_paths=(str(DATA / "c"),))
    data = build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=5)
    assert data.train_tokens_per_epoch == 1893
    assert set(data.train.document_index) == set(range(37))
    assert set(data.eval.document_index) == set(range(23))
    assert data.eval_bytes_per_token is None


def test_mock_data_needs_no_files(tmp_path):
    config = DataConfig(tokenizer="null:50257", cache_dir=str(tmp_path))
    data = build_datasets(config, sequence_length=32, seed=1, num_train_samples=100, num_eval_samples=4)
    assert data.train[0]["tokens"].shape == (32,)
    assert max(data.train[i]["tokens"].max() for i in range(20)) < 50257
    assert not set(data.train.document_index) & set(data.eval.document_index)


@pytest.fixture
def late(tmp_path) -> str:
    """A blend file of b and, new, c."""
    entries = [{"path": str(DATA / "b"), "weight": 1}, {"path": str(DATA / "c"), "weight": 3}]
    (tmp_path / "late.json").write_text(json.dumps({"blend": entries}))
    return str(tmp_path / "late.json")


def test_a_blend_may_change_at_a_step_and_goes_on_in_each_dataset(config, late):
    changing = dataclasses.replace(config, blend_changes=(f"5:{late}",), split=(1, 0, 0))
    sizes = dict(sequence_length=16, seed=7, num_train_samples=100, num_eval_samples=0)
    data = build_datasets(changing, **sizes, first_sample=lambda step: 8 * step)
    before, after = (np.bincount(part, minlength=3) for part in np.split(data.train.dataset_index[:100], [40]))
    assert before.tolist() == [28, 12, 0]
    assert after[0] == 0 and after.sum() == 60 and abs(after[2] - 45) <= 1
    of_b = data.train.dataset_sample_index[data.train.dataset_index == 1]
    assert of_b.tolist() == list(range(len(of_b)))
    assert [source.num_samples for source in data.sources] == (before + after).tolist()
    plain = build_datasets(dataclasses.replace(config, split=(1, 0, 0)), **sizes).train
    assert np.array_equal(plain.dataset_index[:40], data.train.dataset_index[:40])
    with pytest.raises(ValueError, match="the run ends before"):
        build_datasets(changing, **sizes, first_sample=lambda step: 100 * step)


def test_a_blend_file_is_the_blend_it_names(config, tmp_path):
    pairs = zip(config.paths[1::2], config.paths[::2], strict=True)
    entries = [{"path": path, "weight": float(weight)} for path, weight in pairs]
    (tmp_path / "blend.json").write_text(json.dumps({"blend": entries}))
    from_file = dataclasses.replace(config, paths=(str(tmp_path / "blend.json"),))
    sizes = dict(sequence_length=16, seed=7, num_train_samples=60, num_eval_samples=4)
    one, other = (build_datasets(c, **sizes) for c in (config, from_file))
    for a, b in ((one.train, other.train), (one.eval, other.eval)):
        assert np.array_equal(a.dataset_index, b.dataset_index) and len(a) == len(b)
        assert np.array_equal(a[3]["tokens"], b[3]["tokens"])


def test_fill_in_the_middle_is_for_training_alone(config):
    config = dataclasses.replace(config, paths=config.paths[1::2])
    task = Language(fim_rate=1.0, fim_tokens=("997", "998", "999"))
    sizes = dict(sequence_length=16, seed=7, num_train_samples=20, num_eval_samples=4)
    marks = lambda dataset: sum(np.isin(dataset[i]["tokens"], (997, 998, 999)).sum() for i in range(4))
    plain = build_datasets(config, **sizes)
    data = build_datasets(config, task, **sizes)
    assert marks(data.train) > marks(plain.train) + 4 and marks(data.eval) == marks(plain.eval)
    assert data.record["format"]["fill_in_the_middle"]["rate"] == 1.0
    with pytest.raises(ValueError, match="task.fim_tokens: 1000 are not tokens of null:1000"):
        build_datasets(config, dataclasses.replace(task, fim_tokens=("1000", "1", "2")), **sizes)


def test_conversations_are_blended_split_and_read_like_documents(config, tmp_path):
    for name, count in (("x", 40), ("y", 20)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for d in range(count):
                writer.add_document([np.arange(1 + d % 3), np.full(2 + d % 4, 500 + d), np.arange(2), np.full(1, 900)])
    paths = ("1", str(tmp_path / "x"), "1", str(tmp_path / "y"))
    chat = dataclasses.replace(config, paths=paths, split=(80, 20, 0))
    data = build_datasets(chat, Conversations(), sequence_length=16, seed=7, num_train_samples=30, num_eval_samples=4)
    assert [len(part.indexed.document_indices) - 1 for part in data.train.datasets] == [40, 20]
    assert [set(part.document_index) for part in data.train.datasets] == [set(range(32)), set(range(16))]
    assert data.eval_bytes_per_token is None
    batch = next(
        iter(step_batches(data.train, lambda s: (8 * s, 1, 8), everything, start_step=0, num_steps=2, config=chat))
    )
    learnt = batch["labels"][batch["loss_mask"] == 1]
    assert len(learnt) and learnt.min() >= 500
    assert np.all(batch["segment_ids"][batch["loss_mask"] == 1] > 0)


def test_evaluation_has_a_blend_of_its_own(config):
    config = dataclasses.replace(config, eval_paths=("3", str(DATA / "c"), "1", str(DATA / "b")))
    data = build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=20)
    assert np.bincount(data.eval.dataset_index).tolist() == [15, 5]


def test_sources_say_how_often_each_is_read(config):
    data = build_datasets(config, sequence_length=16, seed=7, num_train_samples=100, num_eval_samples=0)
    assert [source.num_samples for source in data.sources] == [70, 30]
    for source, part in zip(data.sources, data.train.datasets, strict=True):
        assert source.epochs == source.num_samples * 16 / part.tokens_per_epoch


def test_a_run_goes_on_with_its_own_data_only(config, late, caplog):
    def record(num_train_samples=60, sequence_length=16, task=Language(), **changes):
        changed = dataclasses.replace(config, **changes)
        sizes = dict(sequence_length=sequence_length, seed=7, num_train_samples=num_train_samples, num_eval_samples=0)
        found = build_datasets(changed, task, **sizes, first_sample=lambda step: step).record
        return json.loads(json.dumps(found))

    check_same_data(record(), record(), "data.json")
    assert not caplog.records
    check_same_data(record(), record(num_train_samples=61), "data.json")
    assert "planned for 60 samples and now has 61" in caplog.text
    for changes, named in [
        (dict(paths=("0.6", config.paths[1], "0.4", config.paths[3])), "data.paths: "),
        (dict(paths=(*config.paths[:3], str(DATA / "c"))), f"{DATA / 'c'}, in place of {DATA / 'b'}, has "),
        (
            dict(paths=("0.4", config.paths[3], "0.3", str(DATA / "c"), "0.3", config.paths[1])),
            "data.paths, 2 -> 3 files: ",
        ),
        (dict(split=(80, 20, 0)), "data.split: "),
        (dict(tokenizer="null:1001"), "data.tokenizer: null:1000 -> null:1001"),
        (dict(task=Language(reset_positions=True)), "task.reset_positions: False -> True"),
        (dict(blend_changes=(f"5:{late}",)), "data.blend_changes: "),
        (dict(sequence_length=17), "training.sequence_length: 16 -> 17"),
    ]:
        with pytest.raises(ValueError, match=f"other data, as data.json says .*{named}.*--data.allow_change=True"):
            check_same_data(record(), record(**changes), "data.json")


def _write(prefix, documents) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            writer.add_document([tokens])


@pytest.fixture
def rewritten(tmp_path):
    """(a function that writes documents as data that a run has begun with, the check of its resume)."""

    def record():
        config = DataConfig("indexed", (str(tmp_path / "x"),), tokenizer="null:1000", cache_dir=str(tmp_path / "cache"))
        sizes = dict(sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=0)
        return build_datasets(config, **sizes).record

    return lambda documents: _write(tmp_path / "x", documents), record


@pytest.mark.fault
@pytest.mark.parametrize("shape", [(40, 30), (400, 30_000)], ids=["read whole", "sampled"])
def test_tokens_rewritten_in_place_and_documents_in_another_order_are_found(shape, rewritten, tmp_path):
    """Of 24 MB, which are more than is read, a whole hundredth is rewritten."""
    write, record = rewritten
    tokens = np.random.default_rng(0).integers(0, 999, shape, np.uint16)
    write(tokens)
    began = record()
    assert record() == began
    index, size = (tmp_path / "x.idx").read_bytes(), (tmp_path / "x.bin").stat().st_size
    changed = tokens.copy()
    changed[13 : 13 + max(len(tokens) // 100, 1)] += 1
    for documents in (changed, tokens[::-1], np.roll(tokens, 1, axis=0)):
        write(documents)
        assert (tmp_path / "x.idx").read_bytes() == index and (tmp_path / "x.bin").stat().st_size == size
        with pytest.raises(ValueError, match="other data, as data.json says .*x has the same size but other content"):
            check_same_data(began, record(), "data.json")
    write(tokens)
    check_same_data(began, record(), "data.json")


@pytest.mark.fault
def test_documents_of_other_lengths_are_found_by_the_index_also_if_their_number_is_the_same(rewritten):
    write, record = rewritten
    write([np.arange(30), np.arange(50)])
    began = record()
    write([np.arange(50), np.arange(30)])
    with pytest.raises(ValueError, match="x has the same size but other content"):
        check_same_data(began, record(), "data.json")


@pytest.mark.fault
@pytest.mark.parametrize("damage", [{}, {"files": 3}, {"files": [3]}, {"seed": "7"}, {"files": [{"tokens": []}]}])
def test_a_record_of_wrong_types_is_other_data(damage, rewritten):
    write, record = rewritten
    write([np.arange(30), np.arange(50)])
    with pytest.raises(ValueError, match="other data, as data.json says") as error:
        check_same_data(record() | damage if damage else {}, record(), "data.json")
    assert "\n" not in str(error.value) and not re.search("[0-9a-f]{16}", str(error.value))


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
    check_vocab_size(257, 257)
    with pytest.raises(ValueError, match="model.vocab_size=256 is smaller.*--model.vocab_size=257$"):
        check_vocab_size(257, 256)


A = str(DATA / "a")


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(source="indexed"), "needs --data.paths"),
        (dict(source="text", tokenizer="bytes"), "needs --data.text"),
        (dict(source="indexed", paths=("none",)), "none.bin does not exist"),
        (dict(source="indexed", paths=(A,), eval_paths=("none",)), "data.eval_paths: file none.bin"),
        (dict(source="indexed", paths=("1", A, "2")), "write a number above 0, at most 1e.30, before each path"),
        (dict(source="indexed", paths=("0", A)), "write a number above 0, at most 1e.30, before each path"),
        (dict(source="text", text=("stdlib",)), "cannot read text"),
        (dict(source="indexed", paths=(A,), tokenizer="sentencepiece:99"), "needs --data.source=text"),
        (dict(paths=(A,)), "data.paths=.* is not read with data.source=mock; use --data.source=indexed"),
        (dict(text=("x",)), "use --data.source=text"),
        (dict(tokenizer="none.model"), "the file does not exist"),
        (dict(tokenizer="gpt2"), "data.tokenizer=gpt2 is not known"),
        (dict(split=(0, 1, 0)), "data.split"),
        (dict(source="indexed", paths=(A,), blend_changes=("late.json",)), "write STEP:FILE.json"),
        (dict(source="indexed", paths=(A,), blend_changes=("9:a.json", "9:b.json")), "the steps must ascend"),
        (dict(source="indexed", paths=(A,), blend_changes=("9:gone.json",)), "gone.json cannot be read"),
    ],
)
def test_wrong_settings_are_refused_with_the_way_out(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields).check()


@pytest.mark.fault
def test_a_cut_file_is_refused_by_name(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([np.arange(100)])
    with open(tmp_path / "x.bin", "ab") as file:
        file.truncate(150)
    config = DataConfig("indexed", (str(tmp_path / "x"),), tokenizer="null:9", cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="x.bin has 150 bytes.*expects 200"):
        build_datasets(config, sequence_length=16, seed=7, num_train_samples=10, num_eval_samples=0)


@pytest.mark.fault
@pytest.mark.parametrize(
    "content", ["", "[]", "{", "{}", '{"vocab_size": "257"}', b"\xff\xfe", '"text"', '{"tokenizer": null}']
)
def test_a_damaged_meta_json_is_refused_by_name(content, written, tmp_path):
    Path(written + ".meta.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    config = DataConfig("indexed", (written,), tokenizer="bytes", cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="x.meta.json.*remove it") as error:
        build_datasets(config, sequence_length=32, seed=1, num_train_samples=10, num_eval_samples=0)
    assert "\n" not in str(error.value)


def test_of_a_few_documents_the_last_one_is_held_out_where_rounding_leaves_none(tmp_path, caplog):
    caplog.set_level(logging.INFO, "megajax")
    paths = [tmp_path / f"{number}.txt" for number in range(8)]
    for number, path in enumerate(paths):
        path.write_text(f"{number}" * 100)
    prefix = str(tmp_path / "x")
    preprocess([str(path) for path in paths], prefix, load_tokenizer("bytes"), "bytes")
    config = DataConfig("indexed", (prefix,), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    build = functools.partial(build_datasets, sequence_length=16, seed=7, num_train_samples=200)
    found = build(config, num_eval_samples=5)
    seen = {token for i in range(200) for token in found.train[i]["tokens"].tolist()}
    assert seen == {*b"0123456", 256}
    assert {token for i in range(5) for token in found.eval[i]["tokens"].tolist()} == {*b"7"}
    assert f"no evaluation documents of the 8 in {prefix}: the last one is held out" in caplog.text
    # Without evaluation nothing is held out, and a run that goes on like that would see other samples.
    whole = build(config, num_eval_samples=0)
    with pytest.raises(ValueError, match="x has another part held out for evaluation"):
        check_same_data(found.record, whole.record, "data.json")


def test_an_empty_tokenizer_is_the_one_that_wrote_the_data_and_its_file_may_have_moved_with_them(written, tmp_path):
    config = DataConfig("indexed", (written,))
    assert config.with_tokenizer(2048, 0).tokenizer == "bytes" and Language().num_token_ids(config, 2048) == 257
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    (tmp_path / "x.meta.json").write_text(json.dumps(meta | {"tokenizer": "elsewhere/t.model"}))
    with pytest.raises(ValueError, match="x.bin was written with elsewhere/t.model.*--data.tokenizer"):
        config.with_tokenizer(2048, 0)
    (tmp_path / "t.model").write_bytes(b"")
    assert config.with_tokenizer(2048, 0).tokenizer == str(tmp_path / "t.model")
    (tmp_path / "x.meta.json").unlink()
    assert config.with_tokenizer(2048, 0).tokenizer == "null:2048"
    assert DataConfig().with_tokenizer(100, 3).tokenizer == "null:97"
