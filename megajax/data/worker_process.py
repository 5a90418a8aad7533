"""How worker processes, which read or encode data, end."""

import faulthandler
import multiprocessing
import os
import signal
import threading


def end_with_parent(*_) -> None:
    """To be called first in a worker process: ends it when its parent has ended, even by SIGKILL.

    A waiting worker would not notice, because other workers keep the pipes of the dead parent open. SIGINT and SIGHUP,
    which reach all processes of a terminal, are ignored: the parent handles them, and needs data until it has saved.
    Takes and ignores the arguments of Grain's worker_init_fn.
    """
    faulthandler.enable(file=2)  # as in the parent
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
