"""Engines in processes of their own: they answer as one in this process does, and none is left behind."""

import dataclasses
import functools
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import jax
import jax.numpy as jnp
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.layout import recorded
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.inference.engine import Engine
from megajax.inference.server.engine_process import EngineProcess
from megajax.inference.server.replicas import engines_from_run
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from servers import MODEL, SERVING, prompt_logprobs, random_params, serving, wait_until

PROMPTS = ["Once upon a time", "x", "The answer to everything is ", "one two three four five six seven eight "]
FLOAT32 = PrecisionConfig(compute="float32")
ONE_ROW = dataclasses.replace(SERVING, max_rows=1)  # few programs


def save_run(folder, model_config, steps):
    config = Config(model=model_config, precision=FLOAT32)
    data = dataclasses.replace(config.data, tokenizer="bytes")
    config = dataclasses.replace(config, data=data)
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    model = Model(model_config, FLOAT32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with Checkpointer(folder, config.checkpoint) as checkpointer:
        for step in steps:
            params = jax.device_put(random_params(model, step), model.shardings(mesh))
            checkpointer.save(step, params, {"count": jnp.int32(0)}, recorded(model.layer_rows))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_run(folder / "other", dataclasses.replace(MODEL, num_layers=2), [1])
    return save_run(folder / "run", MODEL, [1, 2])


@pytest.fixture(scope="module")
def here(runs):
    """Step -> an engine in this process."""
    return {step: Engine.from_run(runs, step=step, serving=ONE_ROW) for step in (1, 2)}


@pytest.fixture(scope="module")
def replicas(runs):
    """(engines, URL), on two devices each."""
    with (
        engines_from_run(runs, MeshConfig(data=2, fsdp=2), serving=ONE_ROW) as engines,
        serving(*engines, allow_load=True, run=str(runs)) as url,
    ):
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        yield engines, url


def complete(url, **body):
    answer = httpx2.post(f"{url}/v1/completions", json={"temperature": 0, "max_tokens": 12} | body)
    assert answer.is_success, answer.text
    return answer.json()


def texts(url):
    """Asked for at once, so that both engines have work."""
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: complete(url, prompt=prompt), PROMPTS * 3))
    return [answer["choices"][0]["text"] for answer in answers]


def expected(engine):
    return engine.generate(PROMPTS, Sampling(max_tokens=12, temperature=0.0)) * 3


def test_replicas_answer_as_one_engine_and_share_the_requests(replicas, here):
    engines, url = replicas
    assert texts(url) == expected(here[2])
    counts = [engine.stats().generated_tokens for engine in engines]
    assert min(counts) > 0.2 * sum(counts)
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    found = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("megajax:")}
    assert found["megajax:generation_tokens_total"] == sum(counts)
    assert found["megajax:compiled_programs_total"] >= 2 * here[2].num_programs
    assert found["megajax:num_requests_running"] == found["megajax:num_requests_waiting"] == 0


def test_samples_and_the_probabilities_of_the_prompt_pass_through_the_pipe(replicas, here):
    _, url = replicas
    answer = complete(url, prompt=PROMPTS[0], n=2, echo=True, logprobs=1)
    text = PROMPTS[0] + expected(here[2])[0]
    assert [choice["text"] for choice in answer["choices"]] == [text, text]
    wanted = prompt_logprobs(here[2], list(PROMPTS[0].encode()))
    found = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] is None and len(found) == len(PROMPTS[0]) + 12
    for got, want in zip(found[1:], wanted, strict=False):
        assert got == pytest.approx(want.logprob, abs=1e-4)
    assert answer["usage"] == {**answer["usage"], "prompt_tokens": len(PROMPTS[0]), "completion_tokens": 24}


def test_what_a_client_leaves_ends_in_the_process(replicas):
    engines, url = replicas
    body = {"prompt": "x", "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    wait_until(lambda: not any(engine.has_work for engine in engines))
    assert sum(engine.stats().num_running for engine in engines) == 0
    refused = httpx2.post(f"{url}/v1/completions", json={"prompt": [1] * 200})
    assert refused.status_code == 400 and "exceeds the 128 tokens" in refused.json()["error"]["message"]


class Gone:
    """Cannot be opened in another process."""

    def __reduce__(self):
        return make_none, ()


def test_other_weights_are_loaded_by_all(replicas, here, runs):
    engines, url = replicas
    with pytest.raises(ValueError, match="no engine today"):
        engines[0].check(Gone())
    refused = httpx2.post(f"{url}/v1/load", json={"run": str(runs.parent / "other")})
    assert refused.status_code == 400 and "another model" in refused.json()["error"]["message"]
    assert texts(url) == expected(here[2])
    for step in (1, 2):
        assert httpx2.post(f"{url}/v1/load", json={"run": str(runs), "step": step}, timeout=60).is_success
        assert texts(url) == expected(here[step])


def make_one(runs):
    return Engine.from_run(runs, serving=ONE_ROW)


def make_none():
    raise ValueError("no engine today")


def test_a_process_that_ends_ends_the_server_and_its_requests(runs):
    engine = EngineProcess("engine 7", functools.partial(make_one, runs))
    refusing = EngineProcess("engine 8", make_none)
    failed = threading.Event()
    try:
        with pytest.raises(ValueError, match="engine 8: no engine today"):
            refusing.open()
        engine.open()
        assert isinstance(engine.prompts.tokenizer, BytesTokenizer)
        with serving(engine, on_failure=failed.set) as url:
            wait_until(lambda: httpx2.get(f"{url}/health").is_success)
            metrics = httpx2.get(f"{url}/metrics").text
            assert float(re.search("^megajax:compiled_programs_total.* (.*)$", metrics, re.M)[1]) > 0
            os.kill(engine.pid, signal.SIGTERM)  # is for the server
            assert complete(url, prompt="x")["usage"]["completion_tokens"] == 12
            os.kill(engine.pid, signal.SIGKILL)
            assert failed.wait(120)
            health = httpx2.get(f"{url}/health")
            assert health.status_code == 503
            assert "engine 7 has ended with exit code -9" in health.json()["error"]["message"]
    finally:
        engine.close()
        refusing.close()


def test_more_replicas_than_devices_are_refused():
    with (
        pytest.raises(ValueError, match="mesh.data=5: 5 replicas need 10 devices and there are 8; use --mesh.data=4"),
        engines_from_run("run", MeshConfig(data=5, tensor=2)),
    ):
        pass
