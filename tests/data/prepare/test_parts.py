"""Parts of an input give, merged, what one process gives; finished parts are kept, and killed ones are repeated."""

import gzip
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from megajax.data.indexed.meta import read_meta
from megajax.data.prepare.parts import Part, pieces_of
from megajax.data.preprocess import main

SUFFIXES = ".bin", ".idx", ".meta.json"


@pytest.fixture
def corpus(tmp_path):
    """The options that read four .jsonl files, one of them empty and one packed, a .parquet file and two text files."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = np.random.default_rng(0)

    def lines(count, longest=60):
        return "\n".join(json.dumps({"text": "wörd " * int(n)}) for n in rng.integers(0, longest, count)).encode()

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(150) + b"\n\n" + lines(1, 2000) + b"\n")
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(lines(40))  # no newline at its end
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines(50)))
    parquet.write_table(
        pyarrow.table({"text": [f"row {i} " * (i % 50) for i in range(200)]}), folder / "e.parquet", row_group_size=30
    )
    for name in "fg":
        (folder / f"{name}.txt").write_text(f"file {name}\n" * 200)
    return ["--input", str(folder), "--workers=1"]


def encode(options, prefix, count, key=""):
    """-> the prefixes of the parts."""
    for number in range(1, count + 1):
        main([*options, f"--output_prefix={prefix}", f"--part={number}/{count}"])
    return [f"{Part(number, count).prefix(str(prefix))}{key}" for number in range(1, count + 1)]


def contents(prefix) -> list[bytes]:
    found = []
    for suffix in SUFFIXES:
        with open(f"{prefix}{suffix}", "rb") as file:
            found.append(file.read())
    return found


def refused(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 7, 60])
def test_merged_parts_are_the_bytes_of_one_process(corpus, tmp_path, count):
    main([*corpus, f"--output_prefix={tmp_path}/whole"])
    parts = encode(corpus, tmp_path / "x", count)
    main(["merge", "--input", *parts, f"--output_prefix={tmp_path}/x"])
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_parts_of_a_large_file_have_about_the_same_size(corpus, tmp_path):
    path = tmp_path / "in" / "a.jsonl"
    sizes = [piece.end - piece.begin for n in range(1, 5) for piece in pieces_of(Part(n, 4), [(str(path), True)])]
    assert sum(sizes) == path.stat().st_size
    assert max(sizes[:3]) < 1.2 * min(sizes[:3])  # the last has the long line


def test_several_keys_and_conversations_in_several_forms(tmp_path):
    (tmp_path / "keys.jsonl").write_text(
        "".join(json.dumps({"title": f"t{i}", "body": "b" * i}) + "\n" for i in range(30))
    )
    keys = ["--input", f"{tmp_path}/keys.jsonl", "--json_keys", "title", "body", "--workers=1"]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "m.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    (tmp_path / "n.jsonl").write_text((json.dumps({"prompt": "q", "completion": "a"}) + "\n") * 20)
    chat = ["--input", f"{tmp_path}/m.jsonl", f"{tmp_path}/n.jsonl", "--conversations", "--workers=1"]
    for name, options, key in (("x", keys, "_title"), ("x", keys, "_body"), ("y", chat, "")):
        main([*options, f"--output_prefix={tmp_path}/{name}whole", "--overwrite"])
        parts = encode(options, tmp_path / name, 3, key)
        main(["merge", "--input", *parts, f"--output_prefix={tmp_path}/{name}{key}"])
        assert contents(tmp_path / f"{name}{key}") == contents(tmp_path / f"{name}whole{key}")


def test_a_killed_part_is_repeated_and_a_finished_one_is_kept(corpus, tmp_path, caplog):
    first, second = encode(corpus, tmp_path / "good", 2)
    killed = f"""
import os, signal
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.preprocess import main
IndexedDatasetWriter.add_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main({[*corpus, f"--output_prefix={tmp_path}/x", "--part=1/2"]})
"""
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("x-00001-of-00002.bin.*.tmp"))
    encode(corpus, tmp_path / "x", 2)
    assert not list(tmp_path.glob("*.tmp"))
    found = Part(1, 2).prefix(f"{tmp_path}/x")
    assert contents(found) == contents(first)
    before = os.stat(f"{found}.bin").st_mtime_ns
    with caplog.at_level("INFO", "megajax"):
        assert contents(encode(corpus, tmp_path / "x", 2)[1]) == contents(second)
    assert os.stat(f"{found}.bin").st_mtime_ns == before
    assert caplog.text.count("this part was finished before") == 2


def test_a_part_of_other_input_or_settings_is_refused_and_replaced_on_request(corpus, tmp_path, capsys):
    (part, _) = encode(corpus, tmp_path / "x", 2)
    again = [*corpus, f"--output_prefix={tmp_path}/x", "--part=1/2"]
    for options, name in (
        (["--no-append_eod"], "append_eod"),
        (["--tokenizer=null:300", "--on_error=skip"], "tokenizer, tokenizer_identity, vocab_size, eod_id, on_error"),
        (["--max_document_bytes=100000"], "max_document_bytes"),
    ):
        assert f"with other settings (different: {name})" in refused([*again, *options], capsys).replace("\n", " ")
    os.utime(tmp_path / "in" / "g.txt")
    assert "different: input_files)" in refused(again, capsys)
    main([*again, "--overwrite", "--no-append_eod"])
    assert read_meta(part)["append_eod"] is False
    os.truncate(f"{part}.bin", 10)
    assert ".bin has 10 bytes" in refused([*again, "--no-append_eod"], capsys)


def test_merge_wants_all_parts_in_order(corpus, tmp_path, capsys):
    first, second, third = encode(corpus, tmp_path / "x", 3)
    (other, _) = encode(corpus, tmp_path / "x", 2)
    for prefixes, found in (
        ([first, third], "1/3, 3/3"),
        ([second, first, third], "2/3, 1/3, 3/3"),
        ([first, other, third], "1/3, 1/2, 3/3"),
    ):
        error = refused(["merge", "--input", *prefixes, f"--output_prefix={tmp_path}/y"], capsys)
        assert error.replace("\n", " ").rstrip().endswith(found)
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n' * 9)
    parts = encode(["--input", f"{tmp_path}/none.jsonl"], tmp_path / "none", 2)
    assert "no part has any text" in refused(["merge", "--input", *parts, f"--output_prefix={tmp_path}/z"], capsys)


def test_an_error_says_where_the_lines_are_counted_from(tmp_path, capsys):
    good = json.dumps({"text": "word " * 20}) + "\n"
    path = tmp_path / "a.jsonl"
    path.write_text(good * 100 + "broken\n" + good * 20)
    options = ["--input", str(path), f"--output_prefix={tmp_path}/x", "--part=2/2"]
    error = refused(options, capsys).replace("\n", " ")
    begin = int(error.partition("after byte ")[2].partition(":")[0])
    line = int(error.partition("a.jsonl line ")[2].partition(" ")[0])
    assert path.read_bytes()[begin:].split(b"\n")[line - 1] == b"broken"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--part=3"], "--part=3 must be I/N"),
        (["--part=0/2"], "--part=0/2 must be I/N"),
        (["--part=3/2"], "--part=3/2 must be I/N"),
        (["--part=1/2", "--ray=auto"], "--part is not used with --ray"),
        (["--num_parts=2"], "--num_parts is only used with --ray"),
        (["--part=1/2", "--tokenizer=sentencepiece:300"], "is trained on all input"),
    ],
)
def test_options_that_do_not_fit_are_refused(corpus, tmp_path, capsys, options, message):
    assert message in refused([*corpus, f"--output_prefix={tmp_path}/x", *options], capsys)


@pytest.mark.slow  # 10 seconds, most of them to start the nodes
def test_a_ray_cluster_writes_the_bytes_of_one_process(corpus, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    main([*corpus, f"--output_prefix={tmp_path}/whole"])
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        options = ["--input", str(tmp_path / "in"), "--output_prefix=x", f"--ray={cluster.address}", "--num_parts=5"]
        main(options)
        assert contents("x") == contents("whole")
        assert not list(tmp_path.glob("x-*"))
        (tmp_path / "in" / "c.jsonl").write_text("broken\n")
        assert "c.jsonl line 1: not JSON" in refused([*options, "--overwrite"], capsys)
        assert list(tmp_path.glob("x-*-of-00005.meta.json"))
    finally:
        cluster.shutdown()
    for address in (cluster.address, "auto"):
        assert "no cluster answers" in refused([*options, "--overwrite", f"--ray={address}"], capsys)
