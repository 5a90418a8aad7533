"""Processes that read or encode do not outlive the one that started them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import READER, ROOT

READS = (
    READER
    + """\
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    next(iter(multiprocessing.active_children())).join()
"""
)
ENCODES = """
import itertools, multiprocessing, time
from megajax.data.prepare.encode import Encoder, encode_in_order
from megajax.data.prepare.documents import Reader
from megajax.data.prepare.read_input import Batch
from megajax.data.tokenizers.tokenizer import BytesTokenizer

if __name__ == "__main__":
    batches = itertools.repeat(Batch(((0, "a.jsonl"),), (b'{"text": "a"}',)))
    next(encoded := encode_in_order(batches, Encoder(BytesTokenizer(), Reader(), True), 2))
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(60)
"""


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_ignore_the_signals_of_a_terminal_and_end_with_their_parent(tmp_path):
    parents = []
    for name, code in (("reads.py", READS), ("encodes.py", ENCODES)):  # at the same time
        (tmp_path / name).write_text(code)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(tmp_path / name)]
        parents.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    for parent in parents:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        for worker in workers:
            wait_until(lambda worker=worker: ignores_hangup(worker))  # it has begun
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGHUP)
        time.sleep(0.2)
        assert all(map(is_running, workers))
        parent.kill()
        parent.wait()
        wait_until(lambda workers=workers: not any(map(is_running, workers)))


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ignores_hangup(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        (mask,) = (line.split()[1] for line in file if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> signal.SIGHUP - 1 & 1)


def is_running(pid: int) -> bool:
    """False for one that is dead and waits for its parent, process 1, to take notice."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
