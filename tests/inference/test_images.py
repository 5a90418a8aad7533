"""Prompts with images: log-probabilities as in training, pages shared by pixels, images that are never cut."""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import io
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.data.tokenizers.chat_template import CHATML, ChatTemplate
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.images.rules import ImageRule
from megajax.inference.config import ServingConfig
from megajax.inference.engine import Engine
from megajax.inference.scheduling.work import Prefill
from megajax.inference.server import fetching
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.rope import RopeConfig
from megajax.media.rows import TEXT
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.audio_tower import AudioConfig
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.precision import PrecisionConfig
from servers import recorded_calls, serving, wait_until

pytest.importorskip("PIL")
IMAGE = 50
VOCAB = 64
FLOAT32 = PrecisionConfig(compute="float32")
PIXELS = ImageRule(resize="pixels", patch_size=4, merge=2, min_pixels=256, max_pixels=900)
TOWER = TowerConfig(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32, image=PIXELS)
MODEL = MultimodalConfig(
    num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, vocab_size=VOCAB, position="rope", init_std=0.25,
    image_token=IMAGE, vision=TOWER,
)  # fmt: skip
MODELS = {
    # As Qwen-VL: windows, deep layers, positions of three kinds.
    "pixels": dataclasses.replace(
        MODEL,
        rope=RopeConfig(sections=(1, 1, 1)),
        head_dim=6,
        vision=dataclasses.replace(TOWER, rotary=True, window=4, full_layers=(1,), table=3, deep_layers=(0,)),
    ),
    # As Gemma 3: images see themselves, layers with a window.
    "squash": dataclasses.replace(
        MODEL,
        pattern="wf",
        window=12,
        image_attention="bidirectional",
        vision=dataclasses.replace(
            TOWER, image=ImageRule(resize="squash", size=16, patch_size=4, merge=2), table=4, merged_by_mean=True,
            project_norm="merged",
        ),
    ),
    # As LLaVA-NeXT: tiles, a newline, a class token.
    "pinpoints": dataclasses.replace(
        MODEL,
        vision=dataclasses.replace(
            TOWER, image=ImageRule(resize="pinpoints", size=8, patch_size=4, pinpoints=(8, 16, 16, 8, 16, 16)), table=2,
            class_token=True, newline=True, project_dim=16,
        ),
    ),
}  # fmt: skip


def picture(number: int, height: int, width: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


PROMPTS = (
    ([1, 2, IMAGE, 3, 4, 5], ((0, 20, 33),)),
    ([7, 8, 9, 1, 4, 2, 6, 3], ()),
    ([IMAGE, 5, IMAGE, 6, 7], ((1, 30, 18), (0, 20, 33))),
)


@functools.cache
def engine(name: str, **serving) -> Engine:
    model = Model(MODELS[name], FLOAT32)
    settings = dict(max_length=96, page_size=4, num_pages=80, max_batch_tokens=24, max_rows=4) | serving
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return Engine(model, weights(name), mesh, None, serving=ServingConfig(**settings))


@functools.cache
def weights(name: str) -> dict:
    return Model(MODELS[name], FLOAT32).init(1)


def generated(engine: Engine, prompts=PROMPTS, count: int = 6, at_once: bool = True) -> list[tuple[list, list]]:
    """Greedy tokens and their log-probabilities of each prompt. at_once: submits all of them before the first step,
    else one before each step."""
    sampling = Sampling(temperature=0.0, max_tokens=count, logprobs=0, ignore_eos=True)
    requests = {}
    found = [([], []) for _ in prompts]
    while len(requests) < len(prompts) or engine.has_work:
        for number, (tokens, pictures) in enumerate(prompts[len(requests) :], len(requests)):
            images = [engine.prompts.read_image(picture(*of_image)) for of_image in pictures]
            requests[engine.submit(tokens, sampling, images=images)] = number
            if not at_once:
                break
        for output in engine.step():
            tokens, logprobs = found[requests[output.request]]
            tokens += output.tokens
            logprobs += [of_token.logprob for of_token in output.logprobs]
    return found


@functools.cache
def scorer(name: str):
    model = Model(MODELS[name], FLOAT32)
    return jax.jit(lambda weights, batch: model.scores(weights, batch).log_probs)


def trained(name: str, tokens: list[int], pictures, following: list[int]) -> np.ndarray:
    """The log-probabilities of the tokens that follow the prompt, as training computes them."""
    config = MODELS[name]
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, blocks=1, patches=256))
    inputs = config.image_inputs
    read = engine(name).prompts.read_image
    images = [read(picture(*of_image)) for of_image in pictures]
    sizes = np.array([(image.height, image.width) for image in images]).reshape(-1, 2)
    # What follows is text, also where it is the token of an image.
    expanded = inputs.expanded(np.array(tokens + [0] * len(following)), sizes)
    expanded.tokens[len(expanded.tokens) - len(following) :] = following
    views = [inputs.layouts.rule.pixels(decoded(picture(*of_image))) for of_image in pictures]
    blocks = inputs.blocks_of(sizes, lambda number: views[number])
    (image_ids,) = expanded.numbers
    image_index = np.full(len(image_ids), TEXT)
    image_index[image_ids > 0] = blocks["index"]
    length = 64

    def row(array: np.ndarray, value: int = 0) -> np.ndarray:
        return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1), constant_values=value)[None]

    batch = {
        "tokens": row(expanded.tokens),
        "labels": row(expanded.tokens[1:]),
        "positions": np.arange(length, dtype=np.int32)[None],
        "image_index": row(image_index, -1),
        "position_ids": row(expanded.positions),
        "block_ids": row(image_ids),
        "patches": blocks["patches"][None],
        "patch_places": blocks["patch_places"][None],
    }
    names = {*config.inputs(length, packed=False), "labels"}
    scores = scorer(name)(weights(name), {key: jnp.asarray(a) for key, a in batch.items() if key in names})
    last = len(expanded.tokens) - len(following) - 1
    return np.asarray(scores)[0, last : last + len(following)]


def decoded(data: bytes):
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_training(name):
    """Of texts and images in one batch, whose prompts are computed in chunks."""
    for (tokens, pictures), (following, logprobs) in zip(PROMPTS, generated(engine(name)), strict=True):
        wanted = trained(name, tokens, pictures, following)
        np.testing.assert_allclose(logprobs, wanted, atol=2e-5)
        if pictures:
            (number, *size), *others = pictures
            other = trained(name, tokens, ((number + 7, *size), *others), following)
            assert np.abs(other - wanted).max() > 1e-3


@pytest.mark.parametrize("name", ["pixels", pytest.param("squash", marks=pytest.mark.slow)])
def test_sequences_that_decode_beside_images_get_the_same_tokens(name, monkeypatch):
    """As on a GPU."""
    prompts = [PROMPTS[0], *PROMPTS, PROMPTS[2], PROMPTS[1], PROMPTS[0]]
    wanted = generated(engine(name), prompts)
    monkeypatch.setattr(Engine, "platform", "gpu")
    mixing = engine(name, decode_steps=3)
    calls = recorded_calls(mixing, monkeypatch)
    found = generated(mixing, prompts, at_once=False)
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(found, wanted, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=2e-5)
    assert any(isinstance(call, Prefill) and call.beside for call in calls)


def test_a_mesh_gives_the_same_tokens():
    model = Model(MODELS["pixels"], FLOAT32)
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    settings = ServingConfig(max_length=96, page_size=4, num_pages=80, max_batch_tokens=24, max_rows=4)
    split = Engine(model, model.init(1, mesh), mesh, None, serving=settings)
    assert [tokens for tokens, _ in generated(split)] == [tokens for tokens, _ in generated(engine("pixels"))]


def test_a_warm_up_compiles_what_images_need():
    """All of it at first for a model that has to compute an image in one call, however large."""
    of_squash = engine("squash", decode_steps=2)
    assert of_squash.warm_up_first() == []
    count = of_squash.num_programs
    generated(of_squash)
    assert of_squash.num_programs == count


def test_pages_are_shared_by_the_same_image_and_by_no_other():
    of_pixels = engine("pixels")
    before = of_pixels.stats().prefix_hits
    encoded = of_pixels.features.num_encoded
    prompt = [1, 2, IMAGE, 3, 4, 5, 6, 7]
    first = generated(of_pixels, [(prompt, ((11, 20, 33),))])
    assert of_pixels.stats().prefix_hits == before
    again = generated(of_pixels, [(prompt, ((11, 20, 33),))])
    hits = of_pixels.stats().prefix_hits
    assert hits > before and again[0][0] == first[0][0]
    generated(of_pixels, [(prompt, ((12, 20, 33),))])
    assert of_pixels.stats().prefix_hits == hits
    assert of_pixels.features.num_encoded == encoded + 2


def test_a_preempted_prompt_reads_its_images_again():
    small = engine("pixels", num_pages=20, prefix_cache=False, max_length=60)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[2]]
    found = generated(small, prompts, count=16)
    assert small.stats().preemptions > 0
    alone = [generated(engine("pixels"), [prompt], count=16)[0][0] for prompt in prompts]
    assert [tokens for tokens, _ in found] == alone


def test_what_does_not_fit_is_refused():
    of_squash = engine("squash")
    sampling = Sampling(max_tokens=4)
    image = of_squash.prompts.read_image(picture(0, 9, 9))
    with pytest.raises(ValueError, match="a text has 0 tokens of model.image_token=50 and 1 images"):
        of_squash.submit([1, 2], sampling, images=[image])
    with pytest.raises(ValueError, match="prompt_logprobs=0 is not supported with images"):
        of_squash.submit([IMAGE, 2], dataclasses.replace(sampling, prompt_logprobs=0), images=[image])
    with pytest.raises(ValueError, match="prompt has 10. tokens, which with max_tokens=4 exceeds the 96 tokens"):
        of_squash.submit([IMAGE] * 25 + [2], sampling, images=[image] * 25)
    with pytest.raises(ValueError, match="photo.png: the image is damaged"):
        of_squash.prompts.read_image(picture(0, 9, 9)[:60], "photo.png")
    narrow = engine("pixels", image_tokens=4)
    with pytest.raises(
        ValueError, match="image 0 of 33 x 20 pixels has 8 results of the tower, more than image_tokens=4"
    ):
        narrow.submit([IMAGE, 1], sampling, images=[narrow.prompts.read_image(picture(0, 20, 33))])


# ----------------------------------------------------------------------------- chats


def test_a_model_that_also_reads_sound_is_served_without_it():
    audio = AudioConfig(num_layers=1, embed_dim=8, num_heads=1, mlp_dim=8, frames=4)
    config = dataclasses.replace(MODELS["squash"], audio=audio, audio_token=51)
    model = Model(config, FLOAT32)
    settings = ServingConfig(max_length=96, page_size=4, num_pages=80, max_batch_tokens=24, max_rows=4)
    served = Engine(model, model.init(1), make_mesh(MeshConfig(), jax.devices()[:1]), None, serving=settings)
    with pytest.raises(ValueError, match=r"the token 51, which stands for a clip \(model.audio_token\); engines read"):
        served.submit([1, 51, 2], Sampling())
    assert len(generated(served, PROMPTS[:1], 2)[0][0]) == 2


MAX_BYTES = 20_000


@pytest.fixture(scope="module")
def url():
    """Of a server for a model that reads images, whose chat template writes texts."""
    model = Model(dataclasses.replace(MODELS["squash"], vocab_size=258, image_token=257), FLOAT32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    settings = ServingConfig(max_rows=2, max_batch_tokens=32, page_size=16, num_pages=32, max_length=256)
    of_images = Engine(model, model.init(1), mesh, BytesTokenizer(("<image>",)), serving=settings)
    template = ChatTemplate(CHATML, {}, (), {"image": "<image>"})
    hosts = ("127.0.0.1", "LocalHost")
    with serving(of_images, template=template, image_hosts=hosts, max_body_bytes=MAX_BYTES) as found:
        wait_until(lambda: httpx2.get(found + "/health").status_code == 200)
        yield found


def asked(url: str, *parts, **options) -> httpx2.Response:
    body = dict(messages=[{"role": "user", "content": list(parts)}], temperature=0, max_tokens=4, logprobs=True)
    return httpx2.post(url + "/v1/chat/completions", json=body | options, timeout=60)


def at(address: str) -> dict:
    return {"type": "image_url", "image_url": {"url": address}}


def in_uri(number: int) -> dict:
    return at(f"data:image/png;base64,{base64.b64encode(picture(number, 20, 33)).decode()}")


QUESTION = {"type": "text", "text": "what?"}


def test_a_chat_has_images(url):
    answers = [asked(url, in_uri(number), QUESTION).json() for number in (1, 1, 2)]
    same, again, other = [answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in answers]
    # The second one finds its prefix in the cache, so another program computes it: 7e-7 with jax 0.12.
    assert abs(same - again) < 2e-6 and abs(same - other) > 1e-4
    without = asked(url, QUESTION).json()
    assert answers[0]["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + 4 + len("\n")


@pytest.mark.parametrize("part, message", [
    (at("data:text/plain;base64,AAAA"), "must be data:image/TYPE;base64,DATA"),
    (at("data:image/png;base64,!!"), "is not base64"),
    (at("data:image/png;base64,AAAA"), "messages: image 0: no image"),
    ({"type": "input_audio"}, "only parts of the types text and image_url"),
    ({"type": "text", "text": "<image>"}, "spells the special token <image>"),
])  # fmt: skip
def test_other_parts_are_refused(url, part, message):
    answer = asked(url, part, QUESTION)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


# ----------------------------------------------------------------------------- addresses


class ImageHost(BaseHTTPRequestHandler):
    """/NUMBER.png is a picture; other paths misbehave."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append(self.path)
        status = {"/moved": 302, "/missing": 404}.get(path, 200)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/1.png")
        self.end_headers()
        if path.endswith(".png"):
            self.wfile.write(picture(int(path[1:-4]), 20, 33))
        if path == "/text":
            self.wfile.write(b"no picture")
        # Until the client has enough, which closes the connection.
        with contextlib.suppress(OSError):
            while path in ("/endless", "/slow"):
                self.wfile.write(b"x" * (1000 if path == "/endless" else 1))
                time.sleep(0.01)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    # at 127.0.0.2 too, which is not allowed
    server = ThreadingHTTPServer(("0.0.0.0", 0), ImageHost)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def address(host, path: str, name: str = "127.0.0.1") -> str:
    return f"http://{name}:{host.server_port}{path}"


@pytest.mark.parametrize("name", ["127.0.0.1", "LOCALHOST"])
def test_an_image_of_an_allowed_host_is_fetched(url, host, name):
    """Each picture takes its place among those in the request."""
    answers = [
        asked(url, *parts, QUESTION).json()["choices"][0]["logprobs"]["content"][0]["logprob"]
        for parts in (
            (in_uri(1), in_uri(2)),
            (in_uri(1), at(address(host, "/2.png?key=secret", name))),
            (at(address(host, "/2.png", name)), in_uri(1)),
        )
    ]
    # a prompt whose beginning is in the prefix cache is computed in other chunks, which round differently
    assert abs(answers[0] - answers[1]) < 1e-5 and abs(answers[0] - answers[2]) > 1e-4
    assert host.asked[-2:] == ["/2.png?key=secret", "/2.png"]


@pytest.mark.parametrize("wrong, message", [
    ("http://[::1]:{port}/1.png?key=secret", "image_url=http://[::1]:{port}/1.png: the host ::1 is not in image_hosts"),
    ("http://127.0.0.2:{port}/1.png", "send data:image/TYPE;base64,DATA, or start the server with --image_hosts=127.0"),
    ("http://127.0.0.1.:{port}/1.png", "the host 127.0.0.1. is not in image_hosts"),
    ("http://127.0.0.1@127.0.0.2:{port}/1.png", "image_url=http://127.0.0.2:{port}/1.png: the address has a user or"),
    ("http://127.0.0.2\\@127.0.0.1:{port}/1.png", "the address has a user or a password, which are not sent"),
    ("ftp://127.0.0.1:{port}/1.png", "must be data:image/TYPE;base64,DATA or an address of http or https"),
    ("file:///etc/hosts", "must be data:image/TYPE;base64,DATA or an address of http or https"),
    ("http://127.0.0.1:99999/1.png", "must be data:image/TYPE;base64,DATA or an address of http or https"),
    ("http://127.0.0.1:{port}x/1.png?key=secret", "image_url='http://127.0.0.1:{port}x/1.png': Invalid port"),
])  # fmt: skip
def test_what_is_not_allowed_is_not_asked(url, host, wrong, message):
    """Nor is an allowed address in the same request."""
    before = list(host.asked)
    answer = asked(url, at(address(host, "/1.png")), at(wrong.format(port=host.server_port)), QUESTION)
    text = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.format(port=host.server_port) in text
    assert "secret" not in text and "\n" not in text
    assert host.asked == before


@pytest.mark.parametrize("path, message", [
    ("/moved", "answered with a redirect (302), which is not followed; give the address to which it leads"),
    ("/missing", "answered with status 404; give the address of an image"),
    ("/endless", f"may have {MAX_BYTES} bytes together, and are larger"),
    ("/slow", "took longer than 0.5 s"),
    ("/text", "messages: image 0: no image"),
])  # fmt: skip
def test_a_host_that_sends_no_image_is_an_error_of_the_request(url, host, path, message, monkeypatch):
    monkeypatch.setattr(fetching, "SECONDS", 0.5 if path == "/slow" else 60)
    answer = asked(url, at(address(host, path + "?key=secret")), QUESTION)
    text = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message in text and "secret" not in text
    assert host.asked[-1] == path + "?key=secret"


def test_the_limit_of_bytes_is_that_of_all_images_of_a_request(url, host):
    one = len(picture(1, 20, 33))
    count = MAX_BYTES // one
    assert asked(url, *[at(address(host, "/1.png"))] * count, QUESTION).status_code == 200
    answer = asked(url, *[at(address(host, "/1.png"))] * (count + 1), QUESTION)
    assert answer.status_code == 400 and "bytes together" in answer.json()["error"]["message"]


def test_a_host_that_is_not_there_is_an_error_of_the_request(url):
    answer = asked(url, at("http://127.0.0.1:1/1.png"), QUESTION)
    message = "image_url=http://127.0.0.1:1/1.png: the host 127.0.0.1 cannot be asked (ConnectError: "
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_without_hosts_nothing_is_fetched(host):
    before = list(host.asked)
    fetcher = fetching.Fetcher((), MAX_BYTES)
    with pytest.raises(ValueError, match="the host 127.0.0.1 is not in image_hosts"):
        asyncio.run(fetcher.files([address(host, "/1.png")]))
    assert host.asked == before
