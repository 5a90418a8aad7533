"""Conversations with images: packed by tokens and patches, never cut, with the pixels that their tokens read."""

import dataclasses
import io
import pickle

import numpy as np
import pytest

from megajax.audio import wav
from megajax.audio.layout import ClipLayouts
from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.indexed.images import ImagePlace, ImageTableWriter
from megajax.data.samples.sft import PAD, SftFormat
from megajax.images.layout import CLASS_TOKEN, ImageLayouts
from megajax.images.rules import ImageRule
from megajax.media.rows import NEWLINE, TEXT, MediaInputs, assigned, ordered

PIL = pytest.importorskip("PIL.Image")
IMAGE = 99
PIXELS = ImageRule(resize="pixels", patch_size=2, merge=2, min_pixels=16, max_pixels=400)
INPUTS = MediaInputs(ImageLayouts(PIXELS), IMAGE, blocks=2, block_size=64, sees_itself=True)
T = 40


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Conversation d has d % 3 images of its own sizes; all pixels of image i of all have the colour i."""
    folder = tmp_path_factory.mktemp("images")
    sizes = [(8 + 4 * (d % 2), 8 + 4 * i) for d in range(12) for i in range(d % 3)]
    files = []
    for number, (height, width) in enumerate(sizes):
        file = io.BytesIO()
        PIL.new("RGB", (width, height), (number, number, number)).save(file, "PNG")
        (folder / f"{number}.png").write_bytes(file.getvalue())
        files.append(ImagePlace(str(folder / f"{number}.png"), 0, *[len(file.getvalue())] * 2, height, width))
    places = iter(files)
    path = folder / "chats"
    with IndexedDatasetWriter(path, np.uint16) as texts, ImageTableWriter(path) as images:
        for d in range(12):
            texts.add_document([np.array([IMAGE] * (d % 3) + [d + 1]), np.array([50 + d, 70])])
            images.add([[next(places) for _ in range(d % 3)]])
    return str(path)


def dataset(prefix, form=SftFormat(media=(INPUTS,)), part=(0, 12), length=T):
    return form.build(IndexedDataset(prefix), part, None, length, 0, None)


def test_samples_hold_whole_conversations_with_their_pixels(prefix):
    data = dataset(prefix)
    seen = []
    for i in range(len(data)):
        sample = data[i]
        segments = sample["segment_ids"]
        is_image = sample["image_index"] != TEXT
        np.testing.assert_array_equal(is_image, sample["tokens"] == IMAGE)
        np.testing.assert_array_equal(is_image, sample["block_ids"] > 0)
        places = sample["patch_places"].reshape(-1, 4, 5)
        colours = sample["patches"].reshape(-1, 4, 12)
        for number in range(1, segments.max() + 1):
            mine = segments == number
            document = int(sample["tokens"][mine & ~is_image][0]) - 1
            seen.append(document)
            learnt = sample["labels"][mine & (sample["loss_mask"] > 0)]
            np.testing.assert_array_equal(learnt, [50 + document, 70])
            images = np.unique(sample["block_ids"][mine & is_image])
            assert len(images) == document % 3
            for image in images:
                index = sample["image_index"][mine & (sample["block_ids"] == image)]
                read = colours[index]
                assert (read == read[0, 0, 0]).all() and (np.diff(index) == 1).all()
                grid = places[index]
                assert len(np.unique(grid[:, 0, 0])) == 1 and grid[0, 0, 0] > 0
                assert len(index) == grid[0, 0, 3] * grid[0, 0, 4] // 4
        assert (sample["tokens"][segments == 0] == PAD).all()
    assert sorted(seen) == list(range(12))


def test_positions_of_an_image_are_rows_and_columns_and_text_goes_on_after_its_longer_side(prefix):
    sample = dataset(prefix, part=(1, 2))[0]  # 8 + 4 = 12 by 8 pixels: 3 by 2 results
    ids = sample["position_ids"][:9]
    np.testing.assert_array_equal(ids[:6], [(0, row, column) for row in range(3) for column in range(2)])
    np.testing.assert_array_equal(ids[6:8], [[3] * 3, [4] * 3])


def test_a_dataset_with_images_is_pickled_and_the_same_again(prefix):
    data = dataset(prefix)
    again = pickle.loads(pickle.dumps(data))
    for name, array in data[1].items():
        np.testing.assert_array_equal(array, again[1][name])


@pytest.mark.parametrize("form, message", [
    (SftFormat(), "has images, which this model does not read"),
    (SftFormat(media=(dataclasses.replace(INPUTS, block_size=16),)), "or more images than model.vision.blocks=2 of"),
    (SftFormat(media=(dataclasses.replace(INPUTS, token=98),)), "a text has 0 tokens of model.image_token=98 and"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_or_left_out(prefix, form, message):
    with pytest.raises(ValueError, match=message):
        dataset(prefix, form)[0]


def test_images_and_sound_of_one_text_are_told_apart_and_read_each_by_its_own_tokens(tmp_path):
    """Conversation d: image, clip, image, clip, all with the value d + 1 or as loud."""
    sound = 98
    clips = MediaInputs(ClipLayouts(mels=80, merge=2, longest=20), sound, blocks=1, block_size=24)
    path = tmp_path / "both"
    files = []
    for d in range(4):
        file = io.BytesIO()
        PIL.new("RGB", (8, 8), (d + 1,) * 3).save(file, "PNG")
        tone = np.sin(np.arange((6 + d) * 160) * (d + 1) / 10)
        for at, data in enumerate((file.getvalue(), wav.encode(tone))):
            (tmp_path / f"{d}.{at}").write_bytes(data)
            size = (8, 8) if at == 0 else (len(tone), 0)
            files.append(ImagePlace(str(tmp_path / f"{d}.{at}"), 0, len(data), len(data), *size))
    with IndexedDatasetWriter(path, np.uint16) as texts, ImageTableWriter(path) as images:
        for d in range(4):
            texts.add_document([np.array([IMAGE, d + 1, sound, IMAGE, sound]), np.array([50 + d])])
            images.add([[*files[2 * d : 2 * d + 2]] * 2])
    data = dataset(str(path), SftFormat(media=(INPUTS, clips)), (0, 4))
    seen = 0
    for sample in (data[i] for i in range(len(data))):
        np.testing.assert_array_equal(sample["audio_index"] != TEXT, sample["tokens"] == sound)
        np.testing.assert_array_equal(sample["image_index"] != TEXT, sample["tokens"] == IMAGE)
        assert not sample["loss_mask"][np.isin(sample["labels"], (IMAGE, sound))].any()
        for number in range(1, sample["segment_ids"].max() + 1):
            mine = sample["segment_ids"] == number
            (d,) = (int(t) - 1 for t in sample["tokens"][mine] if 0 < t <= 4)
            index = sample["image_index"][mine]
            assert (sample["patches"].reshape(-1, 4, 12)[index[index >= 0]] == d + 1).all()
            index = sample["audio_index"][mine]
            count = (6 + d + 1) // 2
            _, (view,) = clips.layouts.read((tmp_path / f"{d}.1").read_bytes(), "x")
            frames = sample["frames"].reshape(-1, 2, 400)[index[index >= 0]].reshape(2, -1, 400)
            for clip in frames:
                np.testing.assert_array_equal(clip[:count], clips.layouts.rows(view))
            seen += 1
    assert seen == 4
    with pytest.raises(ValueError, match="0.1 is of a kind that this model does not read; it reads images"):
        dataset(str(path), part=(0, 4))


def test_a_conversation_whose_images_do_not_fit_is_left_out_and_never_cut(prefix):
    small = dataclasses.replace(INPUTS, block_size=16)
    for on_misfit in ("skip", "truncate"):
        data = dataset(prefix, SftFormat(on_misfit=on_misfit, media=(small,)))
        kept = {int(t) - 1 for i in range(len(data)) for t in data[i]["tokens"] if 0 < t <= 12}
        assert kept == {d for d in range(12) if d % 3 == 0} | {4, 10}, kept  # of 8 by 8 pixels
        assert data.num_long == 12 - len(kept)


def test_views_go_to_the_emptiest_block_the_largest_first():
    assert assigned([8, 40, 24, 16], 2, 64).tolist() == [0, 0, 1, 1]
    assert assigned([40, 40, 40], 2, 64) is None
    assert assigned([8, 40, 24, 16], 2, 64, first=5).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("window", [0, 4])
def test_windows_and_class_tokens_are_where_the_tower_expects_them(window):
    layout = ImageLayouts(PIXELS, has_class_token=True, window=window).of(12, 20)  # 6 by 10 patches, 3 by 5 results
    squares = layout.places.reshape(-1, 4, 5)
    assert (squares[-1, 0] == (1, CLASS_TOKEN, CLASS_TOKEN, 6, 10)).all() and (squares[-1, 1:] == 0).all()
    corners = squares[:-1, 0, 1:3]
    np.testing.assert_array_equal(corners[layout.index], [(2 * r, 2 * c) for r in range(3) for c in range(5)])
    if window:
        ids = corners // window
        changes = (ids[1:] != ids[:-1]).any(1).sum()
        assert changes == len(np.unique(ids, axis=0)) - 1  # the squares of a window are adjacent
    view = np.arange(12 * 20 * 3).reshape(12, 20, 3).astype(np.uint8)
    patches = ordered(ImageLayouts(PIXELS, has_class_token=True, window=window), layout, [view])
    for (number, row, column, _, _), patch in zip(layout.places, patches, strict=True):
        if number and row != CLASS_TOKEN:
            np.testing.assert_array_equal(
                patch.reshape(2, 2, 3), view[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            )


def test_a_newline_ends_each_row_of_tiles():
    rule = ImageRule(resize="pinpoints", size=4, patch_size=2, pinpoints=(4, 8))
    layout = ImageLayouts(rule).of(4, 8)
    assert (layout.index == NEWLINE).sum() == 2 and layout.index[-1] == NEWLINE
