"""infer.py serve and bench: an HTTP server, and its latency and throughput under load."""

import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import importlib.util
import ipaddress
import json
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from megajax import hub
from megajax.cli.options import OfChats, OfEngine
from megajax.inference.config import Measured, Rate, ServingConfig, Workload
from megajax.inference.server.config import ServerConfig
from megajax.terminal.command_line import Part

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from megajax.inference.engine import Engine
    from megajax.inference.traffic import Load, Result, Target

logger = logging.getLogger("megajax")

STOP_SECONDS = 15.0
"""After the deadline of all requests, before a process that has not stopped is ended."""


OF_SERVER = (
    "host", "port", "max_requests", "request_timeout_seconds", "max_images", "image_hosts", "allow_load", "pooling",
    "log_requests",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(OfEngine, OfChats):
    """HTTP server. --mesh.data: engines, each in a process and on devices of its own."""

    model_name: str = ""
    """Name of the model in requests; default: that of DIR."""
    adapters: tuple[str, ...] = ()
    """NAME=DIR: run with adapters of this model (lora.rank), or folder of PEFT, for requests whose model is NAME;
    several with commas between them."""
    api_key: tuple[str, ...] = ()
    """Key to ask for; may be repeated."""
    api_key_file: str | None = None
    """File with a key per line; other users cannot see it with ps."""
    embeddings: bool = False
    """Embed texts instead of generating; models that read in both directions always do."""
    server: Annotated[ServerConfig, Part(only=OF_SERVER, has_prefix=False)] = ServerConfig()

    def __call__(self) -> None:
        need_packages("infer.py serve")
        from megajax.inference.tokens.sampling import recommended_sampling
        from megajax.weights.sources import open_source

        model_name = self.model_name or hub.short_name(self.run)
        adapters = read_adapters(self.adapters, model_name)
        if adapters and self.server.allow_load:
            raise ValueError("allow_load: adapters belong to the parameters that they were trained on; leave it out")
        config = dataclasses.replace(
            self.server,
            run=self.run,
            model_name=model_name,
            api_keys=read_keys(self.api_key, self.api_key_file),
            image_hosts=read_hosts(self.server.image_hosts),
            sampling=recommended_sampling(hub.local(self.run)),
        )
        self.check_template()
        self.serving.check()
        self.mesh.check()
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(contextlib.closing(bind(config.host, config.port)))
            is_bidirectional = "embed" in open_source(self.run, self.step).config.model.encoder_tasks
            if self.embeddings or is_bidirectional:
                self._check_embeds()
                from megajax.inference.server.embedding import make_embedding_app
                from megajax.inference.text_encoder import DecoderEncoder, TextEncoder

                encoder = (TextEncoder if is_bidirectional else DecoderEncoder)(self.open())
                make = functools.partial(make_embedding_app, encoder, config, self.serving.max_length)
            else:
                if config.pooling != "mean":
                    raise ValueError(f"pooling={config.pooling} is of a server that embeds; add --embeddings")
                from megajax.inference.server.app import make_app
                from megajax.inference.server.replicas import engines_from_run

                parts = (self.run, self.started_mesh(), self.step, self.serving, self.draft_run, adapters)
                engines = stack.enter_context(engines_from_run(*parts, self.launch.cpu_devices))
                make = functools.partial(make_app, engines, config, self.template(engines[0]))
            serve(make, config, bound)

    def _check_embeds(self) -> None:
        """Raises ValueError for options of a server that generates."""
        kept = dataclasses.replace(ServingConfig(), max_length=self.serving.max_length)
        changed = [name for name, value in vars(self.serving).items() if value != getattr(kept, name)]
        changed += [name for name in ("draft_run", "chat_template") if getattr(self, name) is not None]
        changed += ["adapters"] if self.adapters else []
        changed += ["allow_load"] if self.server.allow_load else []
        if changed:
            raise ValueError(f"{changed[0]} is of a server that generates, and this one embeds; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(OfEngine):
    """Measure the speed: of whole batches, or latency and throughput under load."""

    run: str = ""
    """Directory of a run (runs/NAME) or a Hugging Face folder."""
    batch: tuple[Measured, ...] = (1, 8)
    """Batch sizes."""
    repeats: Measured = 3
    """With --batch: the median is shown."""
    workload: Annotated[Workload, Part(has_prefix=False)] = Workload()
    request_rate: tuple[Rate, ...] = ()
    """Measure under load: requests per second, at random times; inf: at once."""
    concurrency: tuple[Measured, ...] = ()
    """Measure under load: number of requests at a time."""
    url: str | None = None
    """Server to measure, instead of --run: http://HOST:PORT."""
    api_key: str | None = None
    """Its key."""
    json: str | None = None
    """File for the results, a line of JSON per load."""
    figure: str | None = None
    """File for a plot, .svg or .png."""

    def __call__(self) -> None:
        if (not self.run) == (self.url is None):
            raise ValueError("give --run=DIR, or --url=http://HOST:PORT of a server")
        if self.request_rate or self.concurrency:
            self._under_load()
            return
        if self.url is not None:
            raise ValueError("--url needs --request_rate=1,4,16 (requests per second) or --concurrency=1,8,64")
        from megajax.inference.benchmark import measure, table

        engine = self.engine()
        device = engine.mesh.devices.flat[0].device_kind
        sizes = (self.workload.prompt_tokens, self.workload.max_tokens, self.repeats)
        print(f"{self.run} on {engine.mesh.size} x {device}: {engine.model.num_parameters():,} parameters, "
              f"{sizes[0]} prompt tokens, {sizes[1]} new tokens per row")  # fmt: skip
        print(table([measure(engine, batch_size, *sizes) for batch_size in self.batch]))

    def _under_load(self) -> None:
        need_packages("infer.py bench with --request_rate or --concurrency")
        from megajax.inference.traffic import Load

        loads = [Load(request_rate=float(rate)) for rate in self.request_rate]
        loads += [Load(concurrency=number) for number in self.concurrency]
        if self.url is not None:
            results = bench_server(self.url, self.api_key, loads, self.workload)
        else:
            results = bench_engine(self.engine(), loads, self.workload)
        report(results, self.json, self.figure)


def need_packages(what: str) -> None:
    """Raises ValueError if the packages of the extra `serve` are missing."""
    names = ("starlette", "uvicorn", "pydantic", "prometheus_client", "httpx2")
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ValueError(f"{what} needs {', '.join(missing)}; pip install 'megajax[serve]'")


def read_keys(keys: Sequence[str], file: str | None) -> tuple[str, ...]:
    """The keys of the command line, and those in the lines of a file. Raises ValueError."""
    if "" in keys:
        raise ValueError("api_key= is empty; give a key, or leave it out to answer anyone")
    if file is None:
        return tuple(keys)
    try:
        lines = Path(file).read_text().split()
    except OSError as error:
        raise ValueError(f"api_key_file={file} cannot be read ({error.strerror})") from None
    if not lines:
        raise ValueError(f"api_key_file={file} is empty; write one key per line")
    return (*keys, *lines)


def read_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """given: lists with commas. Raises ValueError for what is neither a name nor an address."""
    hosts = tuple(host for hosts in given for host in hosts.split(","))
    for host in hosts:
        # an IPv6 address has colons, and a name with a port too
        if not re.fullmatch(r"[\w.-]+", host) and not _is_address(host):
            raise ValueError(f"image_hosts={host} must be the name of a host or its address, without scheme and port")
    return hosts


def read_adapters(given: Sequence[str], model_name: str) -> dict[str, str]:
    """given: lists of NAME=DIR with commas -> {name: directory}. Raises ValueError for one without a name or directory,
    and for a name that there is already."""
    found: dict[str, str] = {}
    for adapter in (adapter for adapters in given for adapter in adapters.split(",")):
        name, _, path = adapter.partition("=")
        if not name or not path:
            raise ValueError(f"adapters={adapter} must be NAME=DIR")
        if name in (model_name, *found):
            raise ValueError(f"adapters={adapter}: there is a model {name} already; give it another name")
        found[name] = path
    return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet. Raises ValueError if the address cannot be used."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ValueError(f"host={host} port={port} cannot be used ({error.strerror}); give another --port") from None
    return bound


def serve(make: "Callable[[Callable[[], None]], Starlette]", config: ServerConfig, bound: socket.socket) -> None:
    """Until ctrl-C or SIGTERM, which let what runs finish; a second one does not. Exits with status 1 if the engine
    fails, or if it hangs and does not stop.

    make: returns the ASGI application; its argument is to be called when the engine fails.
    """
    import uvicorn

    from megajax.inference.server.connections import allow_connections, uvicorn_config

    has_failed = False

    def fail() -> None:
        nonlocal has_failed
        has_failed = True
        server.should_exit = True

    class Server(uvicorn.Server):
        def handle_exit(self, sig, frame) -> None:
            if not app.state.is_ready():
                os._exit(128 + sig)  # nothing has been accepted, and compilations cannot be interrupted
            if not self.should_exit:
                logger.info("stopping when all requests have finished; ctrl-C again ends them")
                faulthandler.dump_traceback_later(config.request_timeout_seconds + STOP_SECONDS, exit=True)
            super().handle_exit(sig, frame)

    app = make(fail)
    allow_connections()
    server = Server(uvicorn_config(app, config.request_timeout_seconds))
    host, port = bound.getsockname()[:2]
    logger.info("serving %s at http://%s:%d", config.model_name, f"[{host}]" if ":" in host else host, port)
    if config.sampling:
        values = ", ".join(f"{name}={value}" for name, value in config.sampling.items())
        logger.info("sampling defaults of generation_config.json: %s", values)
    if not config.api_keys and not host.startswith("127.") and host != "::1":
        logger.warning("host=%s: anyone who reaches port %d may use the model; --api_key_file=FILE", host, port)
    # uvicorn raises the signal again when it has stopped; that is the end here, and no error.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[bound])
    finally:
        faulthandler.cancel_dump_traceback_later()
    if has_failed:
        raise SystemExit(1)


# ----------------------------------------------------------------------------- bench


def bench_engine(engine: "Engine", loads: "list[Load]", workload: Workload) -> "list[Result]":
    from megajax.inference.server.engine_thread import EngineThread
    from megajax.inference.traffic import EngineTarget

    @contextlib.asynccontextmanager
    async def started() -> "AsyncGenerator[Target]":
        thread = EngineThread(engine, max_requests=workload.num_requests)
        thread.start()
        await thread.until_ready()
        yield EngineTarget(thread)
        await thread.stop()

    return asyncio.run(_measure_all(started, loads, workload))


def bench_server(url: str, api_key: str | None, loads: "list[Load]", workload: Workload) -> "list[Result]":
    from megajax.inference.traffic import ServerTarget

    return asyncio.run(_measure_all(lambda: ServerTarget(url, api_key), loads, workload))


async def _measure_all(
    target: "Callable[[], contextlib.AbstractAsyncContextManager[Target]]", loads: "list[Load]", workload: Workload
) -> "list[Result]":
    from megajax.inference.traffic import measure

    async with target() as opened:
        try:
            return [await measure(opened, load, workload) for load in loads]
        except ExceptionGroup as failed:  # of the requests, all for the same reason
            raise failed.exceptions[0] from None


def report(results: "list[Result]", json_file: str | None, figure_file: str | None) -> None:
    from megajax.inference.traffic import table

    print(table(results))
    if json_file is not None:
        Path(json_file).write_text("".join(json.dumps(result.record()) + "\n" for result in results))
    if figure_file is not None:
        from megajax.figures.drawings import save, traffic

        save(traffic(results), figure_file)
