"""Encodes the parts of an input on the machines of a Ray cluster, which share a file system."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator

from megajax.data.prepare.parts import Part

MAX_RETRIES = 10
CONNECT_SECONDS = 10


def encode_on_ray(address: str, encode: Callable[..., object], num_parts: int, num_cpus: int) -> Iterator[object]:
    """`encode(part=...)` for each part, as a task of Ray: the results, in the order in which they end.

    address: as of ray.init: auto, HOST:PORT of the head node, or ray://HOST:PORT. num_cpus: of a task. Ray repeats a
    task whose worker or machine dies, or that raises an OSError. Raises the first other error of a task, and ValueError
    if no cluster answers.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError(f"--ray={address} needs the package ray; pip install 'megajax[ray]'") from None
    with contextlib.ExitStack() as stack:
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # Ray itself waits for ten minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            stack.enter_context(ray.init(address, logging_level=logging.ERROR))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"--ray={address}: no cluster answers ({reason}); begin one with `ray start`") from None
        task = ray.remote(num_cpus=num_cpus, max_retries=MAX_RETRIES, retry_exceptions=[OSError])(_encode)
        shared = ray.put(encode)
        waiting = [task.remote(shared, Part(number, num_parts), os.getcwd()) for number in range(1, num_parts + 1)]
        while waiting:
            done, waiting = ray.wait(waiting)
            try:
                yield from ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None


def _encode(encode: Callable[..., object], part: Part, folder: str) -> object:
    os.chdir(folder)  # of the relative paths in `encode`
    return encode(part=part)
