"""Writes hugging_face.npz: small random models of Hugging Face transformers (CPU, float32) and their logits.

    pip install torch transformers
    python tests/oracles/make_hugging_face.py

Last run with transformers 5.23.0 and torch 2.14.1. For each NAME the file has NAME/fields, the model's config in our
words (JSON); NAME/params/PATH, its weights as our checkpoint has them; NAME/tokens and NAME/logits. Under rope/NAME are
inverse frequencies, each with the factor on cos and sin at its end. tests/models/test_hugging_face.py compares.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

D, N, K, H, F, V, LAYERS, LENGTH = 16, 4, 2, 8, 24, 40, 2, 20
HEADS = dict(num_attention_heads=N, num_key_value_heads=K, head_dim=H)
COMMON = dict(
    vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, max_position_embeddings=64,
    attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OURS = dict(
    num_layers=LAYERS, embed_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F, vocab_size=V, vocab_multiple=8,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(),
)  # fmt: skip

EVERYWHERE = ("qkv", "attention_out", "mlp", "norm")

# Our names in a layer -> theirs.
LLAMA = {
    "attention_norm": "input_layernorm", "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
QK_NORM = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
POST = {
    "attention_norm": None, "mlp_norm": None, "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
SANDWICH = POST | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
FUSED = {"attention.query": None, "attention.key": None, "attention.value": None, "mlp.gate": None}
GPTJ = FUSED | {
    "attention_norm": "ln_1", "attention.query": "attn.q_proj", "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj", "attention.out": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    "mlp_norm": None,
}  # fmt: skip
OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


class DenseMlp(nn.Module):
    """In place of experts: returns what those return."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(D, F, bias=False), nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)), None


def gemma3():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    config = transformers.Gemma3TextConfig(
        **COMMON, **HEADS, query_pre_attn_scalar=5, sliding_window=6, final_logit_softcapping=3.0, rms_norm_eps=1e-5,
        rope_parameters=rope, layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )  # fmt: skip
    ours = dict(
        norm="rmsnorm_1p", norm_placement="sandwich", qk_norm=True, activation="geglu_tanh", window=6,
        pattern="wf", attention_multiplier=5**-0.5, embedding_multiplier=D**0.5, logit_soft_cap=3.0,
        rope=dict(base=1e6, local_base=100.0, scaling="linear", factor=4.0),
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config), ours, LLAMA | SANDWICH | QK_NORM, OUTSIDE, "model.layers"


def olmo2():
    config = transformers.Olmo2Config(**COMMON, **HEADS, tie_word_embeddings=False, rms_norm_eps=1e-5)
    config.head_dim = H
    ours = dict(norm_placement="post", qk_norm="all_heads", tied_embeddings=False)
    return transformers.Olmo2ForCausalLM(config), ours, LLAMA | POST | QK_NORM, OUTSIDE, "model.layers"


def gpt_neox():
    config = transformers.GPTNeoXConfig(
        **COMMON, num_attention_heads=N, hidden_act="gelu", use_parallel_residual=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    ours = dict(
        norm="layernorm", biases=EVERYWHERE, activation="gelu", parallel_residual="two_norms", num_kv_heads=N,
        head_dim=D // N,
        rope=dict(fraction=0.5), tied_embeddings=False,
    )  # fmt: skip
    layer = LLAMA | FUSED | {
        "qkv": "attention.query_key_value", "attention.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    outside = {"embedding": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "head": "lm_head"}
    return transformers.GPTNeoXForCausalLM(config), ours, layer, outside, "gpt_neox.layers"


def gptj():
    config = transformers.GPTJConfig(
        vocab_size=V, n_positions=64, n_embd=D, n_layer=LAYERS, n_head=2, n_inner=F, rotary_dim=4, bos_token_id=1,
        eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    ours = dict(
        norm="layernorm", activation="gelu_tanh", parallel_residual="one_norm", num_heads=2, num_kv_heads=2,
        biases=("mlp", "norm", "head"), rope=dict(fraction=0.5, interleaved=True), tied_embeddings=False,
    )  # fmt: skip
    outside = {"embedding": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"}
    return transformers.GPTJForCausalLM(config), ours, GPTJ, outside, "transformer.h"


def granite():
    config = transformers.GraniteConfig(
        **COMMON, num_attention_heads=N, num_key_value_heads=K, embedding_multiplier=3.0, attention_multiplier=0.3,
        residual_multiplier=0.22, logits_scaling=4.0, rms_norm_eps=1e-5, attention_bias=False, mlp_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    ours = dict(
        head_dim=D // N, embedding_multiplier=3.0, attention_multiplier=0.3, residual_multiplier=0.22,
        logit_multiplier=0.25, biases=("mlp",),
    )  # fmt: skip
    return transformers.GraniteForCausalLM(config), ours, LLAMA, OUTSIDE, "model.layers"


def gpt_oss():
    """Its attention: the experts are a dense MLP."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 8.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 32, "truncate": False,
    }  # fmt: skip
    config = transformers.GptOssConfig(
        **COMMON, **HEADS, sliding_window=6, rope_parameters=rope, num_local_experts=2, num_experts_per_tok=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = DenseMlp()
    ours = dict(
        biases=("qkv", "attention_out"), attention_sinks=True, window=6, pattern="wf",
        tied_embeddings=False,
        rope=dict(base=1000.0, scaling="yarn_exact", factor=8.0, ramp=(1.0, 8.0), original_length=32),
    )  # fmt: skip
    return model, ours, LLAMA | {"sinks": "self_attn.sinks"}, OUTSIDE, "model.layers"


def bloom():
    heads = 6  # no power of two
    width = 4 * heads
    config = transformers.BloomConfig(
        vocab_size=V, hidden_size=width, n_layer=2, n_head=heads, attn_implementation="eager", pad_token_id=0
    )
    ours = dict(
        num_layers=2, embed_dim=width, num_heads=heads, num_kv_heads=heads, head_dim=4, mlp_dim=4 * width,
        norm="layernorm", biases=EVERYWHERE, activation="gelu_tanh", position="alibi", embedding_norm=True,
    )  # fmt: skip
    layer = LLAMA | FUSED | {
        "qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    outside = {
        "embedding": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm",
        "final_norm": "transformer.ln_f",
    }  # fmt: skip
    return transformers.BloomForCausalLM(config), ours, layer, outside, "transformer.h"


def cohere2():
    config = transformers.Cohere2Config(
        **COMMON, **HEADS, logit_scale=0.3, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )  # fmt: skip
    ours = dict(
        norm="layernorm", parallel_residual="one_norm", logit_multiplier=0.3, window=6,
        pattern="wn", rope=dict(interleaved=True),
    )  # fmt: skip
    return transformers.Cohere2ForCausalLM(config), ours, LLAMA | {"mlp_norm": None}, OUTSIDE, "model.layers"


MODELS = (gemma3, olmo2, gpt_neox, gptj, granite, gpt_oss, bloom, cohere2)


# ----------------------------------------------------------------------------- weights in our layout


def params_of(weights: dict, ours: dict, layer: dict, outside: dict, layers: str) -> dict[str, np.ndarray]:
    """{path with slashes: array}."""
    heads, kv_heads, head_dim = (ours[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    shapes = {"query": (-1, heads, head_dim), "key": (-1, kv_heads, head_dim), "value": (-1, kv_heads, head_dim)}

    def one(name: str, prefix: str) -> dict[str, np.ndarray]:
        """What belongs to one of our modules, from `prefix`.weight and .bias."""
        weight, bias = (weights.get(f"{prefix}.{part}") for part in ("weight", "bias"))
        if name == "sinks":
            return {"attention/sinks": weights[prefix]}
        if weight is None:
            raise KeyError(f"{prefix} is not among {', '.join(weights)}")
        path = name.replace(".", "/")
        if name.endswith("norm"):
            found = {f"{path}/scale": weight, f"{path}/bias": bias}
        elif name == "qkv":
            parts = dict(zip(shapes, weight.reshape(heads, 3, head_dim, -1).transpose(1, 3, 0, 2), strict=True))
            biases = dict(zip(shapes, bias.reshape(heads, 3, head_dim).transpose(1, 0, 2), strict=True))
            found = {f"attention/{part}": array for part, array in parts.items()}
            found |= {f"attention/{part}_bias": array for part, array in biases.items()}
        elif name == "embedding":
            found = {path: weight}
        else:
            shape = shapes.get(path.split("/")[-1], weight.T.shape)
            shape = (heads, head_dim, -1) if name == "attention.out" else shape
            found = {path: weight.T.reshape(shape)}
            found[f"{path}_bias"] = None if bias is None else bias.reshape(shape[1:] if path in BY_HEAD else -1)
        return {path: array for path, array in found.items() if array is not None}

    params = {}
    for name, prefix in outside.items():
        if not (name == "head" and ours.get("tied_embeddings", True)):
            params |= one(name, prefix)
    stacked: dict[str, list] = {}
    for number in range(ours["num_layers"]):
        for name, prefix in layer.items():
            for path, array in one(name, f"{layers}.{number}.{prefix}").items() if prefix else ():
                stacked.setdefault(path, []).append(array)
    return params | {f"layers/dense/{path}": np.stack(arrays) for path, arrays in stacked.items()}


BY_HEAD = ("attention/query", "attention/key", "attention/value")


@torch.no_grad()
def record(make, generator: torch.Generator) -> dict[str, np.ndarray]:
    model, ours, *names = make()
    ours = OURS | ours
    model.eval()
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and name.endswith("weight") and not ours["norm"].endswith("_1p")
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + is_scale)
    tokens = torch.randint(0, V, (2, LENGTH), generator=generator)
    logits = model(tokens).logits.numpy()
    weights = {name: array.numpy() for name, array in model.state_dict().items()}
    params = params_of(weights, ours, *names)
    found = {"fields": np.array(json.dumps(ours)), "tokens": tokens.numpy().astype(np.int32), "logits": logits}
    return found | {f"params/{path}": array for path, array in params.items()}


# ----------------------------------------------------------------------------- rotary frequencies

SHORT = [1.0, 1.1, 1.5, 2.0]
LONG = [1.0, 2.0, 4.0, 8.0]
BASE = dict(rope_theta=10000.0, factor=8.0)
ROPES = {  # name: (their parameters, tokens of the sequence)
    "linear": (BASE | {"rope_type": "linear"}, None),
    "dynamic": (BASE | {"rope_type": "dynamic"}, 4096),
    "yarn": (BASE | {"rope_type": "yarn", "original_max_position_embeddings": 1024}, None),
    "yarn_mscale": (
        BASE | {"rope_type": "yarn", "original_max_position_embeddings": 1024, "mscale": 0.7, "mscale_all_dim": 1.0},
        None,
    ),
    "longrope_short": (
        BASE | {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                "original_max_position_embeddings": 1024}, 1024,
    ),
    "longrope_long": (
        BASE | {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                "original_max_position_embeddings": 1024}, 1025,
    ),
}  # fmt: skip


def record_rope(parameters: dict, length: int | None) -> np.ndarray:
    config = transformers.LlamaConfig(
        hidden_size=8, num_attention_heads=1, head_dim=8, max_position_embeddings=1024, rope_parameters=parameters
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)
    return np.append(frequencies.numpy(), np.float32(factor))


def main() -> None:
    transformers.logging.set_verbosity_error()
    generator = torch.Generator().manual_seed(0)
    found = {f"rope/{name}": record_rope(*given) for name, given in ROPES.items()}
    for make in MODELS:
        found |= {f"{make.__name__}/{name}": array for name, array in record(make, generator).items()}
    np.savez_compressed(Path(__file__).with_name("hugging_face.npz"), **found)


if __name__ == "__main__":
    main()
