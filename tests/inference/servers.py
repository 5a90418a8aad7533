"""Servers for tests: of a tiny model, and of an engine that does nothing without a permission."""

import contextlib
import dataclasses
import functools
import gc
import sys
import threading
import time

import jax
import numpy as np
import uvicorn

from megajax.cli.serving import bind, serve
from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.inference.config import Sampling
from megajax.inference.engine import Engine, Output, ServingConfig, Stats
from megajax.inference.scheduling.work import Request
from megajax.inference.server.app import ServerConfig, make_app
from megajax.inference.server.connections import uvicorn_config
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.training.reporting.console import log_to_stderr

MODEL = DecoderConfig(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=32, vocab_size=257, vocab_multiple=1,
                      position="rope")  # fmt: skip
# ChatML with the names of tools, and their calls as Hermes writes them.
TEMPLATE = ChatTemplate(
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
    (),
)
# Few programs: one table, one chunk, three numbers of rows.
SERVING = ServingConfig(max_rows=4, max_batch_tokens=16, page_size=32, num_pages=24, max_length=128, decode_steps=2)


def random_params(model, seed):
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda a: generator.normal(0, 0.5, a.shape).astype(np.float32), model.abstract_weights)


def engine_on(device, **changes):
    model = Model(MODEL, PrecisionConfig(compute="float32"))
    mesh = make_mesh(MeshConfig(), [device])
    params = jax.device_put(random_params(model, 0), model.shardings(mesh))
    return Engine(model, params, mesh, BytesTokenizer(), serving=dataclasses.replace(SERVING, **changes))


def prompt_logprobs(engine, prompt):
    """Those of its tokens after the first, as the engine finds them."""
    request = engine.submit(prompt, Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=1))
    while not request.is_finished:
        engine.step()
    return request.prompt_logprobs


@contextlib.contextmanager
def serving(*engines, on_failure=None, template=TEMPLATE, model_name="tiny", **config):
    """The URL of a server for the engines."""
    config = ServerConfig(model_name=model_name, **config)
    with running(make_app(engines, config, template, on_failure), config) as url:
        yield url


@contextlib.contextmanager
def running(app, config):
    """The URL of a server for the application."""
    server = uvicorn.Server(uvicorn_config(app, config.request_timeout_seconds, port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        gc.unfreeze()


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds} seconds"
        time.sleep(0.02)


class FakePrompts:
    tokenizer = BytesTokenizer()
    max_length = 1000

    def encode(self, text):
        return list(text.encode())


class FakeEngine:
    """Generates the token 120 ("x") once per step, and a step needs a permission."""

    tokenizer = BytesTokenizer()
    prompts = FakePrompts()
    adapters = ()

    def __init__(self):
        self.warm = threading.Event()
        self.permissions = threading.Semaphore(0)
        self.error = None
        self.running = {}

    def warm_up_first(self):
        self.warm.wait()
        return []

    def submit(self, prompt, sampling, owner, images=()):
        request = Request(list(prompt), sampling, owner=owner)
        self.running[request] = sampling.max_tokens
        return request

    def cancel(self, request):
        self.running.pop(request, None)

    @property
    def has_work(self):
        return bool(self.running)

    def step(self):
        if not self.permissions.acquire(timeout=0.01):
            return []
        if self.error is not None:
            raise self.error
        outputs = []
        for request in list(self.running):
            self.running[request] -= 1
            reason = None if self.running[request] else "length"
            if reason:
                del self.running[request]
            outputs.append(Output(request, 0, [120], "x", None, reason, None))
        return outputs

    def stats(self):
        zeros = {field.name: 0 for field in dataclasses.fields(Stats)}
        return Stats(**zeros | {"num_running": len(self.running), "num_pages": 1})


@contextlib.contextmanager
def serving_fake(**config):
    fake = FakeEngine()
    with serving(fake, **config) as url:
        try:
            yield fake, url
        finally:
            fake.warm.set()
            for _ in range(1000):
                fake.permissions.release()


if __name__ == "__main__":  # PORT MAX_LENGTH TIMEOUT_SECONDS: a server in a process of its own
    port, max_length, timeout = map(int, sys.argv[1:])
    num_pages = 4 * max_length // SERVING.page_size
    engine = engine_on(jax.devices()[0], max_rows=16, max_batch_tokens=256, num_pages=num_pages, max_length=max_length)
    config = ServerConfig(model_name="tiny\nforged", request_timeout_seconds=timeout)
    log_to_stderr()
    make = functools.partial(make_app, [engine], config, TEMPLATE)
    serve(make, config, bind("127.0.0.1", port))


def recorded_calls(engine: Engine, monkeypatch) -> list:
    """What the engine's scheduler decides from now on."""
    following = engine.scheduler.next
    calls = []

    def recorded():
        calls.append(following())
        return calls[-1]

    monkeypatch.setattr(engine.scheduler, "next", recorded)
    return calls
