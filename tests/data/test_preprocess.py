"""Preprocessing: the same bytes for any number of workers, and errors that name the line."""

import gzip
import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from megajax.data import preprocess as module
from megajax.data.indexed_dataset import IndexedDataset
from megajax.data.preprocess import expand, main, preprocess
from megajax.data.tokenizer import load_tokenizer


@pytest.fixture
def corpus(tmp_path):
    """300 documents in a .jsonl and 5 text files."""
    rng = np.random.default_rng(0)
    records = [{"text": "é" + "word " * int(n), "id": i} for i, n in enumerate(rng.integers(1, 2000, 300))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    for i in range(5):
        (tmp_path / f"b{i}.txt").write_text(f"file {i}\n" * 1000)
    return [str(tmp_path / "a.jsonl"), *expand([str(tmp_path / "b*.txt")])], records


def run(files, prefix, **options):
    return preprocess(files, str(prefix), load_tokenizer("bytes"), "bytes", **options)


def test_output_does_not_depend_on_the_number_of_workers(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 50_000)  # some 30 batches
    files, _ = corpus
    metas = [run(files, tmp_path / f"w{workers}", num_workers=workers) for workers in (1, 3)]
    assert metas[0] == metas[1]
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"w1{suffix}").read_bytes() == (tmp_path / f"w3{suffix}").read_bytes()


def test_documents_are_the_texts_in_order_with_an_end_token(corpus, tmp_path):
    files, records = corpus
    meta = run(files, tmp_path / "x")
    dataset, tokenizer = IndexedDataset(tmp_path / "x"), load_tokenizer("bytes")
    texts = [record["text"] for record in records] + [f"file {i}\n" * 1000 for i in range(5)]
    assert len(dataset) == len(texts) == meta["num_documents"]
    assert dataset.dtype == np.uint16
    for i, text in enumerate(texts):
        assert dataset.read(i)[-1] == tokenizer.eod_id
        assert tokenizer.decode(dataset.read(i).tolist()) == text
    assert meta["num_bytes"] == sum(len(text.encode()) for text in texts) == meta["num_tokens"] - len(texts)
    assert meta["sha256"] == hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()
    assert meta == json.loads((tmp_path / "x.meta.json").read_text())
    assert (meta["tokenizer"], meta["tokenizer_identity"], meta["dtype"]) == ("bytes", "bytes", "uint16")


def test_no_end_token_on_request_and_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "ab"}\n{"body": ""}\n\n{"body": "c"}\n')
    run([str(tmp_path / "a.jsonl")], tmp_path / "x", json_key="body", append_eod=False)
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [[97, 98], [99]]


def test_compressed_input_gives_the_same_tokens(corpus, tmp_path):
    files, _ = corpus
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert run([str(packed)], tmp_path / "x") == run(files[:1], tmp_path / "y")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl line 2: not JSON"),
        ("a.jsonl", b'{"text": "ok"}\n{"other": 1}\n', "a.jsonl line 2: no text field 'text'"),
        ("a.jsonl", b'{"text": "ok"}\n["text"]\n', "a.jsonl line 2: no text field"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\\ud800"}\n', "a.jsonl line 2: not UTF-8"),
        ("a.txt", b"ok\nok\n\xff\n", "a.txt line 3: not UTF-8"),
    ],
)
def test_bad_documents_stop_with_file_and_line_or_are_counted(tmp_path, name, content, message, caplog):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run([str(tmp_path / name)], tmp_path / "x")
    assert not (tmp_path / "x.bin").exists()
    meta = run([str(tmp_path / name)], tmp_path / "x", on_error="skip")
    assert meta["num_skipped"] == 1
    assert message in caplog.text


def test_an_error_in_a_worker_reaches_the_caller(tmp_path):
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="a.jsonl line 1"):
        run([str(tmp_path / "a.jsonl")], tmp_path / "x", num_workers=2)


def test_command_line_builds_a_dataset_without_importing_jax(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "*.txt"), "--output_prefix", str(tmp_path / "x"), "--tokenizer", "bytes"]
    code = (
        "import sys; from megajax.data.preprocess import main; main(sys.argv[1:]); "
        "assert not {'jax', 'grain', 'sentencepiece'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, *arguments, "--workers=1", "--no-append_eod"]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "1 documents, 5 tokens (uint16)" in out.stdout
    assert IndexedDataset(tmp_path / "x").read(0).tolist() == list(b"hello")


def test_command_line_errors_are_one_line(tmp_path):
    with pytest.raises(SystemExit, match="^error: --input: no file matches"):
        main(["--input", str(tmp_path / "none*"), "--output_prefix", "x", "--tokenizer", "bytes"])
