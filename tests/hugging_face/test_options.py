"""No option is dropped in silence: what an export accepts, transformers computes."""

import dataclasses
import json
import logging
import zlib
from pathlib import Path

import numpy as np
import pytest

from megajax.hugging_face.folder import Folder
from megajax.hugging_face.mapping import FAMILIES, WeightMap, family_of, read_options, replaced, write_options
from megajax.mesh import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig

RECORDED = np.load(Path(__file__).parent.parent / "oracles" / "hugging_face_folders.npz")
ENTRIES = json.loads(str(RECORDED["families"]))
LENGTH = 16
# Both sides are float32 and add up in another order.
TOLERANCE = 2e-5

# Every field that changes what a decoder computes, with values to try; several fields where one needs the others.
SCALED = {"rope.factor": 4.0, "rope.original_length": 8, "max_positions": 32, "position": "rope"}
VALUES = {
    "num_kv_heads": [1, 2, None],
    "head_dim": [8, 12, 16],
    "mlp_dim": [40, None],
    "position": ["learned", "rope", "alibi", "none"],
    "no_rope_every": [2, None],
    "norm": ["layernorm", "rmsnorm"],
    "norm_epsilon": [1e-3],
    "norm_zero_centered": [True, False],
    "norm_bias": [True, False],
    "norm_placement": ["pre", "post", "sandwich"],
    "embedding_norm": [True, False],
    "parallel_residual": ["none", "one_norm", "two_norms"],
    "qk_norm": [True, False, "all_heads"],
    "activation": ["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh"],
    "qkv_bias": [True, False],
    "attention_out_bias": [True, False],
    "mlp_bias": [True, False],
    "head_bias": [True, False],
    "tied_embeddings": [True, False],
    "window": [5, None],
    "full_attention_every": [2, None],
    "attention_multiplier": [0.3, None],
    "attention_soft_cap": [2.0, None],
    "attention_sinks": [True],
    "embedding_multiplier": [3.0, 1.0],
    "residual_multiplier": [0.5, 1.0],
    "logit_multiplier": [0.5, 1.0],
    "logit_soft_cap": [3.0, None],
    "rope.base": [300.0],
    "rope.fraction": [0.25, 0.5, 0.75, 1.0],
    "rope.interleaved": [True, False],
    "rope.local_base": [200.0, None],
    "rope.scaling": [
        "none",
        SCALED | {"rope.scaling": "linear"},
        SCALED | {"rope.scaling": "dynamic", "rope.original_length": 64, "max_positions": 64},
        SCALED | {"rope.scaling": "llama3", "rope.ramp": (0.5, 2.0)},
        SCALED | {"rope.scaling": "yarn", "rope.ramp": (0.5, 4.0), "rope.truncate": False},
        SCALED | {"rope.scaling": "yarn", "rope.attention_factor": 1.5},
        SCALED | {"rope.scaling": "longrope", "rope.length": LENGTH},
    ],
    "moe.shared_dim": [24, 48, None],
    "moe.shared_gate": [True, False],
    "moe.layers": ["e", "de", "dee"],
    "moe.router.top_k": [1, 2],
    "moe.router.score": ["softmax", "softmax_all", "sigmoid", "sqrt_softplus"],
    "moe.router.scale": [1.5],
    "moe.router.bias_update_rate": [1e-3, None],
    "moe.router.num_groups": [{"moe.router.num_groups": 2, "moe.router.top_groups": 1}],
    "latent.q_rank": [None, 24],
    "latent.value_dim": [8],
}
DECODERS = [family for family in FAMILIES if type(family.form.default) is DecoderConfig]
BASES = {family_of(entry["options"]).architecture: entry["options"] for entry in reversed(ENTRIES.values())}
# Of each of these groups the classes of transformers share code; one of each is compared by default.
QUICK = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "StableLmForCausalLM", "GPTNeoXForCausalLM")


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    found = pytest.importorskip("transformers")
    found.logging.disable_progress_bar()
    return found


def changed(config: DecoderConfig, name: str, value) -> DecoderConfig:
    config = replaced(config, value if isinstance(value, dict) else {name: value})
    if config.rope.scaling == "longrope":
        pairs = int(config.rotary_head_dim * config.rope.fraction) // 2
        factors = dict(short_factors=(1.5,) * pairs, long_factors=tuple(2.0 + n for n in range(pairs)))
    else:
        factors = dict(short_factors=(), long_factors=())
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, **factors))


def is_accepted(family, config: DecoderConfig) -> bool:
    try:
        config.check(MeshConfig(), LENGTH, ExecutionConfig())
        write_options(family, config)
    except ValueError:
        return False
    return True


def drawn(family, seed: int) -> DecoderConfig:
    """The family's model with every second value of VALUES that the export accepts, in an order that is drawn."""
    rng = np.random.default_rng([seed, zlib.crc32(family.architecture.encode())])
    config = read_options(family, BASES[family.architecture])
    choices = [(name, value) for name, values in VALUES.items() for value in values]
    for number in rng.permutation(len(choices)):
        new = changed(config, *choices[number])
        if is_accepted(family, new) and rng.random() < 0.5:
            config = new
    return config


def write(family, config: DecoderConfig, path: Path, write_drawn) -> Folder:
    tensors = {tensor.name: [tensor.shape, 0] for tensor in WeightMap(family, config).tensors}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    write_drawn(path, {"options": tokens | write_options(family, config), "tensors": tensors})
    return Folder(path)


def their_logits(transformers, path: Path, ids: np.ndarray) -> np.ndarray:
    import torch

    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    finally:
        logger.removeHandler(handler)
    parameters = dict(model.named_parameters())
    info["missing_keys"] = [name for name in info["missing_keys"] if parameters[name].numel()]
    assert not any(info.values()), info
    assert not [record.getMessage() for record in records if "newly initialized" not in record.getMessage()]
    with torch.no_grad():
        return model.eval()(torch.tensor(ids, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.architecture, marks=[] if family.architecture in QUICK else pytest.mark.slow)
        for family in DECODERS
    ],
)
def test_what_is_exported_is_what_transformers_computes(family, seed, transformers, write_drawn, our_logits, tmp_path):
    config = drawn(family, seed)
    folder = write(family, config, tmp_path, write_drawn)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    want = their_logits(transformers, tmp_path, ids)
    folder.model = config
    np.testing.assert_allclose(our_logits(folder, ids), want, rtol=0, atol=TOLERANCE * want.std())
