"""Conversations with images: one image token each, the images in the order of the tokens, and bad ones by name."""

import gzip
import io
import itertools
import json
import logging
import re
import tarfile

import numpy as np
import PIL.Image
import pytest

from megajax.audio import wav
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.indexed.images import ImageTable
from megajax.data.inspect import describe
from megajax.data.preprocess import main
from megajax.data.tokenizers.load import load_tokenizer
from megajax.images.decode import decode

# A template that writes images itself, as those of vision-language models do, and one that knows text only.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<begin><image><end>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<image>", "<audio>", "<begin>", "<end>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
COLORS = ["red", "green", "blue", "white", "black"]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    """A tokenizer of bytes with special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def drawn(color: str, size=(6, 4), form="PNG", **options) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", size, color).save(file, form, **options)
    return file.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """Files red.png, ..., each one pixel wider than the one before, in a folder."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for number, color in enumerate(COLORS):
        name = f"{color}.png" if number < 3 else f"more/{color}.png"
        (folder / name).write_bytes(drawn(color, (6 + number, 4)))
    return folder


@pytest.fixture
def prepare(tmp_path, tokenizer_path, capsys):
    """Runs `preprocess` on files; returns what it printed, or for an exit its error."""

    def run(*files, prefix=tmp_path / "x", tokenizer=tokenizer_path, image_token="<image>", **options):
        flags = [f"--{name}={value}" for name, value in {"workers": 1, **options}.items()]
        flags += [f"--image_token={image_token}"] if image_token else []
        status = None
        try:
            main(["--conversations", "--input", *map(str, files), f"--output_prefix={prefix}", "--overwrite",
                  f"--tokenizer={tokenizer}", *flags])  # fmt: skip
        except SystemExit as error:
            status = error.code
        output = capsys.readouterr()
        return output.err if status else output.out

    return run


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(prefix, tokenizer_path) -> list[list[str]]:
    dataset = IndexedDataset(prefix)
    tokenizer = load_tokenizer(tokenizer_path)
    bounds = itertools.pairwise(dataset.document_indices.tolist())
    return [[tokenizer.decode(dataset.read(i).tolist()) for i in range(*pair)] for pair in bounds]


def colors(prefix) -> list[list[str]]:
    """Of the images of each document, from their pixels."""
    table = ImageTable(prefix)
    names = {tuple(PIL.Image.new("RGB", (1, 1), name).getpixel((0, 0))): name for name in COLORS}
    found = []
    for begin, end in itertools.pairwise(table.first.tolist()):
        images = [decode(table.read(i), table.name(i)) for i in range(begin, end)]
        assert [[image.height, image.width] for image in images] == table.sizes[begin:end].tolist()
        found.append([names[image.getpixel((0, 0))] for image in images])
    return found


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


ANSWER = {"role": "assistant", "content": "fine"}
LLAVA = [
    {"image": "red.png", "conversations": [
        {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"},
        {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "yes"}]},
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
    {"image": ["green.png", "more/white.png"], "conversations": [
        {"from": "human", "value": "<image>\n<image>\nSame?"}, {"from": "gpt", "value": "no"}]},
    {"image": ["blue.png", "red.png"], "conversations": [
        {"from": "system", "value": "Be brief"}, {"from": "human", "value": "Now <image> or\n<image>"},
        {"from": "gpt", "value": "no"}]},
]  # fmt: skip
LLAVA_COLORS = [["red"], [], ["green", "white"], ["blue", "red"]]


def test_llava_records_with_a_template_of_text_stay_what_they_are(prepare, pictures, tmp_path, tokenizer_path):
    lines = write_lines(tmp_path / "a.jsonl", *LLAVA)
    assert "4 documents" in (printed := prepare(lines, images=pictures))
    assert printed.endswith("bytes of text, 5 images, 0 skipped\n")
    assert colors(tmp_path / "x") == LLAVA_COLORS
    first, second, third, fourth = texts(tmp_path / "x", tokenizer_path)
    assert first == [
        "<|im_start|>user\n<image>\nWhat?<|im_end|>\n<|im_start|>assistant\n", "red<|im_end|>\n",
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>\n<|endoftext|>",
    ]  # fmt: skip
    assert second[0] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert third[0] == "<|im_start|>user\n<image>\n<image>\nSame?<|im_end|>\n<|im_start|>assistant\n"
    assert fourth[0].startswith("<|im_start|>system\nBe brief<|im_end|>\n")
    assert "<|im_start|>user\nNow <image>\n or\n<image><|im_end|>" in fourth[0]


def test_a_template_that_writes_images_gets_parts(prepare, pictures, tmp_path, tokenizer_path):
    template = tmp_path / "template.jinja"
    template.write_text(PARTS)
    prepare(write_lines(tmp_path / "a.jsonl", *LLAVA), images=pictures, chat_template=template)
    assert colors(tmp_path / "x") == LLAVA_COLORS
    first, second, third, fourth = texts(tmp_path / "x", tokenizer_path)
    assert first[0] == "<|im_start|>user\n<begin><image><end>What?<|im_end|>\n<|im_start|>assistant\n"
    assert second == ["<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "Hi<|im_end|>\n<|endoftext|>"]
    assert third[0].startswith("<|im_start|>user\n<begin><image><end><begin><image><end>Same?<|im_end|>")
    assert "user\nNow <begin><image><end> or\n<begin><image><end><|im_end|>" in fourth[0]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_array_is_read_as_its_records(prepare, pictures, tmp_path, suffix):
    content = json.dumps(LLAVA, indent=1).encode()
    (tmp_path / f"a{suffix}").write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    prepare(tmp_path / f"a{suffix}", images=pictures)
    prepare(write_lines(tmp_path / "a.jsonl", *LLAVA), prefix=tmp_path / "y", images=pictures)
    for part in ("bin", "idx", "images"):
        assert (tmp_path / f"x.{part}").read_bytes() == (tmp_path / f"y.{part}").read_bytes()


def test_an_array_that_is_damaged_is_refused_by_record(prepare, pictures, tmp_path):
    (tmp_path / "b.json").write_text(json.dumps([*LLAVA[:2], {"conversations": 1}]))
    assert "b.json record 3: the field 'conversations' is no list" in prepare(tmp_path / "b.json", images=pictures)
    (tmp_path / "b.json").write_text(json.dumps(LLAVA)[:-20])
    assert "b.json after record 3: cannot be read" in prepare(tmp_path / "b.json", images=pictures)


def test_messages_name_their_images_in_parts_or_in_a_field(prepare, pictures, tmp_path, tokenizer_path):
    absolute = str(pictures / "blue.png")
    records = [
        {"messages": [user({"type": "image", "image": "red.png"}, text("What?")), ANSWER]},
        {"messages": [user(text("What?"), {"type": "image_url", "image_url": {"url": "green.png"}}), ANSWER]},
        {"messages": [user({"type": "image_url", "image_url": {"url": f"file://{absolute}"}}), ANSWER]},
        {"messages": [user({"type": "image", "path": absolute}), ANSWER, user(text("a"), text("b")), ANSWER]},
        {"images": ["red.png", "blue.png"], "messages": [user({"type": "image"}, {"type": "image"}), ANSWER]},
        {"images": ["red.png"], "messages": [{"role": "user", "content": "<image>What?"}, ANSWER]},
        {"question": "What?", "answer": "red", "image": "red.png"},
        {"caption": "all blue", "image": "blue.png"},
        {"messages": [{"role": "user", "content": "text"}, ANSWER]},
    ]  # fmt: skip
    prepare(write_lines(tmp_path / "a.jsonl", *records), images=pictures)
    assert colors(tmp_path / "x") == [
        ["red"], ["green"], ["blue"], ["blue"], ["red", "blue"], ["red"], ["red"], ["blue"], [],
    ]  # fmt: skip
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    questions = ["<image>\nWhat?", "What?<image>", "<image>", "<image>", "<image>\n<image>", "<image>\nWhat?"]
    questions += ["<image>\nWhat?", "<image>", "text"]
    found = texts(tmp_path / "x", tokenizer_path)
    assert [document[0] for document in found] == [begin + question + end for question in questions]
    assert found[3][2] == begin + "ab" + end
    assert found[7][1] == "all blue<|im_end|>\n<|endoftext|>"


def test_images_lie_beside_the_records_unless_a_folder_is_named(prepare, pictures, tmp_path):
    lines = write_lines(pictures / "a.jsonl", {"image": "red.png", "caption": "red"})
    prepare(lines)
    assert colors(tmp_path / "x") == [["red"]]
    prepare(pictures, prefix=tmp_path / "y")  # the folder, whose other files are the images
    assert colors(tmp_path / "y") == [["red"]]
    assert "the image" in prepare(lines, images=pictures / "more")


BAD = [
    ({"image": "red.png", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
     "the text has 0 placeholders of images, but there are 1 images"),
    ({"image": "red.png", "conversations": [{"from": "human", "value": "<image><image>"}]},
     "the text has 2 placeholders of images, but there are 1 images"),
    ({"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}]},
     "the text has 1 placeholders of images, but there are 0 images"),
    ({"image": "red.png", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<image>"}]},
     "an answer has an image"),
    ({"image": "../x.png", "caption": "a"}, "the image ../x.png is not in "),
    ({"image": "more/../../x.png", "caption": "a"}, "the image more/../../x.png is not in "),
    ({"image": "/etc/passwd", "caption": "a"}, "the image /etc/passwd is not in "),
    ({"image": "http://example.com/a.png", "caption": "a"}, "nothing is fetched"),
    ({"image": "data:image/png;base64,AAAA", "caption": "a"}, "put it in a file"),
    ({"image": "none.png", "caption": "a"}, "none.png does not exist"),
    ({"image": "\ud83d.png", "caption": "a"}, "surrogates not allowed"),
    ({"image": 5, "caption": "a"}, "must be a path or a list of paths"),
    ({"image": "red.png"}, "no conversation: it needs messages, conversations, a question with an answer, or a"),
    ({"image": "red.png", "messages": [user({"type": "image", "image": "red.png"}), ANSWER]}, "are named twice"),
    ({"messages": [user({"type": "video"}), ANSWER]}, "a part of a message has the type 'video'"),
    ({"messages": [user({"type": "image", "image": "red.png"}, text("<image>")), ANSWER]}, "spells the special token"),
    ({"messages": [user({"type": "image", "image": "red.png"})]}, "no message with the role assistant"),
    ({"image": "cut.jpg", "caption": "a"}, "cut.jpg: the image is damaged"),
    ({"image": "empty.jpg", "caption": "a"}, "empty.jpg: the image is empty"),
    ({"image": "bomb.png", "caption": "a"}, "bomb.png: the image is too large"),
    ([], "not an object"),
]  # fmt: skip


@pytest.fixture
def damaged(pictures):
    jpeg = drawn("red", (300, 300), "JPEG")
    (pictures / "cut.jpg").write_bytes(jpeg[: len(jpeg) * 3 // 4])
    (pictures / "empty.jpg").write_bytes(b"")
    bomb = bytearray(drawn("red", form="GIF"))
    bomb[6:10] = b"\xff\xff\xff\xff"  # width and height
    (pictures / "bomb.png").write_bytes(bomb)
    return pictures


def test_a_bad_record_is_named_or_left_out_and_counted(prepare, damaged, tmp_path, caplog):
    good = {"image": "red.png", "caption": "red"}
    for record, why in BAD:
        found = prepare(write_lines(tmp_path / "a.jsonl", good, record), images=damaged)
        assert found.startswith("error: "), found
        assert f"{tmp_path}/a.jsonl line 2: " in found
        assert why in found, found
        assert found.endswith("repair it, or leave it out with preprocess --on_error=skip\n")
    lines = write_lines(tmp_path / "b.jsonl", good, *(record for record, _ in BAD), good)
    with caplog.at_level(logging.WARNING):
        printed = prepare(lines, images=damaged, on_error="skip", workers=2)
    assert printed.endswith(f"2 images, {len(BAD)} skipped\n")
    assert colors(tmp_path / "x") == [["red"], ["red"]]
    for (_, why), record in zip(BAD, caplog.records, strict=True):
        assert why in record.getMessage()


@pytest.mark.parametrize(("written", "count"), [
    ("{% if loop.first %}<image>{% endif %}", 1),
    ("<image>{% if loop.last %}<image>{% endif %}", 3),
])  # fmt: skip
def test_a_template_that_drops_or_repeats_images_is_refused(written, count, prepare, pictures, tmp_path):
    # with an image and a text it writes one token, so it counts as a template of images
    (tmp_path / "template.jinja").write_text(PARTS.replace("<image>", written))
    lines = write_lines(tmp_path / "a.jsonl", LLAVA[0], {"image": ["red.png", "blue.png"], "caption": "two"})
    found = prepare(lines, images=pictures, chat_template=tmp_path / "template.jinja")
    assert f"a.jsonl line 2: the chat template wrote {count} image tokens for 2 images" in found


def test_output_does_not_depend_on_workers_or_on_the_run(prepare, pictures, tmp_path):
    rng = np.random.default_rng(0)
    records = [
        {"image": (names := [f"{color}.png" for color in rng.choice(COLORS[:3], rng.integers(0, 4))]),
         "conversations": [{"from": "human", "value": "<image>\n" * len(names) + "x" * int(rng.integers(500))},
                           {"from": "gpt", "value": "y"}]}
        for _ in range(300)
    ]  # fmt: skip
    lines = write_lines(tmp_path / "a.jsonl", *records)
    for prefix, workers in (("one", 1), ("again", 1), ("three", 3)):
        prepare(lines, prefix=tmp_path / prefix, images=pictures, workers=workers)
    for part in ("bin", "idx", "images", "meta.json"):
        first, second, third = ((tmp_path / f"{name}.{part}").read_bytes() for name in ("one", "again", "three"))
        assert first == second == third
    assert colors(tmp_path / "three") == [[name.removesuffix(".png") for name in record["image"]] for record in records]


def test_the_image_token_is_one_of_the_tokenizer(prepare, pictures, tmp_path, tokenizer_path):
    lines = write_lines(tmp_path / "a.jsonl", {"image": "red.png", "caption": "red"})
    found = prepare(lines, images=pictures, tokenizer="bytes")
    assert "--image_token=<image> is 7 tokens of this tokenizer; name one of its special tokens" in found
    assert "is no folder" in prepare(lines, images=tmp_path / "none")
    assert "name the token that stands for an image" in prepare(lines, images=pictures, image_token=None)
    assert "--json_keys is not used" in prepare(lines, json_keys="messages")
    assert "will not have the token" in prepare(lines, tokenizer="sentencepiece:300")
    assert "is no .jsonl, .json or .tar" in prepare(pictures / "red.png")
    # the token need not be called as the placeholder
    prepare(lines, images=pictures, image_token="<begin>")
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    image_id = load_tokenizer(tokenizer_path).token_id("<begin>")
    assert (meta["image_token"], meta["image_id"], meta["num_images"]) == ("<begin>", image_id, 1)
    dataset = IndexedDataset(tmp_path / "x")
    assert sum((dataset.read(i) == image_id).sum() for i in range(len(dataset))) == 1


def test_a_dataset_that_replaces_one_with_images_has_none(prepare, pictures, tmp_path):
    prepare(write_lines(tmp_path / "a.jsonl", {"image": "red.png", "caption": "red"}), images=pictures)
    assert (tmp_path / "x.images").exists()
    lines = write_lines(tmp_path / "b.jsonl", {"messages": [{"role": "user", "content": "a"}, ANSWER]})
    assert "images" not in prepare(lines, image_token=None)
    assert not (tmp_path / "x.images").exists()


def test_verify_merge_and_inspect_know_images(prepare, pictures, tmp_path, capsys):
    prefix = str(tmp_path / "x")
    prepare(write_lines(tmp_path / "a.jsonl", *LLAVA), images=pictures)
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--prefix", prefix])
    assert "4 documents, 5 images, sha256" in capsys.readouterr().out
    main(["inspect", "--prefix", prefix])
    assert "images 5, 1.25 per document, median height 4 and width 7" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["merge", "--input", prefix, prefix, f"--output_prefix={prefix}y"])
    assert "has images, which are not merged" in capsys.readouterr().err
    (pictures / "red.png").write_bytes(drawn("red", (60, 60)))
    with pytest.raises(SystemExit, match="1"):
        main(["verify", "--prefix", prefix])
    assert "red.png has " in capsys.readouterr().err


def write_tar(path, members, form=tarfile.USTAR_FORMAT):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def as_json(record) -> bytes:
    return json.dumps(record).encode()


SAMPLES = [
    ("a.json", as_json({"id": 1, "image": "/elsewhere/x.jpg", "conversations": LLAVA[0]["conversations"]})),
    ("a.png", drawn("red")),
    ("folder/a.JPG", drawn("white", (30, 50), "JPEG")),
    ("folder/a.txt", "hübsch".encode()),
    ("b.0.png", drawn("green")),
    ("b.1.png", drawn("blue")),
    ("b.json", as_json({"messages": [user({"type": "image"}, text("or"), {"type": "image", "image": "x"}), ANSWER]})),
    ("c.jpg", drawn("black", form="JPEG")),
    ("c.json", as_json({"context": "What?", "answers": ["dark", "black", "night", "black"], "url": "http://"})),
    ("d.png", drawn("blue")),
    ("d.txt", b"a picture"),
    ("d.json", as_json({"width": 6, "height": 4})),
    ("e.json", as_json({"messages": [{"role": "user", "content": "text only"}, ANSWER]})),
]
SAMPLE_COLORS = [["red"], ["white"], ["green", "blue"], ["black"], ["blue"], []]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_a_tar_are_read_in_place(form, prepare, tmp_path, tokenizer_path):
    prefix = "long" * 40 + "/" if form != tarfile.USTAR_FORMAT else ""  # which needs members of its own in the tar
    members = [(prefix + name, content) for name, content in SAMPLES]
    tar = write_tar(tmp_path / "a.tar", [("./", b""), ("README", b"no sample"), *members], form)
    assert "6 documents" in prepare(tar)
    assert colors(tmp_path / "x") == SAMPLE_COLORS
    found = texts(tmp_path / "x", tokenizer_path)
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    questions = ["<image>\nWhat?", "<image>", "<image>\nor<image>", "<image>\nWhat?", "<image>", "text only"]
    assert [document[0] for document in found] == [begin + question + end for question in questions]
    answers = ["red", "hübsch", "fine", "black", "a picture", "fine"]
    assert [document[1].split("<|im_end|>")[0] for document in found] == answers
    size = tar.stat().st_size
    assert (tmp_path / "x.images").stat().st_size < size
    table = ImageTable(tmp_path / "x")
    with tarfile.open(tar) as opened:
        offsets = [info.offset_data for info in opened if info.name.lower().endswith((".png", ".jpg"))]
    assert [table.name(i) for i in range(len(table))] == [f"{tar} at byte {offset}" for offset in offsets]


PARTS_WITH_SOUND = PARTS.replace("{% else %}", "{% elif c['type'] == 'audio' %}<audio>{% else %}")


def sound(length: int) -> bytes:
    return wav.encode(np.sin(np.arange(length)))


@pytest.mark.parametrize("template", [None, PARTS_WITH_SOUND], ids=["text", "parts"])
def test_clips_of_sound_stand_beside_images_in_the_order_of_the_text(
    template, prepare, pictures, tmp_path, tokenizer_path
):
    for name, length in (("a", 400), ("b", 1600)):
        (pictures / f"{name}.wav").write_bytes(sound(length))
    lines = write_lines(
        tmp_path / "a.jsonl",
        {"messages": [
            user({"type": "audio", "audio": "a.wav"}, text("or"), {"type": "image", "image": "red.png"}), ANSWER]},
        {"image": "red.png", "audio": ["b.wav", "a.wav"], "conversations": [
            {"from": "human", "value": "<audio>\n<image>\nor <audio>?"}, {"from": "gpt", "value": "no"}]},
        {"audio": "b.wav", "question": "Heard?", "answer": "yes"},
    )  # fmt: skip
    options = dict(images=pictures, audio_token="<audio>")
    if template:
        (tmp_path / "t.jinja").write_text(template)
        options["chat_template"] = tmp_path / "t.jinja"
    assert "6 images and clips" in prepare(lines, **options)
    table = ImageTable(tmp_path / "x")
    assert table.first.tolist() == [0, 2, 5, 6]
    assert table.sizes.tolist() == [[400, 0], [4, 6], [1600, 0], [4, 6], [400, 0], [1600, 0]]
    dataset = IndexedDataset(tmp_path / "x")
    meta = json.loads((tmp_path / "x.meta.json").read_text())
    names = {meta["image_id"]: "image", meta["audio_id"]: "audio"}
    contexts = [dataset.read(int(i)).tolist() for i in dataset.document_indices[:-1]]
    order = [[names[token] for token in context if token in names] for context in contexts]
    assert order == [["audio", "image"], ["audio", "image", "audio"], ["audio"]]
    assert "clips of sound 4, 1.33 per document, median 0.06 s" in describe(dataset)


def test_clips_of_a_tar_and_bad_ones(prepare, tmp_path, tokenizer_path):
    record = as_json({"messages": [user({"type": "audio"}, {"type": "image"}), ANSWER]})
    tar = write_tar(tmp_path / "a.tar", [("a.png", drawn("red")), ("a.wav", sound(320)), ("a.json", record)])
    prepare(tar, audio_token="<audio>")
    assert ImageTable(tmp_path / "x").sizes.tolist() == [[320, 0], [4, 6]]
    (tmp_path / "bad.wav").write_bytes(sound(100))
    for record, message in (
        ({"audio": "bad.wav", "question": "?", "answer": "a"}, "a clip of 100 samples is shorter than 160"),
        ({"audio": "none.wav", "question": "?", "answer": "a"}, "the clip .*none.wav does not exist"),
        ({"audio": "bad.wav", "messages": [user(text("?")), ANSWER]}, "0 placeholders of clips, but there are 1 clips"),
        ({"messages": [user({"type": "input_audio"}), ANSWER]}, "type 'input_audio'; text, image and image_url, audio"),
    ):
        assert re.search(message, prepare(write_lines(tmp_path / "a.jsonl", record), audio_token="<audio>"))
    # without --audio_token, <audio> is text
    prepare(write_lines(tmp_path / "a.jsonl", {"messages": [user(text("2 < audio>")), ANSWER]}))
    assert "2 < audio>" in texts(tmp_path / "x", tokenizer_path)[0][0]


def test_an_energon_folder_is_its_tars(prepare, tmp_path):
    folder = tmp_path / "energon"
    write_tar(folder / "shard_1.tar", SAMPLES[2:4])
    write_tar(folder / "shard_0.tar", SAMPLES[:2])
    (folder / "shard_0.tar.idx").write_bytes(bytes(16))
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / ".info.json").write_text('{"shard_counts": {"shard_0.tar": 1, "shard_1.tar": 1}}')
    (folder / ".nv-meta" / "index.sqlite").write_bytes(b"SQLite format 3\0")
    prepare(folder)
    assert colors(tmp_path / "x") == SAMPLE_COLORS[:2]


def test_tars_give_the_same_with_any_number_of_workers(prepare, tmp_path):
    samples = [
        (f"{i}.{suffix}", content)
        for i in range(100)
        for suffix, content in (("png", drawn(COLORS[i % 5], (5 + i % 7, 4))), ("txt", b"picture"))
    ]
    tars = [write_tar(tmp_path / f"{name}.tar", samples) for name in "ab"]
    for prefix, workers in (("one", 1), ("two", 2)):
        prepare(*tars, prefix=tmp_path / prefix, workers=workers)
    for part in ("bin", "idx", "images", "meta.json"):
        assert (tmp_path / f"one.{part}").read_bytes() == (tmp_path / f"two.{part}").read_bytes()
    assert colors(tmp_path / "two") == [[COLORS[i % 5]] for i in range(100)] * 2


def test_a_bad_sample_of_a_tar_is_named_or_left_out(prepare, tmp_path):
    bad = [
        ([("x.json", b"{")], "not JSON"),
        ([("x.txt", b"\xff")], "its .txt is not UTF-8"),
        ([("x.png", drawn("red"))], "neither a .json nor a .txt"),
        ([("x.png", drawn("red")[:45]), ("x.txt", b"a")], "the image is damaged"),
        ([("x.png", drawn("red")), ("x.json", as_json(LLAVA[1]))], "there are 1 images"),
        ([("x.json", as_json({"image": "../../x.png", "caption": "a"}))], "the image ../../x.png is not in "),
    ]
    for members, why in bad:
        tar = write_tar(tmp_path / "b.tar", [*SAMPLES[:2], *members])
        found = prepare(tar)
        assert f"{tar} sample x: " in found
        assert why in found
        assert "1 images, 1 skipped" in prepare(tar, on_error="skip")


def test_a_damaged_tar_is_refused_wherever_it_ends(prepare, tmp_path):
    tar = write_tar(tmp_path / "b.tar", SAMPLES)
    whole = tar.read_bytes()
    with tarfile.open(tar) as opened:
        second = opened.getmembers()[2]  # of which the first is whole in front of it
    wrong = bytearray(whole)
    wrong[second.offset + 150] ^= 1
    for content in (whole[: second.offset], whole[: second.offset + 100], whole[: second.offset_data + 20], wrong):
        tar.write_bytes(content)
        assert re.search(r"b\.tar: cannot be read, copy it again|b\.tar ends within the image", prepare(tar))
        assert "1 images, " in prepare(tar, on_error="skip")
        assert colors(tmp_path / "x") == [["red"]]
    tar.write_bytes(b"no tar at all" * 100)
    assert "b.tar: cannot be read, copy it again" in prepare(tar)


def test_a_compressed_tar_is_refused(prepare, tmp_path):
    compressed = tmp_path / "c.tar.gz"
    compressed.write_bytes(gzip.compress(write_tar(tmp_path / "c.tar", SAMPLES).read_bytes()))
    assert "decompress a .tar first" in prepare(compressed)
