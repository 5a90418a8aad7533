"""Lowers programs in several processes: tracing and lowering are Python, of which a process runs one thread at a time.

A program goes to another process by pickle, as a function with the shapes of its arguments, and comes back as StableHLO
(jax.export), from which this process makes the same program in a fraction of the time. The other processes use no
device: what a function does on a GPU follows from the kind of device in the mesh.
"""

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from megajax.mesh import compat

logger = logging.getLogger("megajax")

LOWERING = threading.Lock()  # two threads must not lower Pallas kernels at the same time (pallas_kernels/README.md)
LOCAL_SETTINGS = ("jax_platforms", "jax_num_cpu_devices")  # of jax.config: not those of the other processes


class Unlowered(NamedTuple):
    """A program before it is traced."""

    function: Callable
    """Of what `arguments` are like. Another process can have it if pickle can: a function of a module, and partials of
    one."""
    arguments: tuple
    """Trees of jax.ShapeDtypeStruct, with shardings on `mesh`."""
    mesh: Mesh
    donated: tuple[int, ...]
    """As donate_argnums of jax.jit."""
    out_shardings: Any

    def lower(self) -> jax.stages.Lowered:
        """In this thread."""
        with LOWERING:
            return self._lower(self.function)

    def lower_exported(self, exported: bytes, result: Any) -> jax.stages.Lowered:
        """exported: what another process made of it; result: a tree of the form of what the function returns."""
        call = compat.from_exported(exported)
        structure = jax.tree.structure(result)
        return self._lower(lambda *arguments: jax.tree.unflatten(structure, call(*jax.tree.leaves(arguments))))

    def _lower(self, function: Callable) -> jax.stages.Lowered:
        jitted = jax.jit(function, donate_argnums=self.donated, out_shardings=self.out_shardings)
        with jax.set_mesh(self.mesh):
            return jitted.lower(*self.arguments)


class Job(NamedTuple):
    """What another process is sent."""

    function: Callable
    arguments: tuple
    """With shardings on a mesh without devices."""
    mesh: AbstractMesh

    @staticmethod
    def of(program: Unlowered) -> "Job":
        mesh = program.mesh.abstract_mesh

        def without_devices(a):
            spec = a.sharding.spec if isinstance(a.sharding, NamedSharding) else PartitionSpec()
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

        return Job(program.function, jax.tree.map(without_devices, program.arguments), mesh)

    def export(self) -> tuple[bytes, Any]:
        """-> the arguments of `lower_exported`."""
        leaves, structure = jax.tree.flatten(self.arguments)
        results = []

        def of_leaves(*leaves):
            found, result = jax.tree.flatten(self.function(*jax.tree.unflatten(structure, leaves)))
            results.append(result)
            return found

        with jax.sharding.use_abstract_mesh(self.mesh):
            exported = compat.exported(of_leaves, leaves)
        return exported, jax.tree.unflatten(results[0], range(results[0].num_leaves))


class _Answer(NamedTuple):
    found: tuple[bytes, Any] | None
    """None: it failed."""
    error: str
    logged: list[tuple[int, str]]
    """Level and message."""


class _Collected(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[int, str]] = []
        """Level and message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelno, record.getMessage()))


class _Process:
    """Another process, once it answers."""

    def __init__(self, logged: _Collected):
        """logged: what this process has logged, and so does not log again."""
        self._logged = logged
        self._connection, theirs = Pipe()
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"]
        self._child = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection.send(compat.settings())
        self._connection.recv_bytes()

    def lower(self, program: Unlowered) -> jax.stages.Lowered:
        """Raises RuntimeError if it is not lowered there, OSError or EOFError if the process has ended, and errors of
        pickle."""
        self._connection.send(Job.of(program))
        answer = self._connection.recv()
        for level, message in answer.logged:
            if (level, message) not in self._logged.found:
                logger.log(level, message)
        if answer.found is None:
            raise RuntimeError(answer.error)
        return program.lower_exported(*answer.found)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._connection.close()


def serve(file_number: int) -> None:
    """What the other process does, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(file_number)
    logged = _Collected()
    logger.setLevel(logging.INFO)
    logger.addHandler(logged)
    with contextlib.suppress(OSError, EOFError):
        _use(connection.recv())
        connection.send_bytes(b"")
        while True:
            pickled = connection.recv_bytes()
            logged.found.clear()
            try:
                answer = _Answer(pickle.loads(pickled).export(), "", logged.found)
            except Exception as error:  # of any layer
                answer = _Answer(None, f"{type(error).__name__}: {error}", logged.found)
            connection.send(answer)


def _use(settings: dict[str, Any]) -> None:
    mine = compat.settings()
    for name, value in settings.items():
        if name not in LOCAL_SETTINGS and mine[name] != value:
            jax.config.update(name, value)


class Lowering:
    """Lowers programs, in this process and perhaps in others beside it. Any thread may call the methods."""

    def __init__(self, num_processes: int):
        """num_processes: others. None in a process that replaces functions of megajax, as tests do."""
        self.num_processes = num_processes
        self._here = Unlowered.lower
        self._free: queue.SimpleQueue[Callable[[Unlowered], jax.stages.Lowered]] = queue.SimpleQueue()
        self._free.put(self._here)
        self._logged = _Collected()
        self._lock = threading.Lock()
        self._num_users = 0
        self._num_missing = 0
        self._processes: list[_Process] = []

    def lower(self, program: Unlowered) -> jax.stages.Lowered:
        """In the first process that is free."""
        with self._lock:
            missing = self._num_missing
            self._num_missing = 0
        for _ in range(missing):
            threading.Thread(target=self._start, daemon=True).start()
        lower = self._free.get()
        is_usable = lower == self._here
        try:
            lowered = lower(program)
            is_usable = True
            return lowered
        except Exception as error:
            if lower == self._here:
                raise
            logger.warning("a process that lowers programs has failed and is not used again: %r", error)
        finally:
            if is_usable:
                self._free.put(lower)
        return program.lower()

    @contextlib.contextmanager
    def processes(self) -> Generator[None]:
        """Meanwhile the other processes lower as well. They start when the first program is lowered."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._num_missing = self.num_processes
                logger.addHandler(self._logged)
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._num_missing = 0
                    logger.removeHandler(self._logged)
                    self._end()

    def _start(self) -> None:
        try:
            process = _Process(self._logged)
        except (OSError, EOFError) as error:
            logger.warning("programs are lowered without another process, as none has started: %r", error)
            return
        with self._lock:
            if not self._num_users:
                process.end()
                return
            self._processes.append(process)
            self._free.put(process.lower)

    def _end(self) -> None:
        free = []
        with contextlib.suppress(queue.Empty):
            while True:
                free.append(self._free.get_nowait())
        if self._here in free:
            self._free.put(self._here)
        for process in self._processes:
            process.end()
        self._processes = []


# A process takes 1.5 s to start and 0.7 GB of host memory, and lowers as many programs as this one.
lowering = Lowering(num_processes=min((os.cpu_count() or 1) // 3, 6))
"""Of this process: engines that start at the same time share its other processes."""
