"""The benchmarks of the data run, and the two builders of indices agree."""

import shutil

import pytest

from benchmarks.data import indices, loader


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("epochs", [1, 3])
def test_indices_equal_those_of_the_published_algorithm(epochs, capsys):
    indices.main(["--documents=3000", f"--epochs={epochs}"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["megajax", "published"]


def test_loader_reports_every_format(monkeypatch, capsys):
    monkeypatch.setattr(loader, "NUM_DOCUMENTS", 300)
    monkeypatch.setattr(loader, "MOST_STEPS", 40)
    loader.main(["--sequence_length=64", "--seconds=0.05"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(loader.TASKS) and all("million tokens/s" in line for line in lines)
