"""Speed of serving a recipe with random weights:

    python -m benchmarks.decode --config=llama3_8b [--section.field=value ...]

Prints, one line of JSON each: the time to ready (compiling or loading every program; JAX_ENABLE_COMPILATION_CACHE=false
compiles even what is cached), decoding speed for several batches with the part of the memory bandwidth that it uses,
the time and MFU of long prompts, and the generated tokens/s of a mix of requests. Tokens are random and the most likely
one is taken, without an end of the document.

    --batch=1,32,128        batches, each of 1,024 prompt and 256 new tokens per row
    --prompt=8192           tokens of the long prompts; 0: none
    --requests=256          in the mix: 64 to 1,024 prompt tokens, 256 new ones; 0: no mix
    --serving.field=value   as of ServingConfig: --serving.page_dtype=int8, --serving.decode_steps=8
    --profile=BATCH         where the time of decoding with this batch goes (benchmarks/profile.py). Of kernels in a
                            CUDA graph it shows the graph alone: set XLA_FLAGS=--xla_gpu_enable_command_buffer= to see
                            them
"""

import dataclasses
import json
import random
import tempfile
import time

import jax
import jaxlib
import tyro

from benchmarks import profile
from benchmarks.command_line import read_config, run, split
from megajax.devices import find_device
from megajax.inference.benchmark import measure
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.sampling import Sampling
from megajax.mesh import make_mesh, use_compilation_cache
from megajax.models.model import Model

PROMPT_TOKENS = 1024
NEW_TOKENS = 256
PROFILED_TOKENS = 16


def make_engine(config, serving: ServingConfig) -> tuple[Engine, dict]:
    """-> (engine, seconds to make it and to warm it up)."""
    sizes = {axis: max(size, 1) for axis, size in config.mesh.sizes().items()}  # one device unless asked for more
    mesh_config = dataclasses.replace(config.mesh, **sizes)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    precision = dataclasses.replace(config.precision, params=config.precision.compute)
    model = Model(config.model, precision, config.execution)
    start = time.perf_counter()
    weights = jax.block_until_ready(model.per_layer(model.init(0, mesh)))
    made = time.perf_counter()
    engine = Engine(model, weights, mesh, None, serving=serving)
    engine.warm_up()
    ready = time.perf_counter()
    return engine, {
        "weights_seconds": made - start,
        "ready_seconds": ready - made,
        "num_programs": engine.num_programs,
        "num_pages": engine.stats().num_pages,
        "max_length": engine.room_for_prompt(0),
        "peak_memory_bytes": (mesh.local_devices[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
    }


def decoding(engine: Engine, batch_size: int) -> dict:
    return {"batch": batch_size, **dataclasses.asdict(measure(engine, batch_size, PROMPT_TOKENS, NEW_TOKENS, 3))}


def long_prompts(engine: Engine, length: int, count: int = 8) -> dict:
    """Prompts one after the other in one queue, each with one new token."""
    generator = random.Random(0)
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    vocab_size = engine.model.config.vocab_size

    def once() -> float:
        prompts = [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        engine.generate_tokens(prompts, sampling)
        return (time.perf_counter() - start) / count

    once()
    seconds = min(once() for _ in range(3))
    device = find_device(engine.mesh.devices.flat[0].device_kind)
    flops = engine.model.config.forward_flops(length)
    # Logits are computed for the last token only.
    total = {
        name: length * (flops.total(causal=causal) - engine.model.config.flops_outside(length).matmuls)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }
    peak = device and device.peak_flops * engine.mesh.size
    mfu = {name: value / seconds / peak if peak else None for name, value in total.items()}
    return {"prompt_tokens": length, "seconds": seconds, "tokens_per_second": length / seconds, **mfu}


def mixed(engine: Engine, count: int) -> dict:
    generator = random.Random(0)
    vocab_size = engine.model.config.vocab_size
    lengths = [generator.randint(64, 1024) for _ in range(count)]
    prompts = [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
    start = time.perf_counter()
    tokens = engine.generate_tokens(prompts, Sampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True))
    seconds = time.perf_counter() - start
    generated = sum(map(len, tokens))
    return {
        "requests": count,
        "prompt_tokens": sum(lengths),
        "generated_tokens": generated,
        "seconds": seconds,
        "generated_tokens_per_second": generated / seconds,
        "preemptions": engine.stats().preemptions,
    }


def profiled(engine: Engine, batch_size: int) -> str:
    """Decoding alone: the requests are started before the profile."""
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
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            num_steps = advance(PROFILED_TOKENS)
        found = profile.breakdown(profile.read_kernels(folder), num_steps)
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    return profile.as_text(found)


def main(arguments: list[str]) -> None:
    known = {"config": "llama3_8b", "batch": "1,32,128", "prompt": "8192", "requests": "256", "profile": ""}
    options, rest = split(arguments, known)
    is_serving = [argument.startswith("--serving.") for argument in rest]
    overrides = [argument for argument, mine in zip(rest, is_serving, strict=True) if not mine]
    settings = [argument.replace("--serving.", "--") for argument, mine in zip(rest, is_serving, strict=True) if mine]
    serving = tyro.cli(ServingConfig, args=settings, prog="--serving")
    config = read_config(options["config"], overrides)
    use_compilation_cache()
    engine, ready = make_engine(config, serving)
    device = engine.mesh.devices.flat[0].device_kind
    about = {"config": options["config"], "device": f"{engine.mesh.size} x {device}", "jax": jax.__version__}
    print(json.dumps(about | {"jaxlib": jaxlib.__version__, "overrides": rest} | ready), flush=True)
    for batch_size in map(int, options["batch"].split(",")):
        print(json.dumps(decoding(engine, batch_size)), flush=True)
    if int(options["prompt"]):
        print(json.dumps(long_prompts(engine, int(options["prompt"]) - 1)), flush=True)
    if int(options["requests"]):
        print(json.dumps(mixed(engine, int(options["requests"]))), flush=True)
    if options["profile"]:
        print(profiled(engine, int(options["profile"])), flush=True)


if __name__ == "__main__":
    run(main)
