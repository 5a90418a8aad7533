"""Several adapters in one engine: each request gets what an engine with its adapter alone generates."""

import dataclasses
import json
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
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.lora import LoraConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.parameters import name_of
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights.hugging_face.export import export_run
from servers import serving, wait_until

MODEL = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=257, vocab_multiple=1,
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


def drawn(model, seed: int) -> dict:
    """Weights whose adapters change the model; the base has the same ones with each seed."""

    def draw(path, array: jax.Array) -> np.ndarray:
        name = name_of(path)
        is_adapter = "_lora_" in name
        generator = np.random.default_rng([zlib.crc32(name.encode()), seed if is_adapter else 0])
        return generator.normal(float(name.endswith("scale")), 0.3, array.shape).astype(array.dtype)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_weights)


def save(path, config: Config, seed: int = 0):
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    model = config.make_model()
    weights = jax.device_put(drawn(model, seed))
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
    """requests: (prompt, name of its adapter)."""
    prompts = [(prompt, dataclasses.replace(GREEDY, adapter=name)) for prompt, name in requests]
    found = [[] for _ in prompts]
    for number, output in outputs_of(engine, prompts):
        found[number] += output.tokens
    return found


@pytest.fixture(scope="module")
def wanted(paths):
    """{(number of a prompt, adapter): its tokens}, each from an engine with this adapter alone."""
    found = {}
    for name in NAMES:
        engine = Engine.from_run(paths[name], serving=SERVING)
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
    assert dict(zip(keys, found, strict=True)) == wanted


def test_requests_of_one_batch_get_what_engines_with_one_adapter_generate(engine, wanted):
    check(engine, wanted)
    hits = engine.stats().prefix_hits
    check(engine, wanted)  # from the prefix cache
    assert engine.stats().prefix_hits > hits
    assert engine.generate_tokens(PROMPTS, GREEDY) == [wanted[number, None] for number in range(len(PROMPTS))]


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
    check(Engine.from_run(paths[None], serving=guessing, adapters=adapters_of(paths)), wanted)
    monkeypatch.setattr(Engine, "platform", "gpu")
    mixed = Engine.from_run(paths[None], serving=SERVING, adapters=adapters_of(paths))
    assert mixed.scheduler.limits.rows_beside
    check(mixed, wanted)


def test_a_mesh_gives_the_same(paths, wanted):
    mesh = MeshConfig(tensor=2)
    check(Engine.from_run(paths["exported"], mesh, serving=SERVING, adapters=adapters_of(paths)), wanted)
