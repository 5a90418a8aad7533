"""Preprocessing: the same bytes for any number of workers, and errors that name the line."""

import base64
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.prepare import read_input
from megajax.data.prepare.read_input import expand
from megajax.data.prepare.write_tokens import preprocess
from megajax.data.preprocess import main
from megajax.data.tokenizers.chat_template import CHATML, ChatTemplate
from megajax.data.tokenizers.load import load_tokenizer


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
    (meta,) = preprocess(files, str(prefix), load_tokenizer("bytes"), "bytes", **options).values()
    return meta


def refuse_nothing(files, prefix, **options):
    """All documents are skipped."""
    with pytest.raises(ValueError, match=rf"no text in '{files[0]}' \(documents skipped: 1\): there is nothing"):
        run(files, prefix, on_error="skip", **options)
    assert not os.path.exists(f"{prefix}.bin")


def documents(prefix) -> list[list[list[int]]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [
        [dataset.read(i).tolist() for i in range(begin, end)] for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


def texts(prefix) -> list[list[str]]:
    return [[bytes(i for i in ids if i < 256).decode() for ids in document] for document in documents(prefix)]


def pack(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as parallel compressors write
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
    return gzip.compress(content) if suffix == ".gz" else content


def test_output_does_not_depend_on_the_number_of_workers(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(read_input, "BATCH_BYTES", 50_000)  # some 30 batches
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
    assert [file["path"] for file in meta["inputs"]] == files
    for path, file in zip(files, meta["inputs"], strict=True):
        with open(path, "rb") as content:
            assert file["sha256"] == hashlib.file_digest(content, "sha256").hexdigest()
    assert [file["num_documents"] for file in meta["inputs"]] == [300, 1, 1, 1, 1, 1]
    assert sum(file["num_tokens"] for file in meta["inputs"]) == meta["num_tokens"]
    assert (meta["tokenizer"], meta["tokenizer_identity"], meta["dtype"]) == ("bytes", "bytes", "uint16")


def test_a_folder_is_all_its_files_and_a_dataset_is_named_by_its_prefix_or_its_files(tmp_path, capsys):
    inner = tmp_path / "notes [old]" / "inner"
    inner.mkdir(parents=True)
    (inner / "b.txt").write_text("two")
    (inner.parent / "a.jsonl").write_text('{"text": "one"}\n')
    (inner.parent / ".hidden").write_text("no")
    prefix = tmp_path / "x"
    main(["--input", str(inner.parent), f"--output_prefix={prefix}.bin", "--workers=1"])
    assert texts(prefix) == texts(f"{prefix}.bin") == texts(f"{prefix}.idx") == [["one"], ["two"]]
    main(["inspect", "--prefix", f"{prefix}.idx", "--show=1"])
    assert "document 0, 4 tokens\none\n" in capsys.readouterr().out
    main(["merge", "--input", f"{prefix}.bin", str(prefix), f"--output_prefix={prefix}y.idx"])
    assert len(documents(f"{prefix}y")) == 4
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--prefix", f"{prefix}.bin", f"{prefix}y.idx"])
    (tmp_path / "empty").mkdir()
    assert f"--input: no file in {tmp_path}/empty" in refused(
        ["--input", f"{tmp_path}/empty", "--output_prefix=x"], capsys
    )


def test_no_end_token_on_request_and_empty_documents_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "ab"}\n{"body": ""}\n\n{"body": "c"}\n')
    run([str(tmp_path / "a.jsonl")], tmp_path / "x", json_keys=["body"], append_eod=False)
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [[97, 98], [99]]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "b0.txt"])
def test_compressed_input_gives_the_same_tokens(corpus, tmp_path, name, suffix):
    packed = tmp_path / (name + suffix)
    packed.write_bytes(pack((tmp_path / name).read_bytes(), suffix))
    want, got = run([str(tmp_path / name)], tmp_path / "x"), run([str(packed)], tmp_path / "y")
    assert got["sha256"] == want["sha256"]
    assert (tmp_path / "x.idx").read_bytes() == (tmp_path / "y.idx").read_bytes()
    assert got["inputs"][0]["sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "b.txt"])
@pytest.mark.fault
def test_a_compressed_file_cut_short_is_refused_by_name(tmp_path, name, suffix):
    content = pack(b'{"text": "hello"}\n' * 1000, suffix)
    (tmp_path / (name + suffix)).write_bytes(content[:-9])
    with pytest.raises(ValueError, match=f"{name}{suffix}.*cannot be read, copy it again"):
        run([str(tmp_path / (name + suffix))], tmp_path / "x")
    if name == "b.txt":
        refuse_nothing([str(tmp_path / (name + suffix))], tmp_path / "x")
    else:
        assert run([str(tmp_path / (name + suffix))], tmp_path / "x", on_error="skip")["num_skipped"] == 1


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt", "a.txt.gz", "a.txt.zst"]
)
@pytest.mark.fault
def test_a_document_above_the_size_limit_is_refused_or_skipped(tmp_path, name, caplog):
    path, longest = tmp_path / name, 300_000
    records = [{"text": "one"}, {"text": "a" * 1_000_000}, {"text": "b" * (longest - 100)}]
    if "parquet" in name:
        write_parquet(path, {"text": [record["text"] for record in records]})
    else:
        plain = records[1]["text"] if "txt" in name else "\n".join(map(json.dumps, records))
        path.write_bytes(pack(plain.encode(), path.suffix))
    where = {"jsonl": f"{name} line 2", "parq": f"{name} row 2", "txt": name}[name.split(".")[1].removesuffix("uet")]
    message = f"{where}: a document of more than 300,000 bytes; split it, or allow it with --max_document_bytes"
    with pytest.raises(ValueError, match=message):
        run([str(path)], tmp_path / "x", max_document_bytes=longest)
    if "txt" in name:
        refuse_nothing([str(path)], tmp_path / "x", max_document_bytes=longest)
    else:
        assert run([str(path)], tmp_path / "x", max_document_bytes=longest, on_error="skip")["num_skipped"] == 1
        assert texts(tmp_path / "x") == [["one"], ["b" * (longest - 100)]]
    assert message in caplog.text
    assert run([str(path)], tmp_path / "x", max_document_bytes=1_100_000)["num_skipped"] == 0


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; getrusage counts the parent's memory too")
def test_a_small_file_that_unpacks_to_gigabytes_takes_little_memory(tmp_path):
    """A line of 600 MB in 20 kB, a file of 200 MB in 900 kB."""
    zstandard = pytest.importorskip("zstandard")
    piece = b"a" * 100_000_000
    with open(tmp_path / "a.jsonl.zst", "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        for part in (b'{"text": "', *[piece] * 6, b'"}\n{"text": "last"}\n'):
            packed.write(part)
    with gzip.open(tmp_path / "b.txt.gz", "wb", compresslevel=1) as packed:
        packed.write(piece)
        packed.write(piece)
    code = (
        "import sys; from megajax.data.preprocess import main; main(sys.argv[1:]); "
        "print(*[line for line in open('/proc/self/status') if 'VmHWM' in line])"
    )
    files = [str(tmp_path / name) for name in ("a.jsonl.zst", "b.txt.gz")]
    arguments = ["--input", *files, "--output_prefix", str(tmp_path / "x"), "--tokenizer=bytes", "--workers=1"]
    bound = ["--on_error=skip", "--max_document_bytes=10000000"]
    command = [sys.executable, "-c", code, *arguments, *bound]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "1 documents" in done.stdout and "2 skipped" in done.stdout
    assert int(done.stdout.split()[-2]) < 150_000  # kB; 60,000 for a few lines


def write_parquet(path, columns: dict, **options) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)


def test_parquet_gives_the_documents_of_the_same_jsonl(corpus, tmp_path):
    _, records = corpus
    columns = {key: [record[key] for record in records] for key in ("id", "text")}
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=70)
    want = run([str(tmp_path / "a.jsonl")], tmp_path / "x")
    got = run([str(tmp_path / "a.parquet")], tmp_path / "y")
    assert (got["sha256"], got["num_documents"]) == (want["sha256"], 300)
    with pytest.raises(ValueError, match="a.parquet: .*no column 'body'"):
        run([str(tmp_path / "a.parquet")], tmp_path / "z", json_keys=["body"])
    columns["text"][200] = None
    write_parquet(tmp_path / "a.parquet", columns, row_group_size=70)
    with pytest.raises(ValueError, match="a.parquet row 201: the field 'text' is no text"):
        run([str(tmp_path / "a.parquet")], tmp_path / "z")


def test_several_keys_make_datasets_whose_documents_belong_together(tmp_path):
    records = [
        dict(title="A", text="one"),
        dict(title="", text="two"),
        dict(title="", text=""),
        dict(title="D", text=""),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    metas = preprocess(
        [str(tmp_path / "a.jsonl")], str(tmp_path / "x"), load_tokenizer("bytes"), "bytes", json_keys=["title", "text"]
    )
    assert list(metas) == [str(tmp_path / "x_title"), str(tmp_path / "x_text")]
    assert texts(tmp_path / "x_title") == [["A"], [], ["D"]]
    assert texts(tmp_path / "x_text") == [["one"], ["two"], []]
    assert [meta["num_bytes"] for meta in metas.values()] == [2, 6]
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(ValueError, match="b.txt is plain text"):
        run([str(tmp_path / "b.txt")], tmp_path / "x", json_keys=["title", "text"])


def test_sentences_are_the_sequences_of_a_document(tmp_path):
    (tmp_path / "a.txt").write_text("One here.  Two here.\n\nThree")
    (tmp_path / "b.txt").write_text(" \n ")
    meta = run(expand([str(tmp_path / "*.txt")]), tmp_path / "x", form="sentences")
    assert texts(tmp_path / "x") == [["One here.", "Two here.", "Three"]]
    assert [ids[-1] for ids in documents(tmp_path / "x")[0]] == [ord("."), ord("."), 256]
    assert (meta["num_documents"], meta["num_sequences"], meta["form"]) == (1, 3, "sentences")


TURNS = [("system", "S"), ("user", "U1"), ("assistant", "A1"), ("user", "U2"), ("assistant", "A2")]


def conversation(*turns) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_alternate_context_and_answer(tmp_path, kind):
    records = [conversation(*TURNS), conversation(*TURNS[1:4]), conversation(("user", "U"), *[("assistant", "A")] * 2)]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
    else:
        write_parquet(path, {"messages": [record["messages"] for record in records]})
    run([str(path)], tmp_path / "x", form="conversations", json_keys=["messages"])
    turn, ask = "<|im_start|>{}\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    first = turn.format("system", "S") + turn.format("user", "U1") + ask
    assert texts(tmp_path / "x") == [
        [first, "A1<|im_end|>\n", turn.format("user", "U2") + ask, "A2<|im_end|>\n"],
        [turn.format("user", "U1") + ask, "A1<|im_end|>\n", turn.format("user", "U2")],
        [turn.format("user", "U") + ask, "A<|im_end|>\n", ask, "A<|im_end|>\n"],
    ]
    assert [document[-1][-1] for document in documents(tmp_path / "x")] == [256] * 3


def test_special_tokens_of_the_template_are_single_tokens_and_the_end_is_not_repeated(tmp_path):
    pytest.importorskip("tiktoken")
    ranks = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    (tmp_path / "t.tiktoken").write_bytes(ranks)
    special = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
    (tmp_path / "t.tiktoken.json").write_text(json.dumps({"special_tokens": special}))
    tokenizer = load_tokenizer(str(tmp_path / "t.tiktoken"))
    (tmp_path / "a.jsonl").write_text(json.dumps(conversation(("user", "U"), ("assistant", "A"))))
    options = dict(form="conversations", json_keys=["messages"])
    want = [256, *b"user\nU", 257, 10, 256, *b"assistant\n"], [*b"A", 257, 10, 258]
    preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "x"), tokenizer, "t", **options)
    assert documents(tmp_path / "x") == [list(want)]
    template = ChatTemplate(CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}", {}, special)
    preprocess([str(tmp_path / "a.jsonl")], str(tmp_path / "y"), tokenizer, "t", template=template, **options)
    assert documents(tmp_path / "y") == [list(want)]


def test_workers_render_conversations_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setattr(read_input, "BATCH_BYTES", 500)
    lines = [json.dumps(conversation(("user", "U" * i), ("assistant", "A" * i))) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = dict(form="conversations", json_keys=["messages"])
    metas = [run([str(tmp_path / "a.jsonl")], tmp_path / f"w{n}", num_workers=n, **options) for n in (1, 2)]
    assert metas[0] == metas[1]
    assert (metas[0]["num_documents"], metas[0]["num_sequences"]) == (20, 40)


def test_an_empty_context_keeps_the_alternation(tmp_path):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, ())
    (tmp_path / "a.jsonl").write_text(json.dumps(conversation(("assistant", "A"), ("assistant", "B"), ("user", "U"))))
    run([str(tmp_path / "a.jsonl")], tmp_path / "x", form="conversations", json_keys=["messages"], template=template)
    assert texts(tmp_path / "x") == [["", "A", "", "B", "U"]]


# Takes out earlier answers, as templates of models that think take out their thoughts.
FORGETFUL = "{% for m in messages %}{{ m.role[0] }}{{ m.content if loop.last or m.role == 'user' }}{% endfor %}"


@pytest.mark.parametrize(
    "record, template, message",
    [
        (conversation(*TURNS), "{{ messages | length }}", "line 1: chat template: .*not rendered as a prefix"),
        (conversation(*TURNS), FORGETFUL, "line 1: chat template: .*not rendered as a prefix"),
        (conversation(*TURNS), "{{ raise_exception('no system') }}", "line 1: chat template: .*no system"),
        (conversation(*TURNS), "{{ messages[0].nothing.more }}", "line 1: chat template: UndefinedError"),
        (conversation(*TURNS), "{{ ''.__class__.__mro__ }}", "line 1: chat template: SecurityError"),
        (conversation(*TURNS[:2]), None, "line 1: .*no message with the role assistant"),
        ({"messages": "hello"}, None, "line 1: the field 'messages' is no list of messages with roles"),
        ({"text": "hello", "id": 1}, None, "line 1: no conversation: it has the fields 'text', 'id'; known"),
        (conversation(("user", "<eos>"), ("assistant", "A")), None, "line 1: .*spells the special token <eos>"),
    ],
)
def test_conversations_that_cannot_be_cut_are_refused_or_skipped(tmp_path, record, template, message):
    source = template or "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = dict(form="conversations", json_keys=["messages"], template=ChatTemplate(source, {}, ["<eos>"]))
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        run([str(tmp_path / "a.jsonl")], tmp_path / "x", **options)
    refuse_nothing([str(tmp_path / "a.jsonl")], tmp_path / "x", **options)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl line 2: not JSON"),
        (
            "a.jsonl",
            b'{"text": "ok"}\n{"other": 1}\n',
            "a.jsonl line 2: no field 'text' among 'other'; use --json_keys",
        ),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 1}\n', "a.jsonl line 2: the field 'text' is no text"),
        ("a.jsonl", b'{"text": "ok"}\n["text"]\n', "a.jsonl line 2: not an object with the field 'text'"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\\ud800"}\n', "a.jsonl line 2: not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n' + b"[" * 100_000 + b"\n", "a.jsonl line 2: not JSON"),
        ("a.txt", b"ok\nok\n\xff\n", "a.txt line 3: not UTF-8"),
    ],
)
@pytest.mark.fault
def test_bad_documents_stop_with_file_and_line_or_are_counted(tmp_path, name, content, message, caplog):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        run([str(tmp_path / name)], tmp_path / "x")
    assert not (tmp_path / "x.bin").exists()
    if name == "a.txt":
        refuse_nothing([str(tmp_path / name)], tmp_path / "x")
    else:
        assert run([str(tmp_path / name)], tmp_path / "x", on_error="skip")["num_skipped"] == 1
    assert message in caplog.text


def test_errors_name_the_line_in_any_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(read_input, "BATCH_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' * 30 + "\n[]\n")
    with pytest.raises(ValueError, match="a.jsonl line 32: not an object"):
        run([str(tmp_path / "a.jsonl")], tmp_path / "x")


def test_an_error_in_a_worker_reaches_the_caller(tmp_path):
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="a.jsonl line 1"):
        run([str(tmp_path / "a.jsonl")], tmp_path / "x", num_workers=2)


def test_command_line_builds_a_dataset_without_importing_jax(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "*.txt"), "--output_prefix", str(tmp_path / "x")]
    code = (
        "import sys; from megajax.data.preprocess import main; main(sys.argv[1:]); "
        "assert not {'jax', 'grain', 'sentencepiece'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, *arguments, "--workers=1", "--no-append_eod"]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "1 documents, 5 tokens (uint16) of the tokenizer bytes" in out.stdout
    assert IndexedDataset(tmp_path / "x").read(0).tolist() == list(b"hello")


def refused(arguments: list[str], capsys) -> str:
    """The one line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--input none* --output_prefix=x --tokenizer=bytes", "--input: no file matches none*"),
        ("--input a --output_prefix=x --tokenizer=bytes --worker=2", "--worker=2 is unknown; did you mean --workers?"),
        ("--input a", "arguments are required: --output_prefix; see python -m megajax.data.preprocess"),
        ("merge --input a --output_prefix=x --overwrit", "--overwrit is unknown; did you mean --overwrite?"),
        ("verify --prefix a --output=x", "--output=x is unknown; see python -m megajax.data.preprocess verify --help"),
        ("inspect --prefix a --sequence=8", "--sequence=8 is unknown; did you mean --sequence_length?"),
    ],
)
def test_wrong_options_of_each_command_are_refused_in_one_line(arguments, message, capsys):
    assert message in refused(arguments.split(), capsys)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; getrusage counts the parent's memory too")
def test_memory_does_not_grow_with_the_input(tmp_path):
    peaks = []
    for megabytes in (4, 24):
        line = json.dumps({"text": "word " * 2000}) + "\n"
        (tmp_path / "a.jsonl").write_text(line * (megabytes * 1_000_000 // len(line)))
        code = (
            "import sys; from megajax.data.preprocess import main; main(sys.argv[1:]); "
            "print(*[line for line in open('/proc/self/status') if 'VmHWM' in line])"
        )
        arguments = ["--input", str(tmp_path / "a.jsonl"), "--output_prefix", str(tmp_path / "x"), "--tokenizer=bytes"]
        command = [sys.executable, "-c", code, *arguments, "--workers=1", "--overwrite"]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2]))
    assert peaks[1] < peaks[0] + 8_000  # kB, of the 20,000 added


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt"])
def test_a_sentencepiece_model_is_trained_on_the_documents_and_recorded(tmp_path, kind):
    words = ["tokenizer", "preprocess", "sentence", "document", "language", "model"]
    lines = [" ".join(random.Random(i).choices(words, k=20)) for i in range(200)]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(path, {"text": lines})
    elif kind == "txt":
        path.write_text("\n".join(lines))
    else:
        content = "\n".join(json.dumps({"text": line}) for line in lines).encode()
        path.write_bytes(pack(content, path.suffix))
    prefix = str(tmp_path / "out" / "x")
    main(["--input", str(path), "--output_prefix", prefix, "--tokenizer=sentencepiece:320", "--workers=1"])
    meta = json.loads((tmp_path / "out" / "x.meta.json").read_text())
    assert meta["tokenizer"] == prefix + ".tokenizer.model"
    tokenizer = load_tokenizer(meta["tokenizer"])
    assert (tokenizer.vocab_size, tokenizer.identity) == (320, meta["tokenizer_identity"])
    assert tokenizer.token_id("tokenizer") is not None  # learnt from this text
    assert tokenizer.decode(IndexedDataset(prefix).read(0)[:-1].tolist()).startswith(lines[0])


def test_training_on_text_that_is_not_there_is_refused_by_line_and_leaves_no_model(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output_prefix", str(tmp_path / "x")]
    arguments += ["--tokenizer=sentencepiece:300", "--workers=1"]
    assert "a.jsonl line 1: no field 'text' among 'body'" in refused(arguments, capsys)
    assert "data.tokenizer=sentencepiece:300 cannot be trained" in refused([*arguments, "--on_error=skip"], capsys)
    assert not list(tmp_path.glob("x*"))


def test_inspect_is_a_command_of_preprocess(corpus, tmp_path, capsys):
    run(corpus[0], tmp_path / "x")
    main(["inspect", "--prefix", str(tmp_path / "x")])
    assert "documents 305" in capsys.readouterr().out


def test_an_existing_dataset_is_only_replaced_with_overwrite(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    arguments = ["--input", str(tmp_path / "a.txt"), "--output_prefix", str(tmp_path / "x"), "--workers=1"]
    main([*arguments, "--tokenizer=bytes"])
    before = (tmp_path / "x.bin").read_bytes()
    capsys.readouterr()
    error = refused([*arguments, "--tokenizer=sentencepiece:300"], capsys)
    assert "x.bin exists (tokenizer bytes, documents 1); use " in error and "--overwrite" in error
    error = refused(["merge", "--input", str(tmp_path / "x"), "--output_prefix", str(tmp_path / "x")], capsys)
    assert "x.bin exists" in error and "--overwrite" in error
    assert (tmp_path / "x.bin").read_bytes() == before and not list(tmp_path.glob("*.model"))
    (tmp_path / "a.txt").write_text("hello again")
    main([*arguments, "--tokenizer=bytes", "--overwrite"])
    assert texts(tmp_path / "x") == [["hello again"]]


def test_inspect_shows_the_text_and_on_which_parts_of_a_conversation_there_is_a_loss(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(conversation(*turns)) for turns in [TURNS, TURNS[1:]]))
    run([str(tmp_path / "a.jsonl")], tmp_path / "x", form="conversations", json_keys=["messages"])
    main(["inspect", "--prefix", str(tmp_path / "x"), "--show=1"])
    shown = capsys.readouterr().out.partition("--- ")[2]
    assert shown.startswith(f"{tmp_path / 'x'}, document 0, ") and "document 1" not in shown
    assert "\n[no loss] <|im_start|>system\nS<|im_end|>\n" in shown and "\n[loss] A1<|im_end|>\n" in shown
    (tmp_path / "b.txt").write_text("long " * 200)
    run([str(tmp_path / "b.txt")], tmp_path / "y")
    main(["inspect", "--prefix", str(tmp_path / "y"), "--show=5"])
    shown = capsys.readouterr().out
    assert "document 0, 1,001 tokens\nlong long" in shown and "... 501 more tokens" in shown and "[" not in shown
    (tmp_path / "y.meta.json").unlink()
    error = refused(["inspect", "--prefix", str(tmp_path / "y"), "--show=5"], capsys)
    assert "y.meta.json does not exist; name the tokenizer with --tokenizer" in error
