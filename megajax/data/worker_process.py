"""How processes that read or encode for another one end."""

import multiprocessing
import os
import signal
import threading


def end_with_parent(*_) -> None:
    """Called first in a worker process: it ends when its parent has, however that ended (SIGKILL).

    A worker that waits for work would not notice: other workers hold the pipes of the dead parent open. SIGINT and
    SIGHUP reach all processes of a terminal; the parent decides what they mean, and needs its data until it has
    saved. Takes and ignores the arguments of worker_init_fn of Grain.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
