"""Adapters of LoRA as folders of PEFT: out, in again, merged, and the logits of PEFT itself (pip install -e
'.[parity]')."""

import dataclasses
import json
import pickle
import zlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.convert.hugging_face import main as convert
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine, Sampling, ServingConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.lora import LoraConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import name_of, named
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights import start_from
from megajax.weights.export import export
from megajax.weights.hugging_face.adapter import AdapterFolder
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.recipe import fine_tuning
from megajax.weights.sources import SavedStep, open_source

LENGTH, RANK = 16, 4
# float32 in another order of additions, of the standard deviation of logits
TOLERANCE = 2e-5
LLAMA = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=128, position="rope",
    norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False, init_std=0.15,
)  # fmt: skip
GPT2 = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, vocab_size=128, activation="gelu_tanh", max_positions=64, init_std=0.15
)
EXPERTS = dataclasses.replace(
    LLAMA, qk_norm=True, moe=MoeConfig(num_experts=4, expert_dim=24, router=RouterConfig(top_k=2))
)
NEOX = dataclasses.replace(
    GPT2, position="rope", activation="gelu", parallel_residual="two_norms", tied_embeddings=False
)
MODELS = {
    "LlamaForCausalLM": LLAMA,
    "Phi3ForCausalLM": LLAMA,  # queries, keys and values in one tensor, and gate and up in another
    "GPT2LMHeadModel": GPT2,  # [in, out]
    "GPTNeoXForCausalLM": NEOX,  # by head
    "Qwen3MoeForCausalLM": EXPERTS,
    "MixtralForCausalLM": dataclasses.replace(EXPERTS, qk_norm=False),
}


def save(path, config: Config, weights: dict) -> None:
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    rows = {kind: rows.tolist() for kind, rows in config.make_model().layer_rows.items()}
    meta = {"step": 1, "layer_rows": rows, "config": dataclasses.asdict(config)}
    with Checkpointer(path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, weights, {"m": weights["embedding"]}, meta)


def drawn(model: Model) -> dict:
    """Weights whose adapters change the model."""

    def draw(path, array: jax.Array) -> jax.Array:
        name = name_of(path)
        if not name.endswith("_lora_b"):
            return array
        return 0.1 * jax.random.normal(jax.random.key(zlib.crc32(name.encode())), array.shape)

    return jax.tree_util.tree_map_with_path(draw, model.init(0))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(architecture, section lora) -> (folder of the base, run with adapters beside its weights)."""

    def make(architecture: str, lora: LoraConfig = LoraConfig(rank=RANK, alpha=6.0)):
        folder = tmp_path_factory.mktemp("adapted")
        model = MODELS[architecture]
        common = dict(
            model=model, precision=PrecisionConfig(compute="float32"), data=DataConfig(tokenizer="null:128"),
            training=TrainingConfig(sequence_length=64),
        )  # fmt: skip
        config = Config(**common, lora=lora, checkpoint=CheckpointConfig(start_from=str(folder / "base")))
        weights = drawn(config.make_model())
        plain = config.make_model().without_transforms
        save(folder / "plain", Config(**common), plain.init(0))
        export_run(folder / "plain", folder / "base", architecture=architecture)
        save(folder / "run", config, weights)
        return folder / "base", folder / "run"

    return make


def logits(path) -> np.ndarray:
    source = open_source(path)
    model = Model(source.config.model, PrecisionConfig(compute="float32"), adapters=source.config.lora.transforms)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: a.update(sharding=one), model.abstract_weights)
    ids = sample_ids()
    batch = {"tokens": ids, "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)}

    @jax.jit
    def run(weights):
        module = model.module(weights)
        return module.token_logits(module.hidden(batch)[0])

    return np.asarray(run(source.restore_params(form, model.layer_rows)))


def sample_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 128, (2, LENGTH)).astype(np.int32)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * wanted.std())


@pytest.mark.parametrize("architecture", [
    pytest.param(name, marks=() if name in ("Phi3ForCausalLM", "Qwen3MoeForCausalLM") else pytest.mark.slow)
    for name in MODELS
])  # fmt: skip
def test_an_adapter_comes_back_and_merges_to_the_same_model(architecture, adapted, tmp_path):
    base, run = adapted(architecture)
    convert(["export", f"--run={run}", f"--to={tmp_path / 'adapter'}"])
    folder = pickle.loads(pickle.dumps(AdapterFolder(tmp_path / "adapter")))  # as another process gets it
    assert folder.path == base and folder.config.lora == Config.load(run).lora
    recipe = fine_tuning(str(tmp_path / "adapter"))
    assert recipe.lora == folder.config.lora and recipe.optimizer.learning_rate == 1e-4
    config = dataclasses.replace(recipe, mesh=MeshConfig(pipeline=2))
    program = config.make_program(make_mesh(config.mesh, jax.devices()[:2]))
    started = named(start_from.weights(config, program))
    import_folder(tmp_path / "adapter", tmp_path / "again")
    saved, again = (restored(path) for path in (run, tmp_path / "again"))
    assert saved.keys() == again.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, again[name], err_msg=name)
        if name.endswith(("_lora_a", "_lora_b")):
            np.testing.assert_array_equal(np.concatenate(started[name]), array, err_msg=name)
    wanted = logits(run)
    assert abs(wanted - logits(base)).max() > 0.1 * wanted.std()
    np.testing.assert_array_equal(logits(tmp_path / "adapter"), wanted)
    convert(["export", f"--run={run}", f"--to={tmp_path / 'merged'}", "--merge"])
    assert_close(logits(tmp_path / "merged"), wanted)


def restored(path) -> dict[str, np.ndarray]:
    config = Config.load(path)
    model = Model(config.model, PrecisionConfig(compute="float32"), adapters=config.lora.transforms)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: a.update(sharding=one), model.abstract_weights)
    return jax.tree.map(np.asarray, named(SavedStep(path).restore_params(form, model.layer_rows)))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("lora", [
    LoraConfig(rank=RANK, alpha=6.0),
    LoraConfig(rank=RANK, alpha=6.0, rslora=True, targets=("attention.query", "attention.out", "mlp.*")),
], ids=["all", "rslora, some"])  # fmt: skip
def test_the_exported_adapter_has_the_logits_of_peft(architecture, lora, adapted, load_theirs, tmp_path):
    peft = pytest.importorskip("peft")
    import torch

    base, run = adapted(architecture, lora)
    convert(["export", f"--run={run}", f"--to={tmp_path / 'adapter'}"])
    model = peft.PeftModel.from_pretrained(load_theirs(base, may_warn=True).model, tmp_path / "adapter").eval()
    ids = torch.tensor(sample_ids(), dtype=torch.long)
    wanted = logits(run)
    with torch.no_grad():
        assert_close(model(ids).logits.numpy(), wanted)
        assert_close(model.merge_and_unload()(ids).logits.numpy(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"]
)
def test_an_adapter_of_peft_is_read(architecture, adapted, load_theirs, tmp_path):
    """With ranks and scales that differ, in some of the matrices."""
    peft = pytest.importorskip("peft")
    import torch

    base, _ = adapted(architecture)
    theirs = load_theirs(base, may_warn=True).model
    leaves = {
        name.rpartition(".")[2] for name, _ in theirs.named_modules() if name.endswith(("proj", "c_attn", "c_fc"))
    }
    targets = sorted(leaves) or ["query_key_value", "dense"]
    options = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, rank_pattern={targets[0]: 5}, alpha_pattern={targets[0]: 7}
    )
    model = peft.get_peft_model(theirs, options).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = model(torch.tensor(sample_ids(), dtype=torch.long)).logits.numpy()
    assert_close(logits(tmp_path / "adapter"), wanted)


def test_an_engine_serves_base_and_adapter_like_the_merged_model(adapted, tmp_path):
    _, run = adapted("LlamaForCausalLM")
    convert(["export", f"--run={run}", f"--to={tmp_path / 'adapter'}"])
    assert export(run, tmp_path / "merged") == 1 and Config.load(tmp_path / "merged").lora.rank is None
    serving = ServingConfig(max_rows=2, max_batch_tokens=16, page_size=4, num_pages=8)
    paths = (run, tmp_path / "adapter", tmp_path / "merged")
    engines = [Engine.from_run(path, serving=serving) for path in paths]
    found = [engine.generate_tokens([[5, 17, 3], [1]], Sampling(max_tokens=4, temperature=0.0)) for engine in engines]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("base", ["int8", pytest.param("float8", marks=pytest.mark.slow)])
def test_adapters_of_a_base_in_8_bits_are_exported_merged_and_served(base, adapted, tmp_path):
    folder, run = adapted("Phi3ForCausalLM", LoraConfig(rank=RANK, alpha=6.0, targets=("attention.*",), base=base))
    wanted = logits(run)
    convert(["export", f"--run={run}", f"--to={tmp_path / 'adapter'}"])
    beside_the_original = logits(tmp_path / "adapter")
    assert 0 < abs(beside_the_original - wanted).mean() < 0.1 * wanted.std()  # 8 bits
    convert(["export", f"--run={run}", f"--to={tmp_path / 'merged'}", "--merge"])
    assert_close(logits(tmp_path / "merged"), wanted)
    export(run, tmp_path / "merged_run")
    assert_close(logits(tmp_path / "merged_run"), wanted)
    serving = ServingConfig(max_rows=2, max_batch_tokens=16, page_size=4, num_pages=8)
    engines = [Engine.from_run(path, serving=serving) for path in (run, tmp_path / "merged")]
    found = [engine.generate_tokens([[5, 17, 3], [1]], Sampling(max_tokens=4, temperature=0.0)) for engine in engines]
    assert found[0] == found[1]


def test_a_folder_starts_a_run_in_8_bits_as_a_run_does(adapted, tmp_path):
    """From a folder each matrix is read and rounded on its own."""
    folder, _ = adapted("GPT2LMHeadModel")
    import_folder(folder, tmp_path / "imported")
    config = dataclasses.replace(Folder(folder).config, lora=LoraConfig(rank=RANK, base="int8"))
    weights = []
    for source in (folder, tmp_path / "imported"):
        started = dataclasses.replace(config, checkpoint=CheckpointConfig(start_from=str(source)))
        start_from.check(start_from.pinned(started))
        program = started.make_program(make_mesh(MeshConfig(), jax.devices()[:1]))
        weights.append(named(start_from.weights(started, program)))
    assert weights[0].keys() == weights[1].keys() == named(program.model.abstract_weights).keys()
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name], err_msg=name)
        assert array.dtype == named(program.model.abstract_weights)[name].dtype


def test_rounding_merged_matrices_is_reported(adapted, tmp_path, capsys):
    _, run = adapted("LlamaForCausalLM")
    convert(["export", f"--run={run}", f"--to={tmp_path / 'merged'}", "--merge", "--dtype=bfloat16"])
    printed = float(capsys.readouterr().out.rpartition("lost ")[2].partition("%")[0]) / 100
    merged = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    exact = restored(run)
    changes, errors = 0.0, 0.0
    for ours, theirs in {"attention.query": "self_attn.q_proj", "mlp.down": "mlp.down_proj"}.items():
        w, a, b = (exact[f"layers.dense.{ours}{end}"] for end in ("", "_lora_a", "_lora_b"))
        change = 6.0 / RANK * np.einsum("lkr,lr...->lk...", a, b).reshape(2, w.shape[1], -1)
        for layer in range(2):
            found = merged[f"model.layers.{layer}.{theirs}.weight"].astype(np.float32).T
            errors += np.square(found - w[layer].reshape(change[layer].shape) - change[layer]).sum()
            changes += np.square(change[layer]).sum()
    assert printed == pytest.approx((errors / changes) ** 0.5, rel=0.2)  # of two of seven matrices


def test_what_is_not_an_adapter_of_the_base_is_refused(adapted, tmp_path):
    base, run = adapted("LlamaForCausalLM")
    with pytest.raises(ValueError, match=r"has adapters \(lora.rank=4\).*use --merge"):
        export_run(run, tmp_path / "out")
    plain = base.parent / "plain"
    with pytest.raises(SystemExit):
        convert(["export", f"--run={plain}", f"--to={tmp_path / 'out'}", "--merge"])
    convert(["export", f"--run={run}", f"--to={tmp_path / 'adapter'}"])
    file = tmp_path / "adapter" / "adapter_config.json"
    options = json.loads(file.read_text())
    for change, message in {
        "use_dora": (True, "use_dora=True is not supported"),
        "peft_type": ("IA3", "peft_type=IA3 is not supported"),
        "base_model_name_or_path": ("org/name", "'org/name' is no folder on this machine"),
    }.items():
        value, wanted = message
        file.write_text(json.dumps(options | {change: value}))
        with pytest.raises(ValueError, match=wanted):
            open_source(tmp_path / "adapter")
    file.write_text(json.dumps(options))
    weights = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    renamed = {name.replace("self_attn", "attn"): array for name, array in weights.items()}
    safetensors.numpy.save_file(renamed, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="no adapter of the base: base_model.model.model.layers.0.attn.k_proj.lora_A"):
        open_source(tmp_path / "adapter")
    assert isinstance(open_source(base), Folder)
