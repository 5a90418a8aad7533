"""Every family is compared with transformers itself, there and back. Needs pip install -e '.[parity]'.

python tests/weights/hugging_face/test_transformers.py records the logits that test_families.py reads.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.data.tokenizers.load import load_tokenizer
from megajax.inference.engine import Engine
from megajax.inference.tokens.sampling import Sampling
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.tensor_files import TensorFiles

pytestmark = pytest.mark.slow
LENGTH = 16
# Both sides are float32 and add up in another order.
TOLERANCE = 1e-5

TINY = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
SCALED = dict(factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
LLAMA3 = SCALED | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
YARN = SCALED | dict(rope_type="yarn", beta_fast=4.0, beta_slow=1.0)
GPT = dict(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
EXPERTS = TINY | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
PATTERN = dict(num_hidden_layers=4, sliding_window=5, head_dim=16, query_pre_attn_scalar=24)

CONFIGS = {
    "gpt2": ("GPT2Config", GPT),
    "llama": ("LlamaConfig", TINY | dict(rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True)),
    "llama3 scaling": ("LlamaConfig", TINY | dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "llama yarn": ("LlamaConfig", TINY | dict(head_dim=16, rope_parameters=YARN)),
    "llama yarn, mscale": (
        "LlamaConfig", TINY | dict(head_dim=16, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=1.0))
    ),
    "llama linear": ("LlamaConfig", TINY | dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))),
    "llama dynamic": (
        "LlamaConfig", TINY | dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4))
    ),
    "mistral": ("MistralConfig", TINY | dict(sliding_window=6, head_dim=16)),
    "qwen2": ("Qwen2Config", TINY),
    "qwen3": ("Qwen3Config", TINY | dict(head_dim=16)),
    "qwen3, window": (
        "Qwen3Config", TINY | dict(head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=0)
    ),
    "gemma2": ("Gemma2Config", TINY | PATTERN),
    "gemma3": ("Gemma3TextConfig", TINY | PATTERN | dict(num_hidden_layers=6)),
    "phi3": ("Phi3Config", TINY),
    "phi3, longrope": (
        "Phi3Config",
        TINY | dict(original_max_position_embeddings=64, max_position_embeddings=128, rope_parameters=dict(
            rope_type="longrope", factor=2.0, rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        )),
    ),
    "olmo2": ("Olmo2Config", TINY),
    "smollm3": ("SmolLM3Config", TINY | dict(num_hidden_layers=4)),
    "starcoder2": ("Starcoder2Config", TINY | dict(sliding_window=6)),
    "stablelm": ("StableLmConfig", TINY | dict(use_qkv_bias=True)),
    "stablelm, parallel": ("StableLmConfig", TINY | dict(use_parallel_residual=True)),
    "nemotron": ("NemotronConfig", TINY),
    "gpt_neox": ("GPTNeoXConfig", TINY),
    "gpt_neox, serial": ("GPTNeoXConfig", TINY | dict(use_parallel_residual=False)),
    "phi": ("PhiConfig", TINY),
    "gptj": ("GPTJConfig", GPT | dict(rotary_dim=4)),
    "falcon": ("FalconConfig", TINY | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon, one norm": ("FalconConfig", TINY | dict(multi_query=True)),
    "falcon, serial": ("FalconConfig", TINY | dict(multi_query=False, parallel_attn=False, bias=True)),
    "cohere": ("CohereConfig", TINY | dict(logit_scale=0.25)),
    "granite": (
        "GraniteConfig",
        TINY | dict(embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22, logits_scaling=8.0),
    ),
    "bloom": ("BloomConfig", dict(vocab_size=50, hidden_size=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)),
    "mixtral": ("MixtralConfig", TINY | dict(num_local_experts=4, head_dim=16, sliding_window=6)),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | dict(head_dim=16, norm_topk_prob=True)),
    "qwen3_moe, every second layer": (
        "Qwen3MoeConfig", EXPERTS | dict(head_dim=16, num_hidden_layers=4, decoder_sparse_step=2)
    ),
    "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | dict(shared_expert_intermediate_size=40, mlp_only_layers=[0])),
    "deepseek_v3": (
        "DeepseekV3Config",
        TINY | dict(
            num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=8, n_group=4, topk_group=2,
            num_experts_per_tok=4, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=12, num_nextn_predict_layers=0,
            rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "deepseek_v3, direct queries": (
        "DeepseekV3Config",
        TINY | dict(
            num_key_value_heads=4, moe_intermediate_size=24, n_shared_experts=2, n_routed_experts=4, n_group=1,
            rms_norm_eps=1e-3,
            topk_group=1, num_experts_per_tok=2, first_k_dense_replace=0, kv_lora_rank=16, q_lora_rank=None,
            qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, rope_interleave=False, num_nextn_predict_layers=0,
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        TINY | dict(
            num_key_value_heads=4, moe_intermediate_size=24, n_shared_experts=2, n_routed_experts=8, n_group=1,
            topk_group=1, num_experts_per_tok=3, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None,
            qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, routed_scaling_factor=2.0,
            rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7),
        ),
    ),
    "olmoe": ("OlmoeConfig", TINY | dict(num_experts=8, num_experts_per_tok=3)),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def family(request, transformers, tmp_path, write_drawn):
    """A folder with drawn weights of each family."""
    entry = describe(transformers, *CONFIGS[request.param])
    write_drawn(tmp_path / "theirs", entry)
    return tmp_path / "theirs"


def describe(transformers, kind: str, arguments: dict) -> dict:
    """{"options": config.json, "tensors": {name: [shape, mean]}} of what transformers writes for such a model."""
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = json.loads((Path(folder) / "config.json").read_text())
        files = TensorFiles(Path(folder))
        means = {name: round(float(files[name].mean())) for name in files.forms}
        tensors = {name: [list(form.shape), means[name]] for name, form in files.forms.items()}
    return {"options": options, "tensors": tensors}


def their_tokens(model, ids: np.ndarray, count: int) -> list[int]:
    import torch

    model.generation_config.eos_token_id = None
    with torch.no_grad():
        found = model.generate(
            torch.tensor(ids[:1], dtype=torch.long), attention_mask=torch.ones((1, ids.shape[1]), dtype=torch.long),
            max_new_tokens=count, do_sample=False,
        )  # fmt: skip
    return found[0, ids.shape[1] :].tolist()


def sample_ids(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (2, LENGTH)).astype(np.int32)


def test_logits_tokens_and_the_way_back_equal_transformers(family, transformers, load_theirs, our_logits, tmp_path):
    theirs = load_theirs(family)
    folder = Folder(family)
    ids = sample_ids(folder.model.vocab_size)
    want = theirs.logits(ids)
    np.testing.assert_allclose(our_logits(folder, ids), want, rtol=0, atol=TOLERANCE * want.std())

    ours = Model(folder.model, PrecisionConfig(compute="float32"))
    engine = Engine(ours, folder_params(folder, ours), make_mesh(MeshConfig(), jax.devices()[:1]), None)
    (tokens,) = engine.generate_tokens([ids[0].tolist()], Sampling(max_tokens=32, temperature=0.0))
    assert tokens == their_tokens(theirs.model, ids, 32)

    import_folder(family, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files, again = TensorFiles(family), TensorFiles(tmp_path / "back")
    assert files.forms == again.forms
    for name in files.forms:
        assert files[name].tobytes() == again[name].tobytes(), name
    assert options(transformers, family) == options(transformers, tmp_path / "back")
    np.testing.assert_array_equal(load_theirs(tmp_path / "back").logits(ids), want)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_as_transformers_has_them_in_memory_are_read(
    name, transformers, load_theirs, write_drawn, our_logits, tmp_path
):
    write_drawn(tmp_path / "theirs", describe(transformers, *CONFIGS[name]))
    load_theirs(tmp_path / "theirs").model.save_pretrained(tmp_path / "fused", save_original_format=False)
    folder = Folder(tmp_path / "fused")
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in folder.forms)
    ids = sample_ids(folder.model.vocab_size)
    np.testing.assert_array_equal(our_logits(folder, ids), our_logits(Folder(tmp_path / "theirs"), ids))


def test_a_tokenizer_of_gpt2_without_tokenizer_json(transformers, llama_folder, tmp_path):
    import tokenizers

    original = tokenizers.Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    original.model.save(str(tmp_path))
    names = dict(eos_token="</s>", bos_token="<s>", unk_token="</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="GPT2Tokenizer") | names))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path / "vocab.json"))
    for text in ("hello hello", "Grüße\n 12 don't", " a  b"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_template("a</s>b") == theirs.encode("a</s>b") and ours.eod_id == theirs.eos_token_id


def folder_params(folder: Folder, model: Model) -> dict:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    return folder.restore_params(form, model.layer_rows)


def options(transformers, folder: Path) -> dict:
    """What transformers makes of config.json, but for what decides nothing."""
    found = transformers.AutoConfig.from_pretrained(folder).to_dict()
    known = type(transformers.AutoConfig.from_pretrained(folder))().to_dict()
    for name in {*found} - {*known} | {"_name_or_path", "dtype", "transformers_version"}:
        found.pop(name, None)
    if found.get("topk_method") == "greedy":  # experts in no groups
        for name in ("n_group", "topk_group"):
            found.pop(name)
    if "n_inner" in found:
        found["n_inner"] = found["n_inner"] or 4 * found["n_embd"]
    for name in ("mscale", "mscale_all_dim", "attention_factor", "original_max_position_embeddings"):
        found.get("rope_parameters", {}).pop(name, None)  # one follows from the other
    return found


OURS = {
    "GPT2LMHeadModel": DecoderConfig(num_layers=2, embed_dim=32, num_heads=4, vocab_size=50, activation="gelu_tanh",
                                     max_positions=64),
    "LlamaForCausalLM": DecoderConfig(
        num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, vocab_size=50, position="rope",
        rope=RopeConfig(base=5e5, scaling="llama3", original_length=16), norm="rmsnorm", activation="swiglu",
        biases=(), tied_embeddings=False,
    ),
    "Qwen3MoeForCausalLM": DecoderConfig(
        num_layers=3, embed_dim=32, num_heads=4, mlp_dim=48, vocab_size=50, position="rope", norm="rmsnorm",
        qk_norm=True, activation="swiglu", biases=(), tied_embeddings=False,
        moe=MoeConfig(
            num_experts=8, expert_dim=24, router=RouterConfig(top_k=3, aux_loss=0.01, aux_loss_scope="batch")
        ),
        pattern="dee",
    ),
}  # fmt: skip


def save_run(config: DecoderConfig, path: Path) -> dict:
    """A run of one step -> its weights."""
    config = Config(model=config, training=TrainingConfig(sequence_length=64), data=DataConfig(tokenizer="null:50"))
    model = Model(config.model)
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
    with Checkpointer(path, CheckpointConfig()) as checkpointer:
        params = model.init(3)
        checkpointer.save(1, params, {"m": params["embedding"]}, {"step": 1, "layer_rows": rows})
    return params


@pytest.mark.parametrize("architecture", OURS)
def test_a_run_of_ours_is_the_same_model_in_transformers(architecture, load_theirs, our_logits, tmp_path):
    save_run(OURS[architecture], tmp_path / "run")
    found = export_run(tmp_path / "run", tmp_path / "out", shard_bytes=10_000)
    assert found.family.architecture == architecture
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    ids = sample_ids(50)
    want = load_theirs(tmp_path / "out").logits(ids)
    got = our_logits(Folder(tmp_path / "out"), ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * want.std())


DEEPSEEK = DecoderConfig(
    num_layers=2, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=48, vocab_size=50, position="rope", norm="rmsnorm",
    rope=RopeConfig(interleaved=True), norm_epsilon=1e-6, activation="swiglu", biases=(), tied_embeddings=False,
    init_std=0.2, mtp_layers=1, pattern="de", latent=LatentConfig(kv_rank=16, q_rank=24, rope_dim=4, value_dim=12),
    moe=MoeConfig(num_experts=8, expert_dim=24, shared_dim=24, router=RouterConfig(
        top_k=4, score="sigmoid", scale=2.5, groups=(4, 2), bias_update_rate=1e-3,
    )),
)  # fmt: skip


def test_multi_token_prediction_is_that_of_transformers(transformers, tmp_path, our_logits):
    """Which reads the weights of these layers only to generate."""
    import torch
    from transformers.modeling_layers import MtpModel

    params = save_run(DEEPSEEK, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # theirs is for 61 layers
    draft = MtpModel.from_pretrained(theirs).eval()
    ids = sample_ids(50)
    places = torch.arange(1, LENGTH)[None]
    with torch.no_grad():
        hidden = theirs.model(torch.tensor(ids, dtype=torch.long)).last_hidden_state[:, :-1]
        given = torch.tensor(ids[:, 1:], dtype=torch.long)
        want = draft._project_to_logits(draft.forward_layer(0, hidden, places, None, input_ids=given)).numpy()

    folder = Folder(tmp_path / "out")
    model = Model(folder.model, PrecisionConfig(compute="float32"))
    module = model.module(folder_params(folder, model))
    for name, tree in folder_params(folder, model).items():
        for got, saved in zip(jax.tree.leaves(tree), jax.tree.leaves(params[name]), strict=True):
            vocabulary = {"embedding": np.s_[:50], "head": np.s_[:, :50]}.get(name, ...)  # without padding
            np.testing.assert_array_equal(got[vocabulary], saved[vocabulary], err_msg=name)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    batch = {"tokens": ids, "positions": positions}

    @jax.jit
    def drafted():
        inputs = module.block_inputs(batch)
        hidden = module.final_norm(module.layers(module.embed(batch, None), inputs)[0])
        later = module.embed({"tokens": np.roll(ids, -1, 1), "positions": positions}, None)
        hidden, _, _ = module.mtp_1(hidden, inputs | {"next_embeddings": later})
        return hidden @ module.head.matrix()

    found = drafted()[:, :-1, :50]
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE * want.std())


def record(path: Path) -> None:
    import transformers

    from conftest import Theirs, write_described

    transformers.logging.disable_progress_bar()
    entries, logits = {}, {}
    for name, (kind, arguments) in CONFIGS.items():
        entries[name] = describe(transformers, kind, arguments)
        with tempfile.TemporaryDirectory() as folder:
            write_described(Path(folder), entries[name])
            ids = sample_ids(entries[name]["options"]["vocab_size"])[:1]
            logits[name] = Theirs(transformers, Path(folder)).logits(ids)
    versions = {"transformers": transformers.__version__}
    np.savez_compressed(path, families=json.dumps(entries), versions=json.dumps(versions), **logits)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    record(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
