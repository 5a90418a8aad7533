"""Several engines with the same model behind one server, each on devices of its own."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import multiprocessing
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from megajax.inference.config import ServingConfig
from megajax.inference.engine import Engine, Stats
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.server.engine_process import EngineProcess
from megajax.inference.server.engine_thread import EngineThread, Generation, Observer, check_room
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig
from megajax.mesh.lowering import lowering
from megajax.mesh.processes import use_compilation_cache, use_cpu_devices
from megajax.weights.sources import Source

logger = logging.getLogger("megajax")

BLOCK = 64
"""Tokens: beginnings of prompts are compared by whole blocks."""
MAX_BLOCKS = 100_000
"""That are remembered; of all engines."""
MAX_MORE = 4
"""Samples that an engine may have more than the idlest to get a prompt whose beginning it has seen."""


class Beginnings:
    """Which engine was the last to get each beginning of a prompt, and so may have it in its prefix cache."""

    def __init__(self):
        self._engines: OrderedDict[int, int] = OrderedDict()  # hash of all tokens up to the end of a block -> engine

    def engine_of(self, before: Hashable, prompt: Sequence[int]) -> int | None:
        """That of the longest beginning; None: nothing of it is known. before: what else must be the same."""
        found = None
        for key in self._keys(before, prompt):
            if key not in self._engines:
                break
            found = self._engines[key]
        return found

    def add(self, before: Hashable, prompt: Sequence[int], engine: int) -> None:
        for key in self._keys(before, prompt):
            self._engines[key] = engine
            self._engines.move_to_end(key)
        while len(self._engines) > MAX_BLOCKS:
            self._engines.popitem(last=False)

    def _keys(self, before: Hashable, prompt: Sequence[int]) -> Iterator[int]:
        key = hash(before)
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            key = hash((key, *prompt[end - BLOCK : end]))
            yield key


class Replicas:
    """As one EngineThread. A request goes to the engine with the fewest samples, or to the last one that got the
    longest known beginning of its prompt, if that has at most MAX_MORE more. If one engine fails, all have."""

    def __init__(
        self,
        engines: Sequence[Engine | EngineProcess],
        max_requests: int,
        observer: Observer | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        """max_requests: of all engines together. observer, on_failure: as of EngineThread."""
        self._max_requests = max_requests
        share = 1 / len(engines)
        self._threads = [EngineThread(engine, max_requests, observer, on_failure, share) for engine in engines]
        self._beginnings = Beginnings()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """Returns when everything that was accepted has finished."""
        await asyncio.gather(*(thread.stop() for thread in self._threads))

    def check_ready(self) -> None:
        """Raises NotReady unless all engines are ready."""
        for thread in self._threads:
            thread.check_ready()

    @property
    def is_ready(self) -> bool:
        """Whether all engines have warmed up."""
        return all(thread.is_ready for thread in self._threads)

    @property
    def stats(self) -> Stats:
        """Summed over the engines."""
        counts = zip(*(dataclasses.astuple(thread.stats) for thread in self._threads), strict=True)
        return Stats(*[sum(of_each) for of_each in counts])

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        deadline: float | None = None,
        client: Hashable = None,
        images: Sequence[Sequence[PromptImage]] = (),
    ) -> Generation:
        """As EngineThread. The prompts of one request share pages, so they go to the same engine."""
        self.check_ready()
        numbers_open = [thread.num_open for thread in self._threads]
        check_room(sum(numbers_open), len(prompts) * sampling.n, self._max_requests)
        chosen = numbers_open.index(min(numbers_open))
        digests = [image.digest for image in images[0]] if images else []
        beginning = (sampling.adapter, *digests)
        # The log-probabilities of a prompt are computed, not found in a cache.
        seen = None if sampling.prompt_logprobs is not None else self._beginnings.engine_of(beginning, prompts[0])
        if seen is not None and numbers_open[seen] <= numbers_open[chosen] + MAX_MORE:
            chosen = seen
        generation = await self._threads[chosen].generate(prompts, sampling, deadline, client, images)
        self._beginnings.add(beginning, prompts[0], chosen)
        return generation

    async def load(self, source: Source) -> None:
        """New weights for all engines, between two of their steps, after they were checked. Raises NotReady, and
        ValueError if they are damaged or of another form; the engines keep what they have."""
        first, *_ = self._threads
        await first.check(source)
        for thread in self._threads:
            await thread.load(source)


@contextlib.contextmanager
def engines_from_run(
    run_dir: str | Path,
    mesh: MeshConfig,
    step: int | None = None,
    serving: ServingConfig = ServingConfig(),
    draft_run: str | Path | None = None,
    adapters: Mapping[str, str | Path] = {},
    cpu_devices: int = 0,
) -> Generator[list[Engine] | list[EngineProcess]]:
    """mesh.data engines, each on devices of its own; several are in processes of their own, which end with the context.

    The other arguments are those of `Engine.from_run`; cpu_devices: launch.cpu_devices. Raises ValueError for more
    replicas than devices, and what `Engine.from_run` raises.
    """
    if mesh.data == 1:
        yield [_made(run_dir, mesh, step, serving, draft_run, adapters=adapters)]
        return
    platform, num_devices = _counted_devices(cpu_devices)
    if -1 in mesh.sizes().values():
        mesh = mesh.resolve(num_devices)
    if mesh.num_devices > num_devices:
        raise ValueError(
            f"mesh.data={mesh.data}: {mesh.data} replicas need {mesh.num_devices} devices and there are "
            f"{num_devices}; use --mesh.data={max(num_devices * mesh.data // mesh.num_devices, 1)}"
        )
    jax.config.update("jax_platforms", "cpu")  # this process leaves the memory of GPUs to others
    size = mesh.num_devices // mesh.data
    logger.info("%d engines in processes of their own, on %d x %s each", mesh.data, size, platform)
    one = dataclasses.replace(mesh, data=1)
    with contextlib.ExitStack() as stack:
        engines = []
        for number in range(mesh.data):
            numbers = range(number * size, (number + 1) * size)
            environment = {}
            if platform != "cpu":
                every = ",".join(map(str, range(num_devices)))
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[device] for device in numbers)
                numbers = range(size)
            given = (run_dir, one, step, serving, draft_run)
            make = functools.partial(_made_on, numbers, cpu_devices, mesh.data, *given, adapters=adapters)
            engine = EngineProcess(f"engine {number}", make, environment)
            stack.callback(engine.close)
            engines.append(engine)
        for engine in engines:
            engine.open()
            stack.callback(engine.ask_to_end)  # all of them, before the first is waited for
        yield engines


def _counted_devices(cpu_devices: int) -> tuple[str, int]:
    """-> (platform, number), of a process that ends and frees them."""
    ours, other = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_count_devices, args=(other, cpu_devices))
    process.start()
    other.close()
    try:
        return ours.recv()
    except EOFError:
        raise ValueError("mesh.data: the devices cannot be counted; what JAX says about them is above") from None
    finally:
        process.join()


def _count_devices(connection: Connection, cpu_devices: int) -> None:
    if cpu_devices:
        use_cpu_devices(cpu_devices)
    connection.send((jax.default_backend(), jax.device_count()))


def _made_on(numbers: range, cpu_devices: int, num_engines: int, *arguments: Any, **options: Any) -> Engine:
    """In the process of an engine. numbers: of its devices."""
    lowering.num_processes = math.ceil(lowering.num_processes / num_engines)  # of one machine
    if cpu_devices:
        use_cpu_devices(cpu_devices)
    return _made(*arguments, devices=jax.devices()[numbers.start : numbers.stop], **options)


def _made(*arguments: Any, **options: Any) -> Engine:
    engine = Engine.from_run(*arguments, **options)
    use_compilation_cache()
    return engine
