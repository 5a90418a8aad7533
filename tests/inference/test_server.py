"""The HTTP server: a real client gets what the engine generates, and whatever clients do, no request is left behind."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import jax
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from megajax.checkpoint.piecewise import PiecewiseArray, StoredParameter
from megajax.cli import serving as command
from megajax.config import Config
from megajax.data.tokenizers.chat_template import CHATML, ChatTemplate
from megajax.data.tokenizers.tokenizer import BytesTokenizer, NullTokenizer
from megajax.evaluation.scorer import Scorer
from megajax.figures.drawings import save, traffic
from megajax.inference.device.warm_up import Stage
from megajax.inference.server import app, engine_thread, replicas
from megajax.inference.server.answers import TokenTexts
from megajax.inference.server.app import ServerConfig
from megajax.inference.server.connections import HEADER_SECONDS, uvicorn_config
from megajax.inference.server.engine_thread import Overloaded
from megajax.inference.tokens.sampling import Sampling, recommended_sampling
from megajax.inference.traffic import Load, ServerTarget, Workload, measure, table
from megajax.parameters import name_of
from servers import MODEL, SERVING, FakeEngine, engine_on, random_params, running, serving, serving_fake, wait_until

PROMPTS = ["Once upon a time", "x", "The answer to everything is ", "äöü", "one two three four five six seven eight "]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
KEY = "secret"


@pytest.fixture(scope="module")
def engine():
    return engine_on(jax.devices()[0])


@pytest.fixture(scope="module")
def offline(engine):
    """prompt -> (text, tokens), generated greedily without a server."""
    template = ChatTemplate(CHATML, {}, ())
    prompts = [*PROMPTS, template.render(MESSAGES, add_generation_prompt=True)]
    sampling = Sampling(max_tokens=12, temperature=0.0)
    texts = engine.generate(prompts, sampling)
    tokens = engine.generate_tokens([engine.prompts.encode(prompt) for prompt in prompts], sampling)
    return dict(zip([*PROMPTS, "chat"], zip(texts, tokens, strict=True), strict=True))


@pytest.fixture(scope="module")
def lm_eval(engine):
    """(recorded request, what is found offline): Scores, a text, or None."""
    lines = (Path(__file__).parent / "lm_eval_requests.jsonl").read_text().splitlines()
    found = []
    for path, body in map(json.loads, lines):
        expected = None
        if path == "/v1/completions" and "echo" in body:
            (expected,) = Scorer(engine.model, engine.params, engine.mesh).score(body["prompt"])
        elif path == "/v1/completions":
            sampling = Sampling(max_tokens=body["max_tokens"], temperature=0.0, stop=tuple(body["stop"]))
            (expected,) = engine.generate([bytes(body["prompt"][0]).decode()], sampling)
        found.append(((path, body), expected))
    return found


@pytest.fixture(scope="module")
def url(engine, offline, lm_eval):
    with serving(engine, api_keys=("another", KEY), max_body_bytes=100_000, allow_load=True) as found:
        wait_until(lambda: httpx2.get(f"{found}/health").is_success)
        wait_until(lambda: engine.scheduler.limits.num_rows == SERVING.max_rows)  # all programs are compiled
        yield found


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def metrics(url):
    """name -> sum over the other labels."""
    found = {}
    for family in text_string_to_metric_families(httpx2.get(f"{url}/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


# ----------------------------------------------------------------------------- the answers


def test_completions_are_those_of_the_engine(client, offline):
    (found,) = client.models.list()
    assert (found.id, found.max_model_len) == ("tiny", 128)
    answer = client.completions.create(model="tiny", prompt=PROMPTS, n=2, **GREEDY)
    assert [choice.text for choice in answer.choices] == [offline[prompt][0] for prompt in PROMPTS for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert answer.usage.completion_tokens == sum(2 * len(offline[prompt][1]) for prompt in PROMPTS)
    encoded = [list(prompt.encode()) for prompt in PROMPTS]
    more = {"return_token_ids": True}
    answer = client.completions.create(model="tiny", prompt=encoded, extra_body=more, **GREEDY)
    assert [choice.token_ids for choice in answer.choices] == [offline[prompt][1] for prompt in PROMPTS]
    answer = client.completions.create(model="tiny", prompt=encoded[0], echo=True, **GREEDY)
    assert answer.choices[0].text == PROMPTS[0] + offline[PROMPTS[0]][0]
    stop = offline[PROMPTS[0]][0][3:5]
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], stop=stop, **GREEDY)
    assert answer.choices[0].text == offline[PROMPTS[0]][0].partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_replicas_share_the_requests(engine, offline):
    other = engine_on(jax.devices()[1], max_rows=1)  # fewer programs
    before = engine.stats().generated_tokens
    with serving(engine, other) as url:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
            ThreadPoolExecutor(8) as threads,
        ):
            ask = lambda prompt: client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text
            assert list(threads.map(ask, PROMPTS * 4)) == [offline[prompt][0] for prompt in PROMPTS * 4]
        counts = [engine.stats().generated_tokens - before, other.stats().generated_tokens]
        assert min(counts) > 0.2 * sum(counts)
        assert metrics(url)["megajax:generation_tokens_total"] == sum(counts) + before


def test_turns_of_a_conversation_stay_on_one_replica(monkeypatch):
    """Unless it has too much to do; and what is remembered of the beginnings is limited."""
    fakes = [FakeEngine() for _ in range(3)]
    monkeypatch.setattr(replicas, "MAX_BLOCKS", 4)
    for fake in fakes:
        fake.warm.set()

    def waiting():
        return [len(fake.running) for fake in fakes]

    with serving(*fakes) as url, contextlib.ExitStack() as open_streams:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)

        def ask(prompt):
            """-> the number of the engine that gets it."""
            before = waiting()
            body = {"prompt": prompt, "stream": True}
            open_streams.enter_context(httpx2.stream("POST", f"{url}/v1/completions", json=body))
            (number,) = np.flatnonzero(np.subtract(waiting(), before))
            return number

        turns = ["a" * 64, "b" * 64 + "c" * 10]
        first, second = map(ask, turns)
        assert first != second
        assert ask(turns[0] + "d" * 70) == first and ask(turns[0] + "d" * 64 + "e") == first
        assert ask("b" * 64) == second
        assert [ask("f") for _ in range(3)] == [2, 2, second]  # the idlest, as nothing of it is known
        assert [ask(turns[0]) for _ in range(5)] == [first] * 4 + [2]  # then it has five more than the idlest
        for letter in "ghijk":
            ask(letter * 64)
        assert ask("b" * 64) != second  # forgotten
        for fake in fakes:
            fake.running.clear()


def test_streams_carry_the_same_text_and_usage(client, offline):
    options = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    texts = [""] * len(PROMPTS)
    reasons = {}
    for chunk in client.completions.create(model="tiny", prompt=PROMPTS, logprobs=1, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
        usage = chunk.usage
    assert texts == [offline[prompt][0] for prompt in PROMPTS]
    assert all(each[-1] == "length" and not any(each[:-1]) for each in reasons.values())
    assert usage.completion_tokens == sum(len(offline[prompt][1]) for prompt in PROMPTS)


def test_chats_are_rendered_by_the_template(client, offline):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == offline["chat"][0]
    assert len(choice.logprobs.content) == len(offline["chat"][1])
    assert choice.logprobs.content[0].logprob == max(top.logprob for top in choice.logprobs.content[0].top_logprobs)
    parts = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    deltas = list(client.chat.completions.create(model="tiny", messages=parts, stream=True, **GREEDY))
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == offline["chat"][0]
    # without max_tokens as long as there is room
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert whole.usage.total_tokens == 128


def test_answers_follow_a_schema(client):
    schema = {
        "type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    no_space = {"9": -100, "10": -100, "13": -100, "32": -100}  # of which this model would write too much
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=form, max_tokens=37, logit_bias=no_space
    )
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "green")
    regex = {"structured_outputs": {"regex": "[ab]{3}"}}
    text = client.completions.create(model="tiny", prompt="x", extra_body=regex).choices[0].text
    assert len(text) == 3 and set(text) <= {"a", "b"}


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"a": {"$ref": "#/$defs/small"}}, "required": ["a"], "additionalProperties": False,
        "$defs": {"small": {"enum": [1, 2]}}}}},
    {"type": "function", "function": {"name": "g"}},
]  # fmt: skip
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}


def test_calls_of_tools_are_parsed_and_go_back_into_the_conversation(client, url):
    regex = 'Hi <tool_call>\\n\\{"name": "f", "arguments": \\{"a": [0-9]\\}\\}\\n</tool_call>'
    written = ASKED | {"extra_body": {"structured_outputs": {"regex": regex}}}
    (choice,) = client.chat.completions.create(**written).choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason, call.function.name) == ("Hi ", "tool_calls", "f")
    assert json.loads(call.function.arguments)["a"] in range(10)
    with client.chat.completions.stream(**written) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert (streamed.message.content, streamed.finish_reason) == ("Hi ", "tool_calls")
    assert set(json.loads(streamed.message.tool_calls[0].function.arguments)) == {"a"}
    more = [choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    tokens = ask(url, "/tokenize", {"messages": more, "tools": TOOLS}).json()["tokens"]
    arguments = f'{{"name": "f", "arguments": {call.function.arguments}}}'
    assert bytes(tokens).decode() == (
        f"f\ng\n<|im_start|>assistant\nHi <tool_call>\n{arguments}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )
    for choice in ({"tool_choice": "none"}, {"tools": []}):  # the text as it is
        message = client.chat.completions.create(**written | choice).choices[0].message
        assert message.tool_calls is None and message.content.startswith("Hi <tool_call>")


def test_a_call_that_is_demanded_follows_the_schema_of_its_tool(client):
    found = set()
    for seed in range(8):
        answer = client.chat.completions.create(**ASKED, tool_choice="required", temperature=2, seed=seed)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        found.add((call.function.name, call.function.arguments))
    assert ("g", "{}") in found and found - {("g", "{}")} <= {("f", '{"a": 1}'), ("f", '{"a": 2}')} and len(found) > 1
    named = {"type": "function", "function": {"name": "g"}}
    chunks = list(client.chat.completions.create(**ASKED, tool_choice=named, parallel_tool_calls=False, stream=True))
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name, call.function.arguments) == (0, "g", "{}") and call.id
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_responses_are_the_answers_of_chats(client, offline):
    greedy = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    text, tokens = offline["chat"]
    answer = client.responses.create(instructions="Be brief.", input="Hi", **greedy)
    assert (answer.output_text, answer.status) == (text, "incomplete" if len(tokens) == 12 else "completed")
    assert answer.usage.output_tokens == len(tokens)
    assert answer.usage.input_tokens == len(ChatTemplate(CHATML, {}, ()).render(MESSAGES, add_generation_prompt=True))
    parts = [MESSAGES[0], {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    events = list(client.responses.create(input=parts, stream=True, **greedy))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == f"response.{answer.status}"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text and events[-1].response.usage == answer.usage
    with client.responses.stream(instructions="Be brief.", input="Hi", **greedy) as stream:
        assert [event.snapshot for event in stream if event.type == "response.output_text.delta"][-1] == text
    with pytest.raises(openai.BadRequestError, match="stores no answers; send the whole conversation"):
        client.responses.create(input="Hi", previous_response_id="resp-1", **greedy)


def test_a_seed_repeats_a_sample_and_none_does_not(client):
    def sample(**more):
        return client.completions.create(model="tiny", prompt="x", max_tokens=16, **more).choices[0].text

    assert sample(seed=5) == sample(seed=5) != sample(seed=6)
    assert sample() != sample()


def test_requests_of_lm_eval_get_the_numbers_of_the_engine(url, lm_eval):
    """What lm-eval 0.4.13 (local-completions with tokenizer_backend=remote) sent for a multiple choice, a rolling
    likelihood and a generation, and what it reads of the answers."""
    headers = {"Authorization": f"Bearer {KEY}"}
    end = httpx2.get(f"{url}/tokenizer_info", headers=headers).json()["eos_token"]
    for (path, body), expected in lm_eval:
        answer = ask(url, path, body).json()
        assert "error" not in answer, answer
        if path == "/tokenize":
            assert answer["tokens"] == ([256] if body["prompt"] == end else list(body["prompt"].encode()))
        elif "echo" not in body:
            assert answer["choices"][0]["text"] == expected
        else:
            logprobs = answer["choices"][0]["logprobs"]
            own = logprobs["token_logprobs"]
            assert len(own) == len(body["prompt"][0]) + 1 and own[0] is None
            np.testing.assert_allclose(own[1:-1], expected.log_probs, atol=1e-4)  # float32 sums
            greedy = [
                max(top.values()) == each for top, each in zip(logprobs["top_logprobs"][1:-1], own[1:-1], strict=True)
            ]
            assert greedy == expected.is_top.tolist()


def test_a_scored_prompt_is_followed_by_one_token_even_if_that_is_the_end(url):
    """lm-eval drops the last log-probability, which must not be one of the prompt."""
    body = {"prompt": "abc", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "logit_bias": {"256": 100}}
    choice = ask(url, "/v1/completions", body).json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    only_prompt = ask(url, "/v1/completions", body | {"max_tokens": 0}).json()["choices"][0]
    assert only_prompt["text"] == "abc" and only_prompt["logprobs"]["tokens"] == ["a", "b", "c"]


def test_tokens_have_the_text_that_they_have_inside_a_text():
    assert [TokenTexts(BytesTokenizer()).of(token) for token in (65, 256, 200)] == ["A", "", "\ufffd"]
    assert TokenTexts(NullTokenizer(300)).of(299) == " 299"


def test_tokens_of_texts_and_conversations(url):
    text = ask(url, "/tokenize", {"prompt": "äx"}).json()
    assert text == {"count": 3, "max_model_len": 128, "tokens": list("äx".encode())}
    assert ask(url, "/detokenize", {"tokens": text["tokens"]}).json() == {"prompt": "äx"}
    chat = ask(url, "/tokenize", {"messages": MESSAGES}).json()
    assert bytes(chat["tokens"]).decode().endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_many_streams_at_once_and_the_metrics_count_them(url, offline):
    before = metrics(url)

    async def one(client, number):
        prompt = PROMPTS[number % len(PROMPTS)]
        stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **GREEDY)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        return text == offline[prompt][0]

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    assert all(asyncio.run(all_of_them()))
    after = metrics(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["megajax:request_success_total"] == 64
    assert grown["megajax:time_to_first_token_seconds_count"] == 64
    num_tokens = sum(len(offline[PROMPTS[number % len(PROMPTS)]][1]) for number in range(64))
    assert grown["megajax:generation_tokens_total"] == num_tokens
    assert grown["megajax:compiled_programs_total"] == 0
    assert after["megajax:num_requests_running"] == after["megajax:num_requests_waiting"] == 0


def test_other_parameters_are_loaded_without_a_restart(url, engine, offline, monkeypatch):
    class Source:
        """Parameters drawn with a seed, which the test names in place of a directory."""

        weight_format = None

        def __init__(self, seed, step):
            self.seed = int(seed)
            self.config = Config(model=MODEL if self.seed < 9 else dataclasses.replace(MODEL, num_layers=3))
            params = jax.tree_util.tree_leaves_with_path(random_params(engine.model, self.seed))
            self.params = {name_of(path): array if self.seed != 8 else array * np.nan for path, array in params}

        def __str__(self):
            return f"seed {self.seed}"

        def open(self, name, layer_rows):
            array = self.params[name]
            if not name.startswith("layers."):
                return StoredParameter([(None, PiecewiseArray(array.shape, array.dtype, array.__getitem__))], None)
            rows = [PiecewiseArray(row.shape, row.dtype, row.__getitem__) for row in array]
            return StoredParameter(list(enumerate(rows)), None)

    monkeypatch.setattr(app, "open_source", Source)

    def texts():
        choices = ask(url, "/v1/completions", {"prompt": PROMPTS, **GREEDY}).json()["choices"]
        return [choice["text"] for choice in choices]

    before = [offline[prompt][0] for prompt in PROMPTS]
    assert texts() == before
    assert ask(url, "/v1/load", {"run": "1"}).is_success
    assert all(new != old for new, old in zip(texts(), before, strict=True))
    loaded = texts()
    for run, message in (("9", "another model"), ("8", "numbers that are not finite")):
        refused = ask(url, "/v1/load", {"run": run})
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    assert texts() == loaded
    assert ask(url, "/v1/load", {"run": "0"}).is_success
    assert texts() == before  # also what was in the prefix cache


def test_tokens_of_many_streams_are_sent_together(url, monkeypatch):
    """The first one of a sample is not held back, and joined events say the same as the whole answer."""

    def events(stream):
        return (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {"))

    monkeypatch.setattr(engine_thread, "EVENTS_PER_SECOND", 0.01)
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    with serving_fake() as (fake, fake_url), httpx2.Client(base_url=fake_url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        with client.stream("POST", "/v1/completions", json=body) as stream:
            fake.permissions.release(1)
            each = events(stream)
            texts = [next(each)["choices"][0]["text"]]
            fake.permissions.release(4)
            texts += [event["choices"][0]["text"] for event in each]
    assert texts == ["x", "xxxx"]

    body = {"prompt": [PROMPTS[0], PROMPTS[2]], "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    body |= {"logprobs": 2, "return_token_ids": True}
    pieces = collections.defaultdict(list)
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        whole = client.post("/v1/completions", json=body).json()["choices"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for event in events(stream):
                (choice,) = event["choices"]
                pieces[choice["index"]].append(choice)
    for choice in whole:
        parts = pieces[choice["index"]]
        assert len(parts) < 6
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name, expected in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == expected


# ----------------------------------------------------------------------------- load


def test_latency_and_throughput_are_measured_over_http_and_without(url, tmp_path):
    """bench --url against the server; and what it reports of a target whose times are known."""

    async def both():
        workload = Workload(num_requests=6, prompt_tokens=5, max_tokens=4)
        async with ServerTarget(url, KEY) as target:
            return [await measure(target, load, workload) for load in (Load(request_rate=200.0), Load(concurrency=2))]

    results = asyncio.run(both())
    for result in results:
        assert (result.num_finished, result.num_refused, result.num_generated) == (6, 0, 24)
        assert 0 < result.first_token["p50"] <= result.first_token["p99"] <= result.whole["p99"] <= result.seconds
    assert "200/s" in table(results) and "2 at a time" in table(results)
    save(traffic(results), str(tmp_path / "figure.svg"))
    with pytest.raises(ValueError, match="status 400: .*exceeds the 128 tokens"):
        command.bench_server(url, KEY, [Load(concurrency=2)], Workload(num_requests=4, prompt_tokens=200, max_tokens=4))
    assert json.loads(json.dumps(results[0].record()))["num_finished"] == 6

    fake = FakeEngine()
    fake.warm.set()
    fake.permissions.release(100)
    (result,) = command.bench_engine(fake, [Load(concurrency=2)], Workload(num_requests=4, max_tokens=3))
    assert (result.num_finished, result.num_generated) == (4, 12)

    class Timed:
        """Refuses every other request; the others take 0.1 s for the first token, and 0.5 s for three more."""

        number = 0

        async def stream(self, prompt, max_tokens):
            self.number += 1
            if self.number % 2:
                raise Overloaded
            await asyncio.sleep(0.1)
            yield 1
            await asyncio.sleep(0.5)
            yield 3

    result = asyncio.run(measure(Timed(), Load(request_rate=float("inf")), Workload(num_requests=4)))
    assert (result.num_finished, result.num_refused, result.num_generated) == (2, 2, 8)
    assert 0.1 <= result.first_token["p50"] < 0.6 <= result.whole["p50"] <= result.seconds
    assert 0.5 / 3 <= result.between_tokens["p50"] < 1 / 3
    assert json.loads(json.dumps(result.record(), allow_nan=False))["request_rate"] == "inf"


def test_other_servers_are_measured_too():
    """Their JSON may contain what Unicode takes for the end of a line, and arrive in any pieces."""
    event = {"choices": [{"text": "a\u0085b\u2028", "token_ids": [1, 2]}]}
    content = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\ndata: [DONE]\n\n".encode()

    async def models(request):
        return JSONResponse({"data": [{"id": "other"}]})

    async def completions(request):
        async def pieces():
            for start in range(0, len(content), 7):
                yield content[start : start + 7]

        return StreamingResponse(pieces(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    with running(Starlette(routes=routes), ServerConfig()) as url:
        (result,) = command.bench_server(url, None, [Load(concurrency=2)], Workload(num_requests=4))
    assert (result.num_finished, result.num_generated) == (4, 8)


def test_clients_close_idle_connections_before_the_server_does():
    assert httpx2.Limits().keepalive_expiry < uvicorn_config(Starlette(), 1.0).timeout_keep_alive < HEADER_SECONDS


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_chats_in_a_browser(url, offline):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[browser]'")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(error))
        page.goto(url)
        expect = playwright.expect
        expect(page.locator("#model")).to_have_text("needs an API key")
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#max_tokens")).to_have_value("128")  # the model's length: 256 would not fit
        for number in (1, 2):  # both do not fit
            page.fill("#text", "Hello " * 10)
            page.press("#text", "Enter")
            expect(page.get_by_text("first text after")).to_have_count(number)
        expect(page.get_by_text("The model reads only the end of the conversation")).to_have_count(1)
        expect(page.locator(".turn.error")).to_have_count(0)
        page.click("#clear")
        page.fill("#temperature", "0")
        page.fill("#max_tokens", "12")
        page.fill("#system", "Be brief.")
        page.fill("#text", "Hi")
        page.press("#text", "Enter")
        expect(page.locator(".note")).to_contain_text("first text after")
        assert page.locator(".turn").all_inner_texts()[1].strip() == offline["chat"][0].strip()
        expect(page.locator("#running")).to_have_text("0")
        page.fill("#temperature", "-1")
        page.fill("#text", "and then?")
        page.click("#send")
        expect(page.locator(".turn.error")).to_contain_text("temperature=-1")
        page.click("#clear")
        expect(page.locator(".turn")).to_have_count(0)
        browser.close()
    assert not problems


# ----------------------------------------------------------------------------- mistakes


def ask(url, path, body, key=KEY):
    return httpx2.post(url + path, json=body, headers={"Authorization": f"Bearer {key}"})


LONG = {"prompt": [1] * 200}
USER = {"role": "user", "content": "a"}
CALL = {"function": {"name": "f", "arguments": "[" * 5000}}
CHAT = "/v1/chat/completions"
MISTAKES = [
    ("/v1/completions", {}, 400, "prompt", "required"),
    ("/v1/completions", {"prompt": []}, 400, "prompt", "1 to 2048"),
    ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt", "list of token ids"),
    ("/v1/completions", {"prompt": [257]}, 400, None, "vocab_size"),
    ("/v1/completions", {"prompt": "x", "temperatur": 1}, 400, "temperatur", "not supported"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature", "temperature=-1"),
    ("/v1/completions", {"prompt": "x", "top_p": "1"}, 400, "top_p", "number"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"900": 1}}, 400, "logit_bias", "tokens are 0 to"),
    ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model", "tiny"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "echo"),
    ("/v1/completions", LONG, 400, None, "exceeds the 128 tokens"),
    ("/v1/completions", {"prompt": "x" * 200_000}, 413, None, "larger than the 100000"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400,
     "response_format.json_schema", "needs json_schema"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}, 400, "regex", "regex="),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "at most 16"),
    ("/v1/completions", {"prompt": "x", "stop": "a" * 257}, 400, "stop", "at most 256"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 129}, 400, "stop_token_ids", "at most 128"),
    ("/v1/completions", {"prompt": ["x"] * 17, "n": 128}, 400, None, "ask for at most 2048"),
    ("/v1/completions", {"prompt": "x" * 300}, 400, "prompt", "300 characters"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": [{"role": ""}] * 4097}, 400, "messages", "at most 4096"),
    (CHAT, {"messages": [USER] * 300}, 400, "messages", "300 characters"),
    (CHAT, {"messages": [USER | {"tool_calls": 5}]}, 400, "messages", "must be a list"),
    (CHAT, {"messages": [USER | {"tool_calls": [CALL]}]}, 400, "messages", "function.arguments"),
    (CHAT, {"messages": [USER | {"tool_calls": [5]}]}, 400, "messages", "function.arguments"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {}}]}, 400, "tools", "needs a name"),
    (CHAT, {"messages": [USER], "tool_choice": "any"}, 400, "tool_choice", "must be auto, none, required"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, 400, "tool_choice", "not in tools"),
    (CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, 400,
     None, "regex and grammar: a text can follow only one"),
    ("/tokenize", {"messages": [USER | {"tool_calls": 5}]}, 400, "messages", "must be a list"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text"),
    (CHAT, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, None, "spells the special token"),
    ("/tokenize", {}, 400, "prompt", "prompt or messages"),
    ("/detokenize", {"tokens": [999]}, 400, "tokens", "257"),
    ("/v1/load", {"run": "nowhere"}, 400, "run", "run=nowhere"),
    ("/v1/embeddings", {}, 404, None, "--embeddings"),
    ("/v1/images", {}, 404, None, "Not Found"),
    ("/v1/models", {}, 405, None, "Method"),
]  # fmt: skip


def test_mistakes_are_named_in_the_form_of_openai(url, client):
    for path, body, status, param, message in MISTAKES:
        answer = ask(url, path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, status), (path, body, error)
        assert message in error["message"], error
    with pytest.raises(openai.BadRequestError, match="top_k=-3"):
        client.completions.create(model="tiny", prompt="x", extra_body={"top_k": -3})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    assert httpx2.post(f"{url}/v1/completions", content=b"{", headers=headers).status_code == 400
    # what a page of another origin can send
    headers["Content-Type"] = "text/plain"
    assert httpx2.post(f"{url}/v1/completions", content=b'{"prompt": "x"}', headers=headers).status_code == 415


def test_keys_are_asked_for(url):
    for key in ("wrong", "sécret", KEY + "x"):
        answer = httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    for headers in ({}, {"Authorization": KEY}, {"Authorization": "Basic " + KEY}):
        assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 401
    assert httpx2.get(f"{url}/v1/models", headers={"Authorization": "Bearer another"}).is_success
    page = httpx2.get(url)
    assert page.is_success and "default-src 'none'" in page.headers["content-security-policy"]


# ----------------------------------------------------------------------------- clients that leave


def leave_while_sending(url):
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{".encode())
        time.sleep(0.1)


def test_what_clients_abandon_is_cancelled(url, caplog):
    before = metrics(url)
    body = {"prompt": PROMPTS, "max_tokens": 80, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}

    async def leave(client, number):
        is_stream = number % 2 == 0
        request = client.build_request("POST", "/v1/completions", json={**body, "stream": is_stream}, headers=headers)
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(0.02 * number):
                answer = await client.send(request, stream=True)
                async for _ in answer.aiter_lines():
                    break
                await answer.aclose()

    async def many():
        async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
            await asyncio.gather(*(leave(client, number) for number in range(12)))

    asyncio.run(many())
    leave_while_sending(url)
    wait_until(lambda: metrics(url)["megajax:num_requests_running"] + metrics(url)["megajax:num_requests_waiting"] == 0)
    after = metrics(url)
    assert after["megajax:kv_cache_usage_perc"] == 0
    assert "Exception" not in caplog.text
    assert after["megajax:request_success_total"] > before.get("megajax:request_success_total", 0)  # as abort
    assert ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1}).is_success


async def by_many(url, worker):
    """worker(client), 48 of them at a time."""
    headers = {"Authorization": f"Bearer {KEY}"}
    client = httpx2.AsyncClient(base_url=url, headers=headers, timeout=None)
    async with client, asyncio.TaskGroup() as group:
        for _ in range(48):
            group.create_task(worker(client))


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind(url, offline):
    """Streams and whole answers, a third of them abandoned, and mistakes: all other answers are right, and pages and
    memory are free afterwards."""
    num_requests = 10_000
    generator = np.random.default_rng(0)
    numbers = iter(range(num_requests))
    counts = collections.Counter()
    peaks = []  # MiB

    async def one(client):
        prompt = PROMPTS[generator.integers(len(PROMPTS))]
        kind = generator.choice(["whole", "stream", "abandoned", "abandoned stream", "too long", "wrong"])
        body = {"prompt": prompt, "stream": "stream" in kind, "n": int(generator.integers(1, 4)), **GREEDY}
        if kind == "too long":
            body["prompt"] = [1] * int(generator.integers(129, 5000))
        if kind == "wrong":
            body["top_p"] = 2
        patience = generator.exponential(0.2) if "abandoned" in kind else None
        try:
            async with asyncio.timeout(patience):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            counts["abandoned"] += 1
            return
        counts[answer.status_code] += 1
        assert answer.status_code == (400 if kind in ("too long", "wrong") else 200), answer.text
        if answer.is_success and not body["stream"]:
            assert {choice["text"] for choice in answer.json()["choices"]} == {offline[prompt][0]}

    async def worker(client):
        for number in numbers:
            await one(client)
            if number % 1000 == 999:
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    before = metrics(url)
    asyncio.run(by_many(url, worker))
    wait_until(lambda: metrics(url)["megajax:num_requests_running"] + metrics(url)["megajax:num_requests_waiting"] == 0)
    after = metrics(url)
    print(counts, [round(peak) for peak in peaks])
    assert counts["abandoned"] > num_requests / 20 and counts[200] > num_requests / 4
    assert after["megajax:kv_cache_usage_perc"] == 0
    assert after["megajax:compiled_programs_total"] == before["megajax:compiled_programs_total"]
    assert peaks[-1] - peaks[1] < 20


@pytest.mark.slow
def test_streams_abandoned_in_the_middle_leave_nothing_behind(url, offline):
    """5,000 streams, of which 2,000 are abandoned after their first event: the others are right."""
    numbers = iter(range(5000))
    counts = collections.Counter()
    first_seconds = []
    body = {"stream": True, "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def one(client, number):
        prompt = PROMPTS[number % len(PROMPTS)]
        begin = time.monotonic()
        text = ""
        async with client.stream("POST", "/v1/completions", json=body | {"prompt": prompt}) as answer:
            assert answer.is_success
            async for line in answer.aiter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                first_seconds.append(time.monotonic() - begin) if not text else None
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if number % 5 < 2:
                    counts["abandoned"] += 1
                    return
        assert text == offline[prompt][0] or len(offline[prompt][1]) < 12
        counts["answered"] += 1

    async def worker(client):
        for number in numbers:
            await one(client, number)

    before = metrics(url)
    begin = time.monotonic()
    asyncio.run(by_many(url, worker))
    seconds = time.monotonic() - begin
    wait_until(lambda: metrics(url)["megajax:num_requests_running"] + metrics(url)["megajax:num_requests_waiting"] == 0)
    after = metrics(url)
    print(f"{dict(counts)} in {seconds:.0f} s; first text after {np.median(first_seconds):.2f} s (median), "
          f"{max(first_seconds):.2f} s (longest)")  # fmt: skip
    assert counts == {"answered": 3000, "abandoned": 2000}
    assert after["megajax:kv_cache_usage_perc"] == 0
    assert after["megajax:compiled_programs_total"] == before["megajax:compiled_programs_total"]


# ----------------------------------------------------------------------------- an engine that is slow, or fails


def test_the_server_says_whether_it_is_ready_and_how_full_it_is():
    with serving_fake(max_requests=2) as (fake, url), httpx2.Client(base_url=url) as client:
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        assert client.post("/v1/load", json={}).status_code == 403
        with client.stream("POST", "/v1/completions", json={"prompt": ["a", "b"], "stream": True}) as stream:
            refused = client.post("/v1/completions", json={"prompt": "c"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            for _ in range(16):
                fake.permissions.release()
            assert "DONE" in stream.read().decode()
        fake.permissions.release()
        assert client.post("/v1/completions", json={"prompt": "c", "max_tokens": 1}).is_success


def test_collections_leave_out_what_was_there_before_the_first_request():
    gc.collect()
    before = len(gc.get_objects())
    with serving_fake() as (fake, url):
        fake.warm.set()
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        assert gc.get_freeze_count() >= before
        assert len(gc.get_objects()) < before / 4


def test_the_folder_recommends_the_sampling_of_requests_that_do_not_say(tmp_path):
    assert recommended_sampling(tmp_path) == {}
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    written = recommended | {"eos_token_id": 5, "do_sample": True, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert recommended_sampling(tmp_path) == recommended
    with serving_fake(sampling=recommended) as (fake, url), httpx2.Client(base_url=url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
            body = prompt | {"top_k": 0, "max_tokens": 1, "stream": True}
            with client.stream("POST", f"/v1/{path}", json=body):
                ((request, _),) = fake.running.items()
                fake.permissions.release()
                wait_until(lambda: not fake.running)
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.95, 0, 0.0)
        assert client.get("/v1/models/tiny").json()["sampling"] == recommended


def test_each_request_is_a_line_of_the_log_unless_this_is_off(caplog):
    caplog.set_level("INFO", "megajax")
    for is_on in (True, False):
        caplog.clear()
        with serving_fake(log_requests=is_on) as (fake, url), httpx2.Client(base_url=url) as client:
            fake.warm.set()
            wait_until(lambda: client.get("/health").is_success)
            for _ in range(6):
                fake.permissions.release()
            client.post("/v1/completions", json={"prompt": ["abc", "d"], "max_tokens": 3})
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "stream": True})
            client.get("/%0aforged%1b[31m")
            client.get("/metrics")
        lines = [record.getMessage() for record in caplog.records if "127.0.0.1 " in record.getMessage()]
        said = [line.split("127.0.0.1 ")[1].rsplit(", ", 1)[0] for line in lines]
        post = "POST /v1/completions 200, "
        everything = [f"{post}4 + 6 tokens", f"{post}3 + 2 tokens", r"GET /\nforged\x1b[31m 404, 0 + 0 tokens"]
        assert sorted(said) == sorted(everything if is_on else [])  # the end of a stream may be logged after the next
        assert all(re.fullmatch(r"\d{4}(-\d\d){2} \d\d(:\d\d){2} 127.*, \d+\.\d\d s", line) for line in lines)


def test_a_request_that_takes_too_long_is_cancelled():
    with serving_fake(request_timeout_seconds=0.2) as (fake, url), httpx2.Client(base_url=url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and "request_timeout_seconds" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"prompt": "a", "stream": True})
        (event,) = [line for line in answer.text.splitlines() if line]
        assert "request_timeout_seconds" in json.loads(event.removeprefix("data: "))["error"]["message"]
        wait_until(lambda: not fake.running)


def test_a_failing_engine_ends_all_requests_with_an_error():
    failed = threading.Event()  # when infer.py serve ends the process
    with serving_fake(on_failure=failed.set) as (fake, url), httpx2.Client(base_url=url) as client:
        fake.warm.set()
        wait_until(lambda: client.get("/health").is_success)
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as stream:
            fake.error = RuntimeError("out of memory")
            fake.permissions.release()
            assert "out of memory" in json.loads(stream.read().decode().removeprefix("data: "))["error"]["message"]
        assert client.get("/health").status_code == 503 and failed.is_set()


def test_a_stop_during_warm_up_does_not_wait_for_it(monkeypatch, caplog):
    class Stopped(FakeEngine):
        def warm_up_first(self):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().warm_up_first()

    fake = Stopped()
    codes = []

    def leave(code):
        codes.append(code)
        fake.warm.set()  # the test goes on

    monkeypatch.setattr(os, "_exit", leave)
    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level("INFO"):
        config = ServerConfig(model_name="tiny")
        command.serve(functools.partial(app.make_app, [fake], config, None), config, command.bind("127.0.0.1", 0))
    signal.signal(signal.SIGTERM, before)
    assert codes == [128 + signal.SIGTERM]
    assert "serving tiny at http://127.0.0.1" in caplog.text and "stopping when all requests" in caplog.text


def test_the_server_answers_while_programs_are_compiled(engine, offline, monkeypatch, caplog):
    """With the smallest call, one sequence at a time; then the others take over, with the same answers."""
    goes_on = threading.Event()
    warm_up_first = engine.warm_up_first

    def held():
        return [Stage(shapes, [goes_on.wait, *others]) for shapes, others in warm_up_first()]

    engine.executor.compiled.clear()
    monkeypatch.setattr(engine, "warm_up_first", held)
    monkeypatch.setattr(logging.getLogger("megajax"), "propagate", True)

    def answers(client):
        ask = lambda prompt: client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(ask, PROMPTS * 2))

    expected = [offline[prompt][0] for prompt in PROMPTS * 2]
    with caplog.at_level("INFO"), serving(engine) as url:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        num_programs = engine.num_programs
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            assert answers(client) == expected
            assert engine.num_programs == num_programs
            goes_on.set()
            wait_until(lambda: engine.scheduler.limits.num_rows == SERVING.max_rows)
            assert engine.num_programs > num_programs
            num_programs = engine.num_programs
            assert answers(client) == expected
            assert engine.num_programs == num_programs
    assert "ready: warmed up in" in caplog.text and "compiled 4 of 4 programs in" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_what_compiles_while_serving_ends_with_the_server_and_its_error_ends_the_server(fails):
    goes_on = threading.Event()
    failed = threading.Event()
    after = []

    class Compiling(FakeEngine):
        def warm_up_first(self):
            return [Stage(None, [compile, lambda: after.append("compiled")])]

        def use_shapes(self, shapes):
            after.append("used")

    def compile():
        goes_on.wait()
        if fails:
            raise RuntimeError("out of memory")

    with serving(Compiling(), on_failure=failed.set) as url:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        if fails:
            goes_on.set()
            assert failed.wait(120) and "out of memory" in httpx2.get(f"{url}/health").text
    goes_on.set()
    wait_until(lambda: not any(thread.name == "compiler" for thread in threading.enumerate()))
    assert after == []


def test_a_stop_finishes_what_runs():
    fake = FakeEngine()
    fake.warm.set()
    with contextlib.ExitStack() as stack:
        with serving(fake) as url:
            client = stack.enter_context(httpx2.Client(base_url=url))
            wait_until(lambda: client.get("/health").is_success)
            body = {"prompt": "a", "max_tokens": 3, "stream": True}
            stream = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            threading.Timer(0.3, fake.permissions.release, [3]).start()
        # the server has been stopped, which the engine's steps came after
        events = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "xxx"
    assert not fake.running
