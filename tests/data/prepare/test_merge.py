"""Merging gives what preprocessing of all inputs gives; verify names what was changed."""

import json

import numpy as np
import pytest

from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.prepare import merge as module
from megajax.data.prepare.merge import merge, verify
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.preprocess import main
from megajax.data.tokenizers.load import load_tokenizer


def build(files, prefix, spec="bytes", **options) -> str:
    preprocess(files, str(prefix), load_tokenizer(spec), spec, **options)
    return str(prefix)


@pytest.fixture
def shards(tmp_path):
    """Three .jsonl files."""
    rng = np.random.default_rng(0)
    for name, count in (("a", 40), ("b", 2), ("c", 25)):
        lines = [json.dumps({"text": "One is. Two are. " * int(n)}) for n in rng.integers(0, 30, count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / f"{name}.jsonl") for name in "abc"]


@pytest.mark.parametrize("form", ["documents", "sentences"])
def test_merged_files_are_those_of_the_inputs_preprocessed_together(shards, tmp_path, monkeypatch, form):
    monkeypatch.setattr(module, "WRITE_BLOCK", 7)  # several blocks
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    parts = [build([path], path.removesuffix(".jsonl"), form=form) for path in shards]
    build(shards, tmp_path / "whole", form=form)
    main(["merge", "--input", *parts, "--output_prefix", str(tmp_path / "merged")])
    for suffix in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


def test_datasets_of_other_tools_merge_without_meta(tmp_path):
    for name, documents in (("a", [[1, 2]]), ("empty", []), ("b", [[3]])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for tokens in documents:
                writer.add_document([np.array(tokens)])
    assert merge([str(tmp_path / name) for name in ("a", "empty", "b")], str(tmp_path / "x")) is None
    assert np.fromfile(tmp_path / "x.bin", np.uint16).tolist() == [1, 2, 3]


def test_what_does_not_belong_together_is_refused(shards, tmp_path):
    (tmp_path / "n.txt").write_text("1 2 3")
    a = build(shards[:1], tmp_path / "a")
    for other, message in (
        (build(shards[:1], tmp_path / "s", form="sentences"), "form is sentences in .*s.meta.json and documents"),
        (build(shards[:1], tmp_path / "e", append_eod=False), "append_eod is False"),
        (build([str(tmp_path / "n.txt")], tmp_path / "n", "null:257"), "tokenizer_identity is null:257"),
        (build([str(tmp_path / "n.txt")], tmp_path / "w", "null:70000"), "w.bin holds int32, .*a.bin uint16"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([a, other], str(tmp_path / "x"))
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge([a, a], a)
    b = build(shards[:1], tmp_path / "b")
    (tmp_path / "b.meta.json").unlink()
    with pytest.raises(ValueError, match="b.meta.json does not exist"):
        merge([a, b], str(tmp_path / "x"))
    with open(b + ".idx", "ab") as file:  # modes of a multimodal dataset
        file.write(bytes(40))
    assert not (tmp_path / "x.bin").exists()


def test_modes_of_sequences_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([np.array([1])])
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(b"\1")
    with pytest.raises(ValueError, match="modes"):
        merge([str(tmp_path / "a")], str(tmp_path / "x"))


def test_verify_passes_good_data_and_names_the_first_bad_token(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "WRITE_BLOCK", 7)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    a, b = build(shards, tmp_path / "a", form="sentences"), build(shards, tmp_path / "b")
    with pytest.raises(SystemExit) as status:
        main(["verify", "--prefix", a, b])
    assert status.value.code == 0
    lengths = module.IndexedDataset(a).lengths
    good = np.fromfile(a + ".bin", np.uint16)
    last = int(lengths[23]) - 1
    for position, value, message in (
        (0, 257, "a.bin: token 257 at position 0 of sequence 23 is not one of the 257 ids"),
        (last, 300, f"a.bin: token 300 at position {last} of sequence 23 is not one of the 257 ids"),
        (last, 5, "a.bin: its sha256 is "),
    ):
        tokens = good.copy()
        tokens[int(lengths[:23].sum()) + position] = value
        tokens.tofile(a + ".bin")
        with pytest.raises(SystemExit) as status:
            main(["verify", "--prefix", a, b])
        assert status.value.code == 1
        out = capsys.readouterr()
        assert message in out.err
        assert f"{b}: OK" in out.out


def test_verify_needs_a_meta_and_whole_files(shards, tmp_path):
    a = build(shards, tmp_path / "a")
    (tmp_path / "a.meta.json").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match="a.meta.json does not exist"):
        verify(a)
    (tmp_path / "kept").rename(tmp_path / "a.meta.json")
    with open(a + ".bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="a.bin has"):
        verify(a)
