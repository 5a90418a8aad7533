"""Several engines with the same model behind one server, each on devices of its own."""

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

import jax

from megajax.inference.config import ServingConfig
from megajax.inference.engine import Engine, Stats
from megajax.inference.load import OpenedModel
from megajax.inference.scheduling.images import PromptImage
from megajax.inference.server.engine_thread import EngineThread, Generation, Observer, check_room
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig


class Replicas:
    """As one EngineThread: a request goes to the engine with the fewest samples. If one engine fails, all have."""

    def __init__(
        self,
        engines: Sequence[Engine],
        max_requests: int,
        observer: Observer | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        """max_requests: of all engines together. observer, on_failure: as of EngineThread."""
        self._max_requests = max_requests
        share = 1 / len(engines)
        self._threads = [EngineThread(engine, max_requests, observer, on_failure, share) for engine in engines]

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
        num_open = sum(thread.num_open for thread in self._threads)
        check_room(num_open, len(prompts) * sampling.n, self._max_requests)
        idlest = min(self._threads, key=lambda thread: thread.num_open)
        return await idlest.generate(prompts, sampling, deadline, client, images)

    async def load(self, opened: Callable[[Engine], OpenedModel]) -> None:
        """New weights for all engines, between two of their steps, after they were checked. Raises NotReady, and
        ValueError if they are damaged or of another form; the engines keep what they have."""
        self.check_ready()
        first, *_ = self._threads
        first.engine.check_formats(await asyncio.to_thread(opened(first.engine).check))
        for thread in self._threads:
            await thread.call(lambda engine=thread.engine: engine.load(opened(engine)))


def engines_from_run(
    run_dir: str | Path,
    mesh: MeshConfig,
    step: int | None = None,
    serving: ServingConfig = ServingConfig(),
    draft_run: str | Path | None = None,
    adapters: Mapping[str, str | Path] = {},
) -> list[Engine]:
    """mesh.data engines, each on devices of its own; the arguments are those of `Engine.from_run`.

    Raises ValueError for more replicas than devices, and what `Engine.from_run` raises.
    """
    devices = jax.devices()
    if -1 in mesh.sizes().values():
        mesh = mesh.resolve(len(devices))
    if mesh.num_devices > len(devices):
        raise ValueError(
            f"mesh.data={mesh.data}: {mesh.data} replicas need {mesh.num_devices} devices and there are "
            f"{len(devices)}; use --mesh.data={max(len(devices) * mesh.data // mesh.num_devices, 1)}"
        )
    size = mesh.num_devices // mesh.data
    one = dataclasses.replace(mesh, data=1)
    parts = [devices[number * size : (number + 1) * size] for number in range(mesh.data)]
    return [Engine.from_run(run_dir, one, step, serving, draft_run, part, adapters) for part in parts]
