"""Compiled programs in the folder of the compilation cache, found without tracing and lowering them.

JAX's own cache is asked when a program has been lowered, and lowering those of an engine takes most of a start. Here a
program is named by a digest of all that it follows from: versions, the source code, settings and what the caller
describes. A program is executed as it is found, so those of other users are not used.
"""

import atexit
import functools
import hashlib
import importlib
import logging
import math
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from megajax.mesh import compat
from megajax.mesh.processes import xla_flags

logger = logging.getLogger("megajax")

FOLDER = "programs"
PACKAGES = ("megajax", "pallas_kernels", "flax")
# Serialising a program stops all other threads of Python for 0.3 s (Llama-3 8B, H100), in which nothing is served: it
# waits until nothing has been compiled or called for a while.
QUIET_SECONDS = 5.0
TURN_SECONDS = 0.1  # after each program, so that a request that came meanwhile is begun before the next one
EXIT_SECONDS = 10.0  # for what is left when the process ends
KEPT_SECONDS = 30 * 24 * 3600  # a program that has not been used for so long is deleted
ADDRESS = " at 0x"  # in the repr of what has none: different in each process


class StoredPrograms:
    enabled = True
    """False in a process that replaces functions of megajax, as tests do: programs would not follow from the source."""

    def __init__(self, mesh: Mesh, described: object):
        """described: all that the programs on this mesh follow from, besides what `get` is given; its repr counts."""
        self._described = f"{mesh.shape} {mesh.axis_types} {[device.id for device in mesh.devices.flat]} {described!r}"
        self._devices = list(mesh.devices.flat)
        self._is_cpu = self._devices[0].platform == "cpu"
        self._new: list[tuple[Path, jax.stages.Compiled]] = []
        self._last_busy = 0.0
        self._is_waiting = False  # whether a thread stores later what is new
        self._lock = threading.Lock()
        self.num_found = 0

    def get(self, described: object, compiled: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """The program that `compiled` makes, or the same from the disk. Any thread may call this.

        A program that was made is stored when nothing has been compiled or called for some seconds, or when the process
        ends.
        """
        path = self._path(described)
        if path is None:
            return compiled()
        program = _read(path, self._devices)
        if program is not None:
            with self._lock:
                self.num_found += 1
            return program
        program, is_whole = self._made(compiled)
        if not is_whole:
            return program
        self.note_call()
        with self._lock:
            self._new.append((path, program))
            if not self._is_waiting:
                self._is_waiting = True
                threading.Thread(target=self._store_later, daemon=True).start()
                atexit.unregister(self.store)
                atexit.register(self.store, at_most=EXIT_SECONDS)
        return program

    def note_call(self) -> None:
        """Programs are being called: those that are new are stored later."""
        self._last_busy = time.monotonic()

    def store(self, at_most: float = math.inf) -> None:
        """What has been compiled and is not stored yet. at_most: seconds, after which the next start compiles what is
        left."""
        start = time.monotonic()
        while time.monotonic() - start < at_most and self._store_one():
            pass

    def _made(self, compiled: Callable[[], jax.stages.Compiled]) -> tuple[jax.stages.Compiled, bool]:
        """-> (the program, whether it can be stored)."""
        if not self._is_cpu:
            with compat.without_writing_to_the_cache():  # which would serialise it as well, and at once
                return compiled(), True
        _listen()
        _last.is_cached = False
        program = compiled()
        return program, not _last.is_cached  # of one from JAX's cache, parts are missing (jaxlib 0.10.2 and 0.11.2)

    def _store_later(self) -> None:
        is_left = True
        while is_left:
            while (left := self._last_busy + QUIET_SECONDS - time.monotonic()) > 0:
                time.sleep(left)
            is_left = self._store_one()
            time.sleep(TURN_SECONDS)

    def _store_one(self) -> bool:
        """-> whether there was one."""
        with self._lock:
            if not self._new:
                self._is_waiting = False
                return False
            path, program = self._new[0]
            _write(path, program)
            self._new.pop(0)
            return True

    def _path(self, described: object) -> Path | None:
        folder = compat.setting("jax_compilation_cache_dir")
        is_used = self.enabled and folder and compat.setting("jax_enable_compilation_cache")
        if not is_used or jax.process_count() > 1:
            return None
        text = f"{_environment(self._devices[0])} {self._described} {described!r}"
        if ADDRESS in text:
            _say_once("programs are compiled in each start: what they follow from has no lasting description")
            return None
        return Path(folder) / FOLDER / hashlib.sha256(text.encode()).hexdigest()


def _environment(device: jax.Device) -> str:
    """Besides the model and the shapes: the versions of all packages, the device, and the settings of JAX and XLA."""
    versions = (jax.__version__, jaxlib.__version__, device.client.platform_version, device.device_kind)
    return f"{versions} {_source_digest()} {xla_flags()} {compat.settings()}"


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        for folder in importlib.import_module(package).__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    """None if there is no such file, or it cannot be used; the log says why."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError("it belongs to another user")
            parts = pickle.loads(zlib.decompress(file.read()))
        os.utime(path)
        _load_runtime_of_kernels()
        return deserialize_and_load(*parts, backend=devices[0].client, execution_devices=devices)
    except FileNotFoundError:
        return None
    except Exception as error:  # of any library: the file may be cut off, or from a machine like this one
        logger.warning("%s is not used, its program is compiled again: %s", path, error)
        return None


_last = threading.local()
"""Has `is_cached`: whether what this thread has compiled last comes from JAX's cache."""


@functools.cache
def _listen() -> None:
    def note(event: str, **_) -> None:
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            _last.is_cached = False
        elif event == "/jax/compilation_cache/cache_hits":
            _last.is_cached = True

    jax.monitoring.register_event_listener(note)


def _write(path: Path, program: jax.stages.Compiled) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(path.parent)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        temporary.write_bytes(zlib.compress(pickle.dumps(serialize(program)), 1))
        temporary.replace(path)
    except Exception as error:  # a full disk, or a program that cannot be serialised: the next start compiles it
        _say_once(f"a compiled program is not stored in {path.parent}: {error}")


@functools.cache
def _forget_old(folder: Path) -> None:
    oldest = time.time() - KEPT_SECONDS
    for path in folder.iterdir():
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


@functools.cache
def _load_runtime_of_kernels() -> None:
    """Programs refer to functions of Mosaic's library, which this import loads."""
    if not compat.mosaic_problem():
        importlib.import_module("jax.experimental.mosaic.gpu")


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)
