"""The benchmark of balancing counts what each device encodes."""

import numpy as np
import pytest

from benchmarks.data import balance
from benchmarks.data.balance import Layout, Row

LAYOUT = Layout("two devices a row", devices=2, rows=2, tokens=20, blocks=4, patches=10)
ROWS = [Row(18, [2, 9, 4, 3]), Row(20, [8, 8, 5])]


def patches_and_squares(views):
    return np.array([views, np.square(views)], float)


@pytest.mark.parametrize("way, loads", [
    # blocks 9, 4, 3, 2 and, beginning with the second, 0, 8, 8, 5: two of each row for a device
    (balance.in_filled_blocks, [[13 + 8, 5 + 13], [97 + 64, 13 + 89]]),
    (balance.in_blocks, [[40, 40], [97 + 64 + 19, 13 + 89 + 22]]),
    (balance.in_order, [[2 + 4 + 8 + 5, 9 + 3 + 8], [4 + 16 + 64 + 25, 81 + 9 + 64]]),
    (balance.on_one_device, [[39, 0], [263, 0]]),
])  # fmt: skip
def test_devices_encode_what_a_way_gives_them(way, loads):
    assert way(ROWS, LAYOUT, patches_and_squares).tolist() == loads


def test_ratios_are_of_the_busiest_device_of_all(monkeypatch):
    monkeypatch.setattr(balance, "DEVICES", 4)
    batch = [*ROWS, Row(15, [1]), Row(20, [1, 1, 1])]
    patches, squares, text = balance.ratios([*batch, *batch, ROWS[0]], LAYOUT, balance.in_order, patches_and_squares)
    assert (patches, squares) == (20 / (43 / 4), 154 / (267 / 4))
    assert text == 80 / 73


def test_the_table_has_no_step_below_one_without_waiting_and_padding(capsys):
    balance.main(["--conversations=1000"])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert len({line[0] for line in lines}) == len(balance.LAYOUTS)
    for mesh, images, *numbers in lines:
        assert min(map(float, numbers)) >= 1, (mesh, images)
    by_way = {(mesh, images): float(numbers[1]) for mesh, images, *numbers in lines}
    for mesh, images in by_way:
        if images == "megajax":
            assert by_way[mesh, images] >= by_way[mesh, "without padding"]
