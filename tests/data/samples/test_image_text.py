"""Pairs of image and text: what a sample holds, and what becomes of pairs that cannot be read."""

import json
import logging
import os
import pickle
import tarfile

import numpy as np
import pytest

from megajax.data.samples.image_text import ImageTextDataset, ImageTextFormat, index_lines
from megajax.data.tokenizers.tokenizer import BytesTokenizer

Image = pytest.importorskip("PIL.Image")
IMAGE, PAD = 300, 301


def write_pairs(folder, records, name="pairs.jsonl"):
    """A .jsonl file with a blank line after the first record; a record may be a raw line."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / name).write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    return str(folder / name)


def draw(path, colour=(10, 20, 30), size=(8, 6), mode="RGB"):
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def pairs(tmp_path):
    """Six pairs: image n is of grey 10 n, text n is "text n"."""
    for number in range(6):
        draw(tmp_path / f"{number}.png", (10 * number,) * 3)
    return write_pairs(tmp_path, [{"image": f"{n}.png", "text": f"text {n}"} for n in range(6)])


def image_text(path, num_samples=None, sequence_length=24, seed=0, cache_dir=None, line_range=None, **form):
    form = ImageTextFormat(**{"image_size": 4, "num_image_tokens": 3, "image_id": IMAGE, "pad_id": PAD, **form})
    line_range = line_range or (0, len(index_lines(path, None)[0]))
    return ImageTextDataset(
        path, BytesTokenizer(), line_range, num_samples, sequence_length, seed, sample_format=form, cache_dir=cache_dir
    )


def number_of(sample):
    return int(sample["image"][0, 0, 0]) // 10


def test_a_sample_is_image_tokens_prompt_text_end_and_padding(tmp_path):
    draw(tmp_path / "a.png")
    path = write_pairs(tmp_path, [{"image": "a.png", "prompt": "Why?", "text": "So."}])
    sample = image_text(path, sequence_length=14)[0]
    stream = [IMAGE] * 3 + [*b"Why?", *b"So.", 256]
    assert sample["tokens"].tolist() == stream + [PAD] * 3
    assert sample["labels"].tolist() == [PAD] * 2 + stream[3:] + [PAD] * 4
    assert sample["loss_mask"].tolist() == [0] * 6 + [1] * 4 + [0] * 4
    assert sample["positions"].tolist() == [*range(11), 0, 0, 0]
    assert sample["segment_ids"].tolist() == [1] * 11 + [0] * 3
    assert {name: (value.dtype.name, value.shape) for name, value in sample.items()} == {
        "image": ("uint8", (4, 4, 3)),
        "tokens": ("int32", (14,)),
        "labels": ("int32", (14,)),
        "loss_mask": ("float32", (14,)),
        "positions": ("int32", (14,)),
        "segment_ids": ("int32", (14,)),
    }


@pytest.mark.parametrize("length, learnt", [(8, "So"), (9, "So."), (10, "So.\0"), (11, "So.\0")])
def test_a_text_that_is_too_long_is_cut_at_its_end(tmp_path, length, learnt):
    draw(tmp_path / "a.png")
    path = write_pairs(tmp_path, [{"image": "a.png", "prompt": "Why?", "text": "So."}])
    sample = image_text(path, sequence_length=length)[0]
    labels = sample["labels"][sample["loss_mask"] > 0].tolist()
    assert labels == [256 if character == "\0" else ord(character) for character in learnt]


@pytest.mark.parametrize("size, box", [((16, 8), (2, 0)), ((8, 24), (0, 4)), ((2, 4), (0, 2)), ((8, 8), (0, 0))])
def test_an_image_is_resized_by_its_short_side_and_cut_to_the_middle(tmp_path, size, box):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png")
    scaled = image.resize((size[0] * 4 // min(size), size[1] * 4 // min(size)), Image.Resampling.BICUBIC)
    want = np.array(scaled.crop((*box, box[0] + 4, box[1] + 4))).astype(int)
    got = image_text(write_pairs(tmp_path, [{"image": "a.png", "text": "x"}]))[0]["image"]
    assert np.abs(got - want).max() <= 1  # fixed-point filters round


def test_a_long_thin_image_is_read_in_little_memory(tmp_path):
    draw(tmp_path / "a.png", size=(20_000, 1))
    path = write_pairs(tmp_path, [{"image": "a.png", "text": "x"}])
    assert image_text(path, image_size=224)[0]["image"].shape == (224, 224, 3)


@pytest.mark.parametrize("mode, name", [("L", "a.png"), ("P", "a.png"), ("RGBA", "a.png"), ("CMYK", "a.jpg")])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, name):
    draw(tmp_path / name, (51, 51, 51), mode=mode)
    image = image_text(write_pairs(tmp_path, [{"image": name, "text": "x"}]))[0]["image"]
    assert image.shape == (4, 4, 3)
    assert np.abs(image.astype(int) - 51).max() <= 3  # JPEG rounds


def test_images_in_tar_files_equal_those_in_a_folder(tmp_path):
    (tmp_path / "shards").mkdir()
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "shards" / "s.tar", "w") as shard:
        for number in range(5):
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).save(tmp_path / f"{number}.png")
            shard.add(tmp_path / f"{number}.png", f"deep/{number}.png")
    images = []
    for name in ("{}.png", "shards/s.tar:deep/{}.png"):
        records = [{"image": name.format(number), "text": "x"} for number in range(5)]
        path = write_pairs(tmp_path, records, f"{len(images)}.jsonl")
        for cache_dir in (None, str(tmp_path / "cache"), str(tmp_path / "cache")):
            dataset = image_text(path, cache_dir=cache_dir)
            images.append(np.stack([dataset[i]["image"] for i in range(5)]))
    assert len(np.unique(images[0], axis=0)) == 5
    assert all(np.array_equal(image, images[0]) for image in images)


def test_every_pair_of_the_range_comes_once_an_epoch_in_orders_that_differ(pairs):
    dataset = image_text(pairs, 30, line_range=(1, 6))
    assert len(dataset) == 30 and dataset.tokens_per_epoch == 5 * 24
    numbers = [number_of(dataset[i]) for i in range(30)]
    epochs = [numbers[begin : begin + 5] for begin in range(0, 30, 5)]
    assert all(sorted(epoch) == [1, 2, 3, 4, 5] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    for i in range(5):
        sample = image_text(pairs, line_range=(1, 6))[i]
        assert number_of(sample) == numbers[i]  # a shorter run begins as a longer one
        assert sample["tokens"][3:9].tolist() == [*f"text {numbers[i]}".encode()]


def test_samples_survive_pickling_and_the_pickle_is_small(pairs, tmp_path):
    dataset = image_text(pairs, 100, cache_dir=str(tmp_path / "cache"))
    blob = pickle.dumps(dataset)
    assert len(blob) < 2000
    for name, value in pickle.loads(blob)[50].items():
        assert np.array_equal(value, dataset[50][name])


BROKEN = {
    "not JSON": "{",
    "not an object": "[]",
    "no string in the field 'text'": {"image": "0.png"},
    "no string in the field 'image'": {"image": 3, "text": "x"},
    "no string in the field 'prompt'": {"image": "0.png", "text": "x", "prompt": None},
    "the text is empty": {"image": "0.png", "text": ""},
    "text cannot be encoded": '{"image": "0.png", "text": "\\ud800"}',
    "no text fits": {"image": "0.png", "prompt": "x" * 22, "text": "x"},
    "image none.png: no such file": {"image": "none.png", "text": "x"},
    "image .: no such file": {"image": ".", "text": "x"},
    "image short.jpg cannot be read": {"image": "short.jpg", "text": "x"},
    "image pairs.jsonl cannot be read": {"image": "pairs.jsonl", "text": "x"},
    "image s.tar:x.png: .*s.tar has no such member": {"image": "s.tar:x.png", "text": "x"},
    "image none.tar:x.png: .*none.tar does not exist": {"image": "none.tar:x.png", "text": "x"},
    "not an uncompressed tar": {"image": "bad.tar:x.png", "text": "x"},
}


@pytest.mark.parametrize("message, record", BROKEN.items())
def test_a_broken_pair_is_named_or_replaced_by_the_next_and_counted(tmp_path, caplog, message, record):
    for number in range(4):
        draw(tmp_path / f"{number}.png", (10 * number,) * 3)
    draw(tmp_path / "short.jpg", size=(64, 64))
    (tmp_path / "short.jpg").write_bytes((tmp_path / "short.jpg").read_bytes()[:-100])
    (tmp_path / "bad.tar").write_text("x" * 5000)
    with tarfile.open(tmp_path / "s.tar", "w"):
        pass
    records = [{"image": f"{number}.png", "text": "x"} for number in range(4)]
    records[1] = record
    path = write_pairs(tmp_path, records)
    broken = image_text(path).order.tolist().index(1)
    with pytest.raises(ValueError, match=rf"pairs.jsonl line 3: .*{message}.*data.on_error=skip"):
        image_text(path)[broken]
    with caplog.at_level(logging.WARNING, "megajax"):
        dataset = image_text(path, on_error="skip")
        for _ in range(2):
            assert number_of(dataset[broken]) == 2
    assert dataset.broken == {3}
    assert len(caplog.records) == 1 and "pairs.jsonl line 3" in caplog.text
    # the last pair of the range is followed by the first
    dataset = image_text(path, line_range=(0, 2), on_error="skip")
    assert [number_of(dataset[i]) for i in range(2)] == [0, 0]
    with pytest.raises(ValueError, match="none of the lines 1 to 2"):
        image_text(path, line_range=(1, 2), on_error="skip")[0]


def test_an_error_of_the_machine_is_not_taken_for_a_broken_pair(pairs, monkeypatch):
    dataset = image_text(pairs, on_error="skip")

    def fail(name, where):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(dataset, "_read", fail)
    with pytest.raises(OSError, match="Input/output"):
        dataset[0]


def test_text_that_holds_the_image_token_is_refused(tmp_path):
    draw(tmp_path / "a.png")
    path = write_pairs(tmp_path, [{"image": "a.png", "text": "axe"}])
    with pytest.raises(ValueError, match=f"line 1: text contains the image token {ord('x')}"):
        image_text(path, image_id=ord("x"))[0]


def test_a_rewritten_file_gets_new_indices(pairs, tmp_path):
    cache = str(tmp_path / "cache")
    assert image_text(pairs, cache_dir=cache)[0]["tokens"][3] == ord("t")
    size = os.path.getsize(pairs)
    texts = ["one", "two", "longer than those", "four", "five", "six"]
    write_pairs(tmp_path, [{"image": "0.png", "text": text} for text in texts])
    assert os.path.getsize(pairs) <= size
    with open(pairs, "a") as file:  # of the size that it had
        file.write(" " * (size - os.path.getsize(pairs)))
    os.utime(pairs, (1, 1))
    dataset = image_text(pairs, cache_dir=cache, sequence_length=40)
    samples = [dataset[i] for i in range(6)]
    found = [bytes(sample["labels"][sample["loss_mask"] > 0][:-1].tolist()).decode() for sample in samples]
    assert sorted(found) == sorted(texts)


def test_settings_that_leave_no_text_or_no_pair_are_refused_by_name(pairs):
    with pytest.raises(ValueError, match="data.num_image_tokens=24"):
        image_text(pairs, num_image_tokens=24)
    with pytest.raises(ValueError, match="data.image_size=0"):
        image_text(pairs, image_size=0)
    with pytest.raises(ValueError, match="lines 3 to 7 .* which has 6"):
        image_text(pairs, line_range=(3, 7))
    with pytest.raises(ValueError, match="none.jsonl does not exist"):
        image_text("none.jsonl", line_range=(0, 1))
    with pytest.raises(IndexError, match="sample 6"):
        image_text(pairs)[6]
