"""Several adapters in one engine: each request gets what an engine with its adapter alone generates."""

import dataclasses
import json
import shutil
import zlib

import httpx2
import jax
import numpy as np
import openai
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.cli.serving import Serve, read_adapters
from megajax.config import Config
from megajax.convert.hugging_face import main as convert
from megajax.data.config import DataConfig
from megajax.inference.config import Sampling, ServingConfig
from megajax.inference.engine import Engine, outputs_of
from megajax.inference.server.config import ServerConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.lora import AdapterChoice, LoraConfig, NamedAdapter
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights.adapters import AdaptedWeights
from megajax.weights.hugging_face.export import export_run
from megajax.weights.sources import open_source
from servers import prompt_logprobs, serving, wait_until

MODEL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=257, vocab_multiple=2,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False, init_std=0.3,
)  # fmt: skip
LORAS = {
    "all": LoraConfig(rank=4, alpha=6.0),
    "some": LoraConfig(rank=3, alpha=2.0, rslora=True, targets=("attention.query", "attention.value", "mlp.down")),
}
NAMES = (None, *LORAS)
SERVING = ServingConfig(max_rows=4, max_batch_tokens=16, page_size=8, num_pages=40, max_length=64, decode_steps=3)
PREFIX = list(range(40, 60))
PROMPTS = [[5, 17, 3], [*PREFIX, 1, 2], [*PREFIX, 9], list(range(100, 130))]
GREEDY = Sampling(max_tokens=10, temperature=0.0, ignore_eos=True)


def drawn(model, seed: int, of_base: int = 0) -> dict:
    """Weights whose adapters change the model. seed: of the adapters."""

    def draw(path, array: jax.Array) -> np.ndarray:
        name = name_of(path)
        is_adapter = "_lora_" in name
        generator = np.random.default_rng([zlib.crc32(name.encode()), seed if is_adapter else of_base])
        return generator.normal(float(name.endswith("scale")), 0.3, array.shape).astype(array.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


def save(path, config: Config, seed: int = 0, of_base: int = 0):
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    model = config.make_model()
    weights = jax.device_put(drawn(model, seed, of_base))
    rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
    meta = {"step": 1, "layer_rows": rows, "config": dataclasses.asdict(config)}
    with Checkpointer(path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, weights, {"m": weights["embedding"]}, meta)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Runs by name: the base (None), "all", "some"; "peft" is "some" as a folder of PEFT."""
    folder = tmp_path_factory.mktemp("adapters")
    common = dict(
        model=MODEL, precision=PrecisionConfig(compute="float32"), data=DataConfig(tokenizer="bytes"),
        training=TrainingConfig(sequence_length=64),
    )  # fmt: skip
    found = {None: save(folder / "base", Config(**common))}
    export_run(found[None], folder / "exported", architecture="LlamaForCausalLM")
    start = CheckpointConfig(start_from=str(folder / "exported"))
    for seed, (name, lora) in enumerate(LORAS.items()):
        found[name] = save(folder / name, Config(**common, lora=lora, checkpoint=start), seed)
    convert(["export", f"--run={found['some']}", f"--to={folder / 'peft'}"])
    return found | {"peft": folder / "peft", "exported": folder / "exported"}


def adapters_of(paths) -> dict:
    return {"all": paths["all"], "some": paths["peft"]}


def answers(engine: Engine, requests) -> list[list[int]]:
    """requests: (prompt, name of its adapter). They end at different times, so that prompts begin beside others."""
    prompts = [
        (prompt, dataclasses.replace(GREEDY, adapter=name, max_tokens=GREEDY.max_tokens - number % 4))
        for number, (prompt, name) in enumerate(requests)
    ]
    found = [[] for _ in prompts]
    for number, output in outputs_of(engine, prompts):
        found[number] += output.tokens
    return found


@pytest.fixture(scope="module")
def alone(paths):
    """Engines with one adapter, and with none."""
    return {name: Engine.from_run(paths[name], serving=SERVING) for name in NAMES}


@pytest.fixture(scope="module")
def wanted(alone):
    """{(number of a prompt, adapter): its tokens}."""
    found = {}
    for name, engine in alone.items():
        for number, tokens in enumerate(engine.generate_tokens(PROMPTS, GREEDY)):
            found[number, name] = tokens
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)  # each adapter changes each answer
    return found


@pytest.fixture(scope="module")
def engine(paths):
    return Engine.from_run(paths[None], serving=SERVING, adapters=adapters_of(paths))


def check(engine, wanted):
    keys = list(wanted)
    found = answers(engine, [(PROMPTS[number], name) for number, name in keys])
    for key, tokens in zip(keys, found, strict=True):
        assert len(tokens) >= GREEDY.max_tokens - 3
        assert (key, tokens) == (key, wanted[key][: len(tokens)])


def test_requests_of_one_batch_get_what_engines_with_one_adapter_generate(engine, wanted):
    check(engine, wanted)
    hits = engine.stats().prefix_hits
    check(engine, wanted)  # from the prefix cache
    assert engine.stats().prefix_hits > hits
    assert engine.generate_tokens(PROMPTS, GREEDY) == [wanted[number, None] for number in range(len(PROMPTS))]


def test_the_base_is_unchanged_bit_for_bit(engine, alone):
    for prompt in PROMPTS:
        assert prompt_logprobs(engine, prompt) == prompt_logprobs(alone[None], prompt)


def test_adapters_share_no_pages(engine):
    engine.scheduler.forget()
    before = engine.stats().prefix_hits
    prompt = [*range(200, 224), 1]
    for name in NAMES:
        answers(engine, [(prompt, name)])
        assert engine.stats().prefix_hits == before
    answers(engine, [(prompt, "some")])
    assert engine.stats().prefix_hits == before + 24


def test_decoding_beside_prompts_and_guesses_keep_the_adapters(paths, wanted, monkeypatch):
    guessing = dataclasses.replace(SERVING, draft_tokens=2)
    guessed = Engine.from_run(paths[None], serving=guessing, draft_run=paths["all"], adapters=adapters_of(paths))
    check(guessed, wanted)
    assert 0 < guessed.stats().accepted < guessed.stats().drafted  # the draft model reads no adapters
    monkeypatch.setattr(Engine, "platform", "gpu")
    mixed = Engine.from_run(paths[None], serving=SERVING, adapters=adapters_of(paths))
    assert mixed.scheduler.limits.rows_beside
    check(mixed, wanted)


def test_a_mesh_gives_the_same(paths, wanted):
    check(
        Engine.from_run(paths[None], MeshConfig(fsdp=2, tensor=2), serving=SERVING, adapters=adapters_of(paths)), wanted
    )


OTHERS = {
    "guesses of the model, 8 bits": (
        dataclasses.replace(MODEL, num_layers=1, mtp_layers=1),
        dict(draft_tokens=1, draft_method="mtp", weight_dtype="int8"),
    ),
    "states beside pages": (
        HybridConfig(
            num_layers=1, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=257, vocab_multiple=1, pattern="M",
            position="none", norm="rmsnorm", biases=(), mamba=MambaConfig(head_dim=8, state_dim=8),
        ),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_and_formats(name):
    """A choice of one adapter has the parameters of that adapter alone, and zeros."""
    config, changes = OTHERS[name]
    lora = LORAS["all"]
    choice = AdapterChoice(("*",), (NamedAdapter("it", lora.rank, lora.scale),))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    serving = dataclasses.replace(SERVING, max_rows=1, **changes)

    def pad(array: np.ndarray, form: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.pad(array, [(0, wide - size) for size, wide in zip(array.shape, form.shape, strict=True)])

    def made(*transforms) -> Engine:
        alone, model = (
            Model(config, PrecisionConfig(compute="float32"), adapters=each) for each in (lora.transforms, transforms)
        )
        params = jax.tree.map(pad, drawn(alone, 1), model.abstract_weights)
        return Engine(model, jax.device_put(params, model.shardings(mesh)), mesh, None, serving=serving)

    def generated(engine: Engine, adapter: str | None = None) -> list[tuple]:
        found = []
        for _ in range(3):
            request = engine.submit(PROMPTS[1], dataclasses.replace(GREEDY, adapter=adapter))
            while not request.is_finished:
                engine.step()
            found += [(sequence.tokens, sequence.guesses) for sequence in request.sequences]
        return found

    engine = made(choice)
    assert (found := generated(engine, "it")) == generated(made(*lora.transforms))
    assert found != generated(engine)
    assert engine.stats().prefix_hits


# ----------------------------------------------------------------------------- what is refused


def test_what_is_no_adapter_of_the_base_is_refused(paths, tmp_path):
    base = open_source(paths[None])
    adapted = Config.load(paths["all"])

    def refuses(message: str, path, base=base) -> None:
        with pytest.raises(ValueError, match=message):
            AdaptedWeights(base, {"it": path})

    refuses("it=.*base has none .lora.rank=None.", paths[None])
    refuses("all, step 1 has one itself", paths["some"], open_source(paths["all"]))
    refuses("it=.*other.* belongs to another base than .*base, step 1: embedding differs",
            save(tmp_path / "other", adapted, of_base=1))  # fmt: skip
    wide = dataclasses.replace(adapted, model=dataclasses.replace(MODEL, mlp_dim=64))
    refuses(r"another model than .*mlp.down is \[2, 64, 32\] there, and \[2, 48, 32\] here",
            save(tmp_path / "wide", wide))  # fmt: skip
    norms = dataclasses.replace(adapted.training, trained=("*_lora_?", "*norm*"))
    refuses(
        "it=.* has trained .*norm.scale as well", save(tmp_path / "norms", dataclasses.replace(adapted, training=norms))
    )
    moe = dataclasses.replace(MODEL, moe=MoeConfig(num_experts=2, expert_dim=8))
    experts = dataclasses.replace(Config.load(paths[None]), model=moe)
    refuses("it=.* changes layers.moe.*; adapters of experts",
            save(tmp_path / "experts", dataclasses.replace(experts, lora=LORAS["all"])),
            open_source(save(tmp_path / "moe", experts)))  # fmt: skip


def test_a_folder_of_peft_may_name_a_base_that_is_elsewhere(paths, tmp_path):
    folder = shutil.copytree(paths["peft"], tmp_path / "peft")
    options = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(options | {"base_model_name_or_path": "org/name"}))
    found = AdaptedWeights(open_source(paths["exported"]), {"it": folder}).transform
    assert found.adapters == (NamedAdapter("it", 3, LORAS["some"].scale),)
    assert found.matrices == ("attention.query", "attention.value", "mlp.down")
    with pytest.raises(ValueError, match="base_model_name_or_path='org/name' is no folder"):
        AdaptedWeights(open_source(paths[None]), {"it": folder})


def test_names_and_options_are_checked(engine):
    assert read_adapters(["a=x,b=y", "c=z"], "base") == {"a": "x", "b": "y", "c": "z"}
    for wrong in ("a", "=x", "a="):
        with pytest.raises(ValueError, match=f"adapters={wrong} must be NAME=DIR"):
            read_adapters([wrong], "base")
    for twice in ("a=x,a=y", "base=x"):
        with pytest.raises(ValueError, match="there is a model .* already"):
            read_adapters([twice], "base")
    with pytest.raises(ValueError, match="allow_load"):
        Serve(run="base", adapters=("a=x",), server=ServerConfig(allow_load=True))()
    with pytest.raises(ValueError, match="adapter=other is not one of this engine, which has all, some"):
        engine.submit([1], dataclasses.replace(GREEDY, adapter="other"))


# ----------------------------------------------------------------------------- the server


def test_the_server_chooses_by_model(engine):
    text = "Once upon a time"
    sampling = Sampling(max_tokens=12, temperature=0.0)
    names = {"base": None} | {name: name for name in LORAS}
    offline = {
        model: engine.generate([text], dataclasses.replace(sampling, adapter=name))[0] for model, name in names.items()
    }
    assert len(set(offline.values())) == len(names)
    with serving(engine, model_name="base") as url:
        wait_until(lambda: httpx2.get(f"{url}/health").is_success)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        parents = {card.id: getattr(card, "parent", None) for card in client.models.list()}
        assert parents == {"base": None, "all": "base", "some": "base"}
        assert client.models.retrieve("some").parent == "base"
        for model, wanted in offline.items():
            answer = client.completions.create(model=model, prompt=text, max_tokens=12, temperature=0)
            assert (answer.model, answer.choices[0].text) == (model, wanted)
        messages = [{"role": "user", "content": "Hi"}]
        options = dict(messages=messages, max_tokens=12, temperature=0)
        chats = {model: client.chat.completions.create(model=model, **options) for model in names}
        assert {model: answer.model for model, answer in chats.items()} == {model: model for model in names}
        assert len({answer.choices[0].message.content for answer in chats.values()}) == len(names)
        response = client.responses.create(model="all", input="Hi", max_output_tokens=12, temperature=0)
        assert response.output_text == chats["all"].choices[0].message.content
        with pytest.raises(
            openai.NotFoundError, match="the model other does not exist; this server has base, all, some"
        ):
            client.completions.create(model="other", prompt=text)
