"""Conversations in the forms that people have: the same tokens whatever the form, and one line for what is none."""

import gzip
import json
from pathlib import Path

import pytest

from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.prepare.conversation_records import FORMS
from megajax.data.prepare.record_files import prepare_records
from megajax.data.preprocess import main
from megajax.models.decoder import DecoderConfig
from megajax.overrides import override
from megajax.tasks.conversations import Conversations

PAIRS = [("Add.\n1 2", "3"), ("Name a colour.\nA warm one", "red"), ("Hello\nyou", "Hi")]


def in_form(name: str, question: str, answer: str) -> dict:
    instruction, context = question.split("\n")
    return {
        "messages": {"messages": [dict(role="user", content=question), dict(role="assistant", content=answer)]},
        "ShareGPT": {
            "id": 7,
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}],
        },
        "Alpaca": {"instruction": instruction, "input": context, "output": answer},
        "prompt/completion": {"prompt": question, "completion": answer, "source": "web"},
    }[name]


def records(name: str) -> list[dict]:
    return [in_form(name, *pair) for pair in PAIRS]


def write_lines(path, found: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in found))


def text(prefix) -> str:
    dataset = IndexedDataset(prefix)
    return "|".join(bytes(token for token in dataset.read(i) if token < 256).decode() for i in range(len(dataset)))


def config(tmp_path, *paths, **fields) -> DataConfig:
    paths = tuple(map(str, paths))
    return DataConfig("indexed", paths, tokenizer="bytes", cache_dir=str(tmp_path / "cache"), **fields)


@pytest.fixture
def expected(tmp_path) -> str:
    write_lines(tmp_path / "messages.jsonl", records("messages"))
    return text(prepare_records(str(tmp_path / "messages.jsonl"), config(tmp_path)))


@pytest.mark.parametrize("form", [form.name for form in FORMS])
def test_every_form_gives_the_same_tokens_by_preprocess_and_by_the_run(tmp_path, expected, form, capsys):
    write_lines(tmp_path / "a.jsonl", records(form))
    main(["--conversations", f"--input={tmp_path}/a.jsonl", f"--output_prefix={tmp_path}/x", "--workers=1"])
    assert f"3 documents in the form {form}, " in capsys.readouterr().out
    assert text(tmp_path / "x") == expected
    prefix = prepare_records(str(tmp_path / "a.jsonl"), config(tmp_path))
    for part in (".bin", ".idx"):
        assert (tmp_path / f"x{part}").read_bytes() == Path(prefix + part).read_bytes()


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.parquet", "folder", "*.jsonl"])
def test_files_folders_and_patterns_are_read(tmp_path, expected, name):
    found = records("Alpaca")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("about these conversations")
    write_lines(tmp_path / "folder" / "a.jsonl", found)
    (tmp_path / "a.json").write_text("\ufeff  " + json.dumps(found, indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "folder" / "a.jsonl").read_bytes()))
    if name.endswith("parquet"):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(found), tmp_path / name)
    data = config(tmp_path, tmp_path / name)
    data.check()
    assert data.conversations == [str(tmp_path / name)]
    assert text(prepare_records(str(tmp_path / name), data)) == expected


@pytest.mark.parametrize(
    "record, turns",
    [
        (
            {"instruction": "I", "output": "O", "system": "S", "history": [["a", "b"]]},
            "system S user a assistant b user I assistant O",
        ),
        ({"instruction": "I", "input": "", "output": "O"}, "user I assistant O"),
        ({"instruction": "I", "context": "C", "response": "R"}, "user I\nC assistant R"),
        ({"prompt": "P", "response": "R"}, "user P assistant R"),
        (
            {"prompt": [{"role": "user", "content": "P"}], "completion": [{"role": "assistant", "content": "C"}]},
            "user P assistant C",
        ),
        ({"conversations": [{"from": "system", "value": "S"}, {"from": "gpt", "value": "A"}]}, "system S assistant A"),
        ({"conversations": [{"role": "user", "content": "U"}]}, "user U"),
    ],
)
def test_variants_of_the_forms(record, turns):
    form = next(form for form in FORMS if form.fits(record))
    assert " ".join(f"{m['role']} {m['content']}" for m in form.messages(record)) == turns


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "T", "id": 1}, "line 4: no conversation: it has the fields 'text', 'id'; known forms are messages"),
        (in_form("Alpaca", "a\nb", "c"), "line 4: .* in the form Alpaca, in a file that began with ShareGPT"),
        ({"conversations": [{"from": "narrator", "value": "V"}]}, "line 4: 'from': 'narrator' is no known speaker"),
        ({"conversations": [{"from": "gpt", "value": "V"}], "image": "x.png"}, "line 4: it has 'image', of which text"),
        (["a"], "line 4: no conversation: it has the fields of no object"),
    ],
)
def test_unknown_and_mixed_forms_end_with_one_line(tmp_path, record, message):
    write_lines(tmp_path / "a.jsonl", [*records("ShareGPT"), record])
    with pytest.raises(ValueError, match="a.jsonl " + message) as error:
        prepare_records(str(tmp_path / "a.jsonl"), config(tmp_path))
    assert "\n" not in str(error.value)


def test_a_table_with_images_is_no_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist([in_form("ShareGPT", "a\nb", "c") | {"images": ["x.png"]}])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet row 1: it has 'images', of which text holds nothing"):
        prepare_records(str(tmp_path / "a.parquet"), config(tmp_path))


def test_a_run_reads_and_blends_conversations_and_prepares_them_once(tmp_path, caplog):
    write_lines(tmp_path / "a.jsonl", records("ShareGPT") * 10)
    write_lines(tmp_path / "b.jsonl", records("Alpaca") * 5)
    paths = ("0.5", tmp_path / "a.jsonl", "0.5", tmp_path / "b.jsonl")
    data = config(tmp_path, *paths, eval_paths=(str(tmp_path / "b.jsonl"),))
    amounts = Amounts(128, 0, 20, 2)
    caplog.set_level("INFO", "megajax")
    datasets = Conversations().datasets(data, DecoderConfig(vocab_size=257), amounts)
    assert [source.num_samples for source in datasets.sources] == [10, 10]
    assert datasets.eval is not None and datasets.train[0]["loss_mask"].sum() > 0
    assert caplog.text.count("(once)") == 2 and "in the form Alpaca" in caplog.text
    caplog.clear()
    again = Conversations().datasets(data, DecoderConfig(vocab_size=257), amounts)
    assert again.record == datasets.record and "(once)" not in caplog.text
    write_lines(tmp_path / "a.jsonl", records("ShareGPT") * 9)
    assert Conversations().datasets(data, DecoderConfig(vocab_size=257), amounts).record != datasets.record


def test_files_of_conversations_imply_the_task(tmp_path):
    path = str(tmp_path / "a.jsonl")
    write_lines(tmp_path / "a.jsonl", records("ShareGPT"))
    (tmp_path / "x.json").write_text(json.dumps({"blend": [{"path": "a.jsonl"}]}))
    for chosen in (path, str(tmp_path / "x.json")):
        assert override(Config(), {"data.paths": chosen, "data.tokenizer": "bytes"}).task == Conversations()
    with pytest.raises(ValueError, match="task.kind=language does not read; use --task.kind=conversations"):
        override(Config(), {"data.paths": path, "data.tokenizer": "bytes", "task.kind": "language"}).check()
    with pytest.raises(ValueError, match="data.tokenizer is empty, and .*a.jsonl is not tokenized yet"):
        override(Config(), {"data.paths": path}).check_on(1)
    with pytest.raises(ValueError, match="data.tokenizer=null:5 cannot read text"):
        override(Config(), {"data.paths": path, "data.tokenizer": "null:5"}).check()
    with pytest.raises(ValueError, match="data.paths: no file is called .*b.jsonl"):
        override(Config(), {"data.paths": str(tmp_path / "b.jsonl"), "data.tokenizer": "bytes"}).check()


def test_the_tokenizer_of_a_folder(tmp_path):
    with pytest.raises(ValueError, match="the folder has neither tokenizer.json nor tokenizer.model"):
        DataConfig(tokenizer=str(tmp_path)).check()
    (tmp_path / "tokenizer.json").write_text("{}")
    DataConfig(tokenizer=str(tmp_path)).check()
    assert DataConfig(tokenizer=str(tmp_path)).with_tokenizer(5).tokenizer == str(tmp_path / "tokenizer.json")
