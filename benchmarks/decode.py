"""Speed of serving a recipe with random weights, in phases:

    python -m benchmarks.decode --config=llama3_8b [--output=FILE] [--section.field=value ...]

| phase | measures | seconds on one H100 with llama3_8b |
|---|---|---|
| torch | transformers, if installed, on the same GPU (benchmarks/peers/torch_decode.py) | 180, estimated |
| vllm | vLLM, if installed, on the same GPU (benchmarks/peers/vllm_decode.py) | 170, one batch |
| ready | making weights; compiling or loading every program | 52 |
| decode | for each batch: decoding speed, and the part of the memory bandwidth that it uses | 51 |
| sampled | as decode, with temperature 0.8, top-k 50 and top-p 0.9 | 45, on one H200 |
| prompts | time and MFU of long prompts | 6 |
| mix | generated tokens/s of many different requests, after a first time | 17, estimated |
| arrivals | requests at random times (benchmarks/requests.py): first token, per token, longest pause | 30, mixed ones |
| profile | where the time of decoding goes (benchmarks/profile.py) | 4 |

Each phase prints lines of JSON; --output gets all lines so far after each one. A phase that fails prints its error, and
the next one begins. Prompts are random tokens; the most likely one follows, except in `sampled`, and no document ends.

--help shows the options. JAX_ENABLE_COMPILATION_CACHE=false compiles even what is cached.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import Mesh, NamedSharding

import configs
from benchmarks import profile, requests
from benchmarks.command_line import run
from benchmarks.kernels.four_bits import GROUP
from megajax.fields.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from megajax.inference.benchmark import GREEDY, measure
from megajax.inference.config import Sampling, ServingConfig
from megajax.inference.device.weights import shardings_of
from megajax.inference.engine import Engine
from megajax.layers.lora import AdapterChoice, NamedAdapter
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.devices import find_device
from megajax.mesh.processes import use_compilation_cache
from megajax.mesh.sharding import parameter_spec
from megajax.models.model import Model
from megajax.overrides import override
from megajax.parameters import Parameter, PerLayer, name_of
from megajax.quantization.weights import QuantizedWeight
from megajax.terminal.command_line import parse_known

PROMPT_TOKENS = 1024
NEW_TOKENS = 256
STD = 0.02  # of random weights; of those that add to the residual stream 1 / sqrt(2 layers) of it, as when training
PROFILED_TOKENS = 16
RANK = 16  # of adapters
STD_OF_LEVELS = 21.25**0.5  # of -8 to 7, equally likely


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    config: str = "llama3_8b"
    """Recipe."""
    phases: str = "torch,vllm,ready,decode,prompts,mix,arrivals"
    """Separated by commas; "ready" always runs if a phase needs the engine."""
    seconds: float = 480.0
    """No phase begins after this time, and a peer gets half of it."""
    output: str = ""
    """File for the lines of JSON."""
    batch: tuple[PositiveInt, ...] = (1, 32, 128)
    """Of decode, each of 1,024 prompt and 256 new tokens per row; torch measures all but the last."""
    prompt: PositiveInt = 8192
    """Tokens of the long prompts."""
    requests: PositiveInt = 256
    """In the mix: 64 to 1,024 prompt tokens, 256 new ones."""
    rate: tuple[PositiveFloat, ...] = (8.0, 20.0, 32.0)
    """Requests per second of arrivals."""
    profile: PositiveInt = 32
    """Batch of the profile; the profiler runs the kernels of a CUDA graph one by one."""
    four_bits: bool = False
    """Matrices in 4 bits with a scale for each 128 inputs, as symmetric GPTQ folders have them."""
    adapters: NonNegativeInt = 0
    """Adapters of rank 16 that a request could choose; each costs the same time whether it is chosen or not."""
    serving: ServingConfig = ServingConfig()


def make_engine(config, options: Options) -> tuple[Engine, dict]:
    """-> (engine, seconds to make it and to warm it up)."""
    devices = jax.devices()
    mesh_config = config.mesh.resolve(len(devices)) if -1 in config.mesh.sizes().values() else config.mesh
    mesh = make_mesh(mesh_config, devices[: mesh_config.num_devices])
    precision = dataclasses.replace(config.precision, params=config.precision.compute)
    named = tuple(NamedAdapter(f"adapter{number}", RANK, 1.0) for number in range(options.adapters))
    adapters = (AdapterChoice(("*",), named),) if named else ()
    model = Model(config.model, precision, config.execution, adapters=adapters)
    start = time.perf_counter()
    weights = jax.block_until_ready(random_weights(model, mesh, four_bits=options.four_bits))
    made = time.perf_counter()
    engine = Engine(model, weights, mesh, None, serving=options.serving)
    engine.warm_up()
    ready = time.perf_counter()
    return engine, {
        "weights_seconds": made - start,
        "ready_seconds": ready - made,
        "num_programs": engine.num_programs,
        "num_pages": engine.stats().num_pages,
        "max_length": engine.prompts.max_length,
        "peak_memory_bytes": (mesh.local_devices[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
    }


def random_weights(model: Model, mesh: Mesh, *, four_bits: bool = False) -> dict:
    """As the engine reads them, an array per layer, each drawn on its own: a model may need nearly all of the memory.
    Scales and biases are those of `init`. four_bits: of the matrices that a folder has in 4 bits."""
    leaves = jax.tree_util.tree_leaves_with_path(model.records)
    small = [name_of(path) for path, record in leaves if record.role in ("vector", "variable")]
    initial = {name_of(path): a for path, a in jax.tree_util.tree_leaves_with_path(model.init(0, mesh, only=small))}
    key = jax.random.key(0)
    last = STD / (2 * model.num_layers) ** 0.5

    def draw(path, abstract: jax.ShapeDtypeStruct, record: Parameter):
        array = initial.get(name_of(path))
        if record.axes[0] != "layers":
            return _drawn(abstract.shape, abstract.dtype, mesh, record, STD)(key) if array is None else array
        if array is not None:
            return PerLayer(tuple(array))
        std = last if record.role == "matrix" and record.axes[-1] == "embed" else STD
        of_layer = dataclasses.replace(record, axes=record.axes[1:])
        drawn = _drawn_levels if four_bits and record.is_quantizable else _drawn
        program = drawn(abstract.shape[1:], abstract.dtype, mesh, of_layer, std)
        return PerLayer(tuple(program(jax.random.fold_in(key, layer)) for layer in range(abstract.shape[0])))

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights, model.records)


@functools.cache
def _drawn(shape: tuple[int, ...], dtype: jnp.dtype, mesh: Mesh, record: Parameter, std: float):
    sharding = NamedSharding(mesh, parameter_spec(record, mesh.shape))
    return jax.jit(lambda key: std * jax.random.normal(key, shape, dtype), out_shardings=sharding)


@functools.cache
def _drawn_levels(shape: tuple[int, ...], dtype: jnp.dtype, mesh: Mesh, record: Parameter, std: float):
    *inputs, last = shape[: record.num_inputs]
    outputs = shape[record.num_inputs :]
    num_groups = math.prod((*inputs, last)) // GROUP

    def draw(key) -> QuantizedWeight:
        levels = jax.random.bits(key, (*outputs, *inputs, last // 2), jnp.uint8)
        scale = jnp.full((num_groups, *outputs), std / STD_OF_LEVELS, dtype)
        return QuantizedWeight(levels, scale, None, "unchanged")

    return jax.jit(draw, out_shardings=shardings_of(record, "unchanged", mesh))


def decoding(engine: Engine, options: Options, sampling: Sampling = GREEDY) -> Iterator[dict]:
    for batch_size in options.batch:
        measured = measure(engine, batch_size, PROMPT_TOKENS, NEW_TOKENS, 3, sampling)
        yield {"batch": batch_size, **dataclasses.asdict(measured)}


def long_prompts(engine: Engine, options: Options) -> Iterator[dict]:
    """Eight prompts one after the other in one queue, each with one new token."""
    length = options.prompt - 1
    count = 8
    generator = random.Random(0)
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    vocab_size = engine.model.config.vocab_size

    def once() -> float:
        prompts = [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        engine.generate_tokens(prompts, sampling)
        return (time.perf_counter() - start) / count

    once()
    seconds = min(once() for _ in range(2))
    device = find_device(engine.mesh.devices.flat[0].device_kind)
    flops = engine.model.config.forward_flops(length)
    # Logits are computed for the last token only.
    total = {
        name: length * (flops.total(causal=causal) - engine.model.config.flops_outside(length).matmuls)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }
    peak = device and device.peak_flops * engine.mesh.size
    mfu = {name: value / seconds / peak if peak else None for name, value in total.items()}
    yield {"prompt_tokens": length, "seconds": seconds, "tokens_per_second": length / seconds, **mfu}


def mixed(engine: Engine, options: Options) -> Iterator[dict]:
    asked = _asked(engine)
    requests.at_once(options.requests, *asked, seed=1)  # the first call of a program may take longer
    yield requests.at_once(options.requests, *asked) | {"preemptions": engine.stats().preemptions}


def arriving(engine: Engine, options: Options) -> Iterator[dict]:
    for rate, workload in requests.cases(options.rate):
        yield requests.at_rate(rate, *_asked(engine), workload)


def _asked(engine: Engine) -> tuple[int, requests.Submit, requests.Step]:
    numbers: dict[int, int] = {}
    sampling = Sampling(max_tokens=requests.NEW_TOKENS, temperature=0.0, ignore_eos=True)

    def submit(number: int, prompt: list[int]) -> None:
        numbers[engine.submit(prompt, sampling).id] = number

    def step() -> list[tuple[int, int]]:
        return [(numbers[output.request.id], len(output.tokens)) for output in engine.step() if output.tokens]

    return engine.model.config.vocab_size, submit, step


def profiled(engine: Engine, options: Options) -> Iterator[dict]:
    """Decoding alone: the requests are started before the profile."""
    batch_size = options.profile
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    vocab_size = engine.model.config.vocab_size
    requests = [engine.submit([(7 * row + i) % vocab_size for i in range(PROMPT_TOKENS)], sampling)
                for row in range(batch_size)]  # fmt: skip

    def advance(num_tokens: int) -> int:
        before = engine.stats().generated_tokens
        while engine.stats().generated_tokens - before < num_tokens * batch_size:
            engine.step()
        return (engine.stats().generated_tokens - before) // batch_size

    advance(PROFILED_TOKENS)
    with profile.recorded() as kernels:
        num_steps = advance(PROFILED_TOKENS)
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    text = profile.as_text(profile.breakdown(kernels, num_steps))
    print(text, flush=True)
    yield {"breakdown": text.splitlines()}


class Record:
    """Lines of JSON, printed and, if there is a file, written to it as they come."""

    def __init__(self, path: str, seconds: float):
        self._path = Path(path) if path else None
        self._seconds = seconds
        self._start = time.perf_counter()
        self._lines: list[str] = []
        self.has_failed = False

    @property
    def elapsed(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._start

    def add(self, phase: str, result: dict) -> None:
        self._lines.append(json.dumps({"phase": phase, "elapsed": round(self.elapsed, 1)} | result))
        print(self._lines[-1], flush=True)
        if self._path is not None:
            self._path.write_text("\n".join(self._lines) + "\n")

    def run(self, phase: str, measure: Callable[[], Iterator[dict]]) -> None:
        """Adds what the phase yields, or its error."""
        if self.elapsed > self._seconds:
            return self.add(phase, {"skipped": f"--seconds={self._seconds:g} are over"})
        print(f"{phase}: begins after {self.elapsed:.0f} s", file=sys.stderr, flush=True)
        try:
            for result in measure():
                self.add(phase, result)
        except Exception as error:
            self.has_failed = True
            self.add(phase, {"error": f"{type(error).__name__}: {error}"[:2000]})


def peer(name: str, needs: tuple[str, ...], options: Options, given: list[str]) -> Iterator[dict]:
    """Runs benchmarks/peers/{name}_decode.py in a process of its own, before this one uses the GPU. given: its
    arguments. Skipped where what it needs is not installed."""
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    if missing:
        yield {"skipped": f"{' and '.join(missing)} not installed"}
        return
    command = [sys.executable, "-m", f"benchmarks.peers.{name}_decode", f"--config={options.config}", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=options.seconds / 2)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        yield {"error": f"stopped after {options.seconds / 2:.0f} s"}
    yield from (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    if process.returncode not in (0, -9):
        yield {"error": f"{' '.join(command)} ended with status {process.returncode}"}


def _listed(numbers: Iterable[float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def main(arguments: list[str]) -> int:
    options, overrides = parse_known(Options, arguments, "python -m benchmarks.decode", __doc__)
    phases = options.phases.split(",")
    if unknown := [name for name in phases if name not in PHASES]:
        raise ValueError(f"--phases={unknown[0]} is unknown; use any of {','.join(PHASES)}")
    # One GPU unless asked for more, as infer.py: the mesh of the recipe is for training.
    config = override(dataclasses.replace(configs.recipe(options.config), mesh=MeshConfig()), overrides)
    record = Record(options.output, options.seconds)
    record.add("about", {"config": options.config, "overrides": arguments, "jax": jax.__version__,
                         "jaxlib": jaxlib.__version__})  # fmt: skip
    few = options.batch[:-1] or options.batch
    if "torch" in phases:
        given = [f"--batch={_listed(few)}", *overrides]
        record.run("torch", functools.partial(peer, "torch", ("torch", "transformers"), options, given))
    if "vllm" in phases:
        given = [
            f"--batch={_listed(options.batch)}",
            f"--requests={options.requests}",
            f"--rate={_listed(options.rate)}",
        ]
        given += ["--quantization=gptq"] * options.four_bits
        given += ["--quantization=fp8"] * (options.serving.weight_dtype == "float8")
        given += ["--kv_cache_dtype=fp8"] * (options.serving.page_dtype != "compute")
        record.run("vllm", functools.partial(peer, "vllm", ("vllm",), options, [*given, *overrides]))
    engines: list[Engine] = []

    def ready() -> Iterator[dict]:
        use_compilation_cache()
        engine, found = make_engine(config, options)
        engines.append(engine)
        yield {"device": f"{engine.mesh.size} x {engine.mesh.devices.flat[0].device_kind}"} | found

    if set(phases) - {"torch", "vllm"}:
        record.run("ready", ready)
    for name in phases:
        if engines and PHASES[name] is not None:
            record.run(name, functools.partial(PHASES[name], engines[0], options))
    return int(record.has_failed)


SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.9)
PHASES = {"torch": None, "vllm": None, "ready": None, "decode": decoding,
          "sampled": functools.partial(decoding, sampling=SAMPLED), "prompts": long_prompts, "mix": mixed,
          "arrivals": arriving, "profile": profiled}  # fmt: skip


if __name__ == "__main__":
    run(main)
