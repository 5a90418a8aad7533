"""A tiny model of each family, as (configuration class of transformers, its arguments)."""

TINY = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
SCALED = dict(factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
LLAMA3 = SCALED | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
YARN = SCALED | dict(rope_type="yarn", beta_fast=4.0, beta_slow=1.0)
GPT = dict(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
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
        TINY | dict(original_max_position_embeddings=32, max_position_embeddings=128, rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[1.0, 2.0, 3.0, 4.0],
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
}  # fmt: skip
