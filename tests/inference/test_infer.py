"""The command line of infer.py: bad arguments give a one-line error before a model is loaded; how text is printed."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from megajax.cli import generation, infer, serving
from megajax.cli.options import OfEngine
from megajax.data.tokenizers.chat_template import ChatTemplate
from megajax.inference.config import Sampling, ServingConfig
from megajax.inference.engine import Engine
from megajax.mesh.config import AXES
from megajax.terminal.command_line import options


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "name a command: infer.py {generate,chat"),
        ("generate --run=x", "--prompt"),
        ("generate --prompt=x", "--run"),
        ("generate --run=x --prompt=x --prompts=y", "--prompt.* or --prompts"),
        ("generate --run=x --prompts=nowhere", "prompts=nowhere cannot be read"),
        ("generate --run=x --prompt=x --output=/dev/null", "output=/dev/null exists"),
        ("generate --run=x --prompt=x --promt=y", "--promt=y is unknown; did you mean --prompt"),
        ("generate --run=x --prompt=x --mesh.tp=2", "did you mean --mesh.tensor"),
        ("generate --run=x --prompt=x --top_k=many", "top_k=many must be a whole number"),
        ("generate --run=x --prompt=x --temperature=-1", "temperature=-1"),
        ("generate --run=x --prompt=x --memory_fraction=2", "memory_fraction=2"),
        ("generate --run=nowhere --prompt=x", "run=nowhere"),
        ("chat --run=nowhere --max_tokens=0", "max_tokens=0"),
        ("chat --run=nowhere --chat_template=nothing", "chat_template=nothing is not a file"),
        ("serve --run=nowhere --chat_template=nothing", "chat_template=nothing is not a file"),
        ("serve --run=x --port=70000", "port=70000 must be"),
        ("serve --run=x --host=192.0.2.1", "host=192.0.2.1 port=8000 cannot be used"),
        ("serve --run=x --api_key_file=nowhere", "api_key_file=nowhere"),
        ("serve --run=x --max_requests=0", "max_requests=0"),
        ("serve --run=x --api_key=", "api_key= is empty"),
        ("serve --run=x --image_hosts=", "image_hosts= must be"),
        (
            "serve --run=x --image_hosts=a.example.com,https://b.example.com",
            "image_hosts=https://b.example.com must be",
        ),
        ("serve --run=x --image_hosts=a.example.com:80", "image_hosts=a.example.com:80 must be the name of a host"),
        ("serve --run=nowhere --port=0 --image_hosts=a.example.com,::1", "run=nowhere"),
        ("serve --run=nowhere --port=0", "run=nowhere"),
        ("bench --run=nowhere --batch=1,b", "batch=1,b must be a list of whole numbers"),
        ("bench --run=nowhere --batch=0", "batch=0"),
        ("bench --run=nowhere --request_rate=0", "request_rate=0 must be a list of .* above 0"),
        ("bench", "--run=DIR, or --url"),
        ("bench --url=http://127.0.0.1:1", "--request_rate"),
        ("bench --url=http://127.0.0.1:1 --concurrency=1", "url=http://127.0.0.1:1: ConnectError"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        infer.main(arguments.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value, rule", [('"hot"', "must be a number"), ("-1", "must be 0 .* or more")])
def test_recommended_sampling_that_no_request_could_ask_for_is_refused(tmp_path, value, rule):
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {value}}}')
    with pytest.raises(ValueError, match=f"generation_config.json: temperature=.*{rule}"):
        infer.main(["serve", f"--run={tmp_path}", "--port=0"])


NUMBERS = (
    "max_rows", "max_batch_tokens", "max_length", "page_size", "num_pages", "memory_fraction", "decode_steps",
    "draft_tokens", "launch.cpu_devices", *(f"mesh.{axis}" for axis in AXES),
)  # fmt: skip
OF_BENCH = ("batch", "concurrency", "prompt_tokens", "max_tokens", "repeats", "num_requests", "seed")


@pytest.mark.parametrize("command, names", [
    ("generate --prompt=x", NUMBERS), ("serve --port=0", NUMBERS), ("bench", NUMBERS + OF_BENCH),
])  # fmt: skip
def test_nonsense_numbers_are_refused_by_name_before_a_model_is_opened(command, names, monkeypatch):
    monkeypatch.setattr(Engine, "from_run", lambda *_: pytest.fail("a model is opened"))
    for name in names:
        for value in ("-2", "99999999999999999999", "-inf", "nan", "x", "", "1,,2"):
            with pytest.raises(ValueError, match=f"^{name}=[^\n]*$"):
                infer.main([*command.split(), "--run=x", f"--{name}={value}"])


def test_every_axis_of_the_mesh_and_every_field_of_the_engine_can_be_set():
    names = {option.name for option in options(infer.COMMANDS["bench"])}
    assert names > {f"mesh.{axis}" for axis in AXES}
    assert names > {field.name for field in dataclasses.fields(ServingConfig)}


def test_keys_are_read_from_a_file(tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n")
    assert serving.read_keys(["zero"], tmp_path / "keys") == ("zero", "one", "two")


# ----------------------------------------------------------------------------- generate and chat


class Bytes:
    """Prompts, and their tokenizer."""

    special_tokens = {"S:": 1}

    @property
    def tokenizer(self):
        return self

    def encode(self, text, num_images=0):
        return list(text.encode())

    encode_template = encode

    def decode(self, tokens):
        return bytes(tokens).decode()


class Backwards:
    """An engine that answers with the prompt, one character per step, the last prompt first."""

    prompts = Bytes()

    def __init__(self):
        self.asked = []
        self.left = []

    def submit(self, prompt, sampling, images=()):
        from megajax.inference.scheduling.work import Request

        self.asked.append(bytes(prompt).decode())
        request = Request(list(prompt), sampling)
        self.left.append((request, list(prompt)[: sampling.max_tokens]))
        return request

    def cancel(self, request):
        self.left = [(other, tokens) for other, tokens in self.left if other is not request]

    @property
    def has_work(self):
        return bool(self.left)

    def step(self):
        from megajax.inference.engine import Output

        request, tokens = self.left[-1]
        token = tokens.pop(0)
        if not tokens:
            self.left.pop()
        return [Output(request, 0, [token], chr(token).upper(), None, None if tokens else "length", None)]


def test_texts_are_printed_in_the_order_of_the_prompts(capsys):
    generation.print_texts(Backwards(), ["ab", "cde"], Sampling(max_tokens=2))
    assert capsys.readouterr().out == "--- 1 of 2\nabAB\n\n--- 2 of 2\ncdeCD\n"
    generation.print_texts(Backwards(), ["ab"], Sampling(max_tokens=2))
    assert capsys.readouterr().out == "abAB\n"


def test_each_call_draws_a_seed_and_says_how_to_repeat_it(monkeypatch, caplog):
    caplog.set_level("INFO", "megajax")
    used = []
    decoder = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(reads_source=False, neighbours=None)))
    monkeypatch.setattr("megajax.weights.sources.open_source", lambda *_: decoder)
    monkeypatch.setattr(OfEngine, "engine", lambda options: Backwards())
    monkeypatch.setattr(generation, "print_texts", lambda engine, prompts, sampling, images: used.append(sampling.seed))
    for _ in range(3):
        infer.main(["generate", "--run=x", "--prompt=x"])
    assert len(set(used)) == 3
    assert caplog.messages == [f"seed {seed}; --seed={seed} repeats this" for seed in used]
    infer.main(["generate", "--run=x", "--prompt=x", f"--seed={used[0]}"])
    infer.main(["generate", "--run=x", "--prompt=x", "--temperature=0"])  # nothing is drawn
    assert used[3] == used[0] and len(caplog.messages) == 3


def test_prompts_of_a_file_become_lines_of_json(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb"}\n{"prompt": "c", "id": 7}\n')
    prompts = generation.read_prompts(str(tmp_path / "p.jsonl"))
    with open(tmp_path / "out", "w") as file:
        generation.write_records(Backwards(), prompts, Sampling(max_tokens=2), file)
    first, second = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert first == {"prompt": "a\nb", "text": "A\n", "finish_reason": "length", "prompt_tokens": 3, "tokens": 2}
    assert second["text"] == "C"
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match="line 2"):
        generation.read_prompts(str(tmp_path / "p.jsonl"))


def test_a_chat_keeps_the_conversation_and_forgets_its_beginning(monkeypatch, capsys):
    lines = iter(["hi", "what?", "a very long line " * 4, "x", ""])
    monkeypatch.setattr(generation, "_read_line", lambda: next(lines))
    template = ChatTemplate("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}", {}, ["S:"])
    engine = Backwards()
    generation.chat(engine, generation.TemplatedConversation(engine, template, 40, "be"), Sampling(max_tokens=3))
    assert engine.asked == ["s:be;u:hi;", "s:be;u:hi;a:B;u:what?;", "s:be;u:hi;a:B;u:what?;a:B;u:x;"]
    out = capsys.readouterr()
    assert out.out == "S:B\nS:B\nS:B\n" and "error: the input has 76 tokens, and only 40 fit" in out.err

    lines = iter(["hi", "what?", "x" * 10, ""])
    engine = Backwards()
    generation.chat(engine, generation.PlainConversation(engine, 16), Sampling(max_tokens=3))
    assert engine.asked == ["hi\n", "hi\nHI\n\nwhat?\n", "?\nHI\n\nxxxxxxxxxx\n"[-16:]]
    assert "forgotten" in capsys.readouterr().err
