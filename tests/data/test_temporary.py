"""What a writer that was killed has left is removed by the next one, and never what a living one is writing."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from launch import ROOT
from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.temporary import open_temporary, rename, temporary_folder

WRITES = """
import sys
import numpy as np
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.temporary import temporary_folder
with IndexedDatasetWriter(sys.argv[1] + "/x", np.uint16) as writer, temporary_folder(sys.argv[1] + "/y") as folder:
    open(folder + "/file", "w").close()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.fault
def test_temporaries_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(tmp_path):
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    assert other.stdout.readline() == "writing\n"
    before = sorted(tmp_path.iterdir())
    assert len(before) == 5

    def write():
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer, temporary_folder(str(tmp_path / "y")):
            writer.add_document([np.arange(3)])

    write()
    assert sorted(tmp_path.glob("*.tmp")) == before
    other.kill()
    other.wait()
    write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert len(IndexedDataset(tmp_path / "x")) == 1


def test_what_other_machines_and_other_files_have_is_left_alone(tmp_path):
    kept = {f"x.elsewhere-{os.getpid()}-0123abcd.tmp", f"x.bin.{socket.gethostname()}-1-0123abcd.tmp", "x.tmp"}
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / f"x.{socket.gethostname()}-1-0123abcd.tmp").touch()
    with open_temporary(str(tmp_path / "x")) as file:
        file.write(b"content")
        rename(file, str(tmp_path / "x"))
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "x"}
    assert (tmp_path / "x").read_bytes() == b"content"
