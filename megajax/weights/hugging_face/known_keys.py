"""Keys of a config.json that no option reads and that change nothing of what the model computes.

Sources: the configuration classes of transformers 4 and 5, of which older ones saved every attribute, and the
config.json files that the authors of the supported models publish.
"""

from collections.abc import Mapping
from typing import Any

from megajax.weights.hugging_face.options import Options

# With any value.
HARMLESS = frozenset({
    # a decoder is one; read for BERT
    "is_decoder",
    # bookkeeping
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_flash_attn_2_enabled", "_name_or_path", "_num_labels", "architectures", "attn_implementation", "auto_map",
    "dtype", "finetuning_task", "id2label", "is_llama_config", "label2id", "model_type", "num_labels", "problem_type",
    "task_specific_params", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # what a call returns, how it caches, in which pieces it computes
    "cache_implementation", "chunk_size_feed_forward", "keys_to_ignore_at_inference", "num_logits_to_keep",
    "output_attentions", "output_hidden_states", "output_past", "output_router_logits", "return_dict", "use_cache",
    # precision and kernels
    "attention_softmax_in_fp32", "bias_dropout_fusion", "mamba_ssm_cache_dtype", "masked_softmax_fusion",
    "moe_shared_expert_overlap", "pretraining_tp", "reorder_and_upcast_attn", "residual_in_fp32",
    "scale_attention_softmax_in_fp32", "use_mamba_kernels",
    # generation
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
    "mask_token_id", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
    "unk_token_id",
    # training
    "attention_dropout", "attn_pdrop", "aux_loss_alpha", "classifier_dropout", "embd_pdrop", "embedding_dropout",
    "ep_size", "gradient_checkpointing", "hidden_dropout", "initializer_range", "neftune_noise_alpha",
    "rescale_prenorm_residual", "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
    "router_jitter_noise", "seq_aux", "time_step_floor", "time_step_max", "time_step_rank",
    # heads that these classes do not have
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "predict_special_tokens", "summary_activation", "summary_first_dropout", "summary_last_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
    # lengths that limit nothing
    "max_sequence_length", "model_max_length", "n_ctx", "n_special", "seq_length",
    # read by quantized.py
    "quantization_config",
})  # fmt: skip

# With this value, in the families where no option reads them: the feature is off, or is what the class always does.
HARMLESS_VALUES = {
    "add_cross_attention": False, "apply_residual_connection_post_layernorm": False, "attention_bias": False,
    "full_attn_mod": 1, "interpolate_factor": 1, "is_encoder_decoder": False, "lm_head_bias": False,
    "mlp_bias": False, "mlp_type": "default", "norm_type": "layer_norm", "pruned_heads": {}, "rms_norm": True,
    "rope_interleaved": False, "rotary": True, "rotary_scaling_factor": 1.0, "scale_attn_weights": True,
    "skip_bias_add": True, "skip_bias_add_qkv": False,
    "slow_but_exact": False,  # which leaves biases out if pretraining_tp > 1
    "tie_encoder_decoder": False, "use_bidirectional_attention": False, "use_mrope": False,
}  # fmt: skip

# In the families with this model_type: keys that the class of transformers ignores, or overwrites.
IGNORED = {
    "bert": {"tie_word_embeddings"},
    "roberta": {"tie_word_embeddings"},
    "bloom": {"offset_alibi", "n_inner"},
    "deepseek_v2": {"head_dim", "qk_head_dim", "n_group", "topk_group"},
    "deepseek_v3": {"head_dim", "qk_head_dim"},
    "falcon": {"intermediate_size", "num_key_value_heads"},
    "gpt_neox": {"num_key_value_heads"},
    "gemma2": {"hidden_act", "sliding_window_size"},
    "gemma3_text": {"hidden_act"},
    "mamba2": {"intermediate_size", "norm_before_gate", "time_step_min"},
    "mixtral": {"router_z_loss_coef"},
    "nemotron": {"kv_channels"},
    "nemotron_h": {
        "expand", "mtp_layers_block_type", "norm_eps", "num_query_groups", "partial_rotary_factor", "rms_norm_eps",
        "rope_theta", "time_step_limit",
    },
    "stablelm": {"norm_eps", "rope_pct"},
    "t5": {"dense_act_fn", "is_gated_act", "n_positions"},
    "llava": {"image_seq_length", "ignore_index", "vocab_size", "hidden_size"},
    "llava_next": {"image_seq_length", "ignore_index", "vocab_size", "hidden_size", "use_image_newline_parameter"},
    "clip_vision_model": {"projection_dim", "vocab_size", "initializer_factor", "dropout", "tie_word_embeddings"},
    "siglip_vision_model": {"projection_dim", "projector_hidden_act", "num_image_tokens", "tie_word_embeddings"},
    "siglip2_vision_model": {"projection_dim", "tie_word_embeddings"},
    "whisper": {  # of its decoder, of training and of generation
        "activation_dropout", "apply_spec_augment", "classifier_proj_size", "decoder_attention_heads",
        "decoder_ffn_dim", "decoder_layerdrop", "decoder_layers", "dropout", "encoder_layerdrop",
        "forced_decoder_ids", "init_std", "is_encoder_decoder", "mask_feature_length", "mask_feature_min_masks",
        "mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "max_target_positions",
        "median_filter_width", "num_hidden_layers", "scale_embedding", "tie_word_embeddings",
        "use_weighted_layer_sum", "vocab_size",
    },
    "gemma3": {"boi_token_index", "eoi_token_index"},
    "qwen2_5_vl_vision": {"tokens_per_second", "in_chans", "spatial_patch_size"},  # the first: of videos
    "internvl": {"image_seq_length"},
    "internvl_vision": {
        "dropout", "hidden_dropout_prob", "initializer_factor", "layer_scale_init_value", "projection_dropout",
    },
}  # fmt: skip


def check_keys(options: Options, model_type: str, architecture: str, theirs: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the key and its value, for one that may change what the model computes."""
    read = {key for option in options for key in option.keys}
    ignored = HARMLESS | read | IGNORED.get(model_type, set())
    for key, value in theirs.items():
        if key in ignored or value is None or _is_usual(key, value, theirs):
            continue
        if key in HARMLESS_VALUES:
            raise ValueError(f"{key}={value} is not supported by {architecture}; supported is {HARMLESS_VALUES[key]}")
        raise ValueError(
            f"{key}={_short(value)} is unknown in {architecture}, and may change what it computes; if it does "
            "not, remove the key from the file"
        )


def _is_usual(key: str, value: Any, theirs: Mapping[str, Any]) -> bool:
    """Whether the value says what holds without the key."""
    if key == "head_dim":
        return value == theirs["hidden_size"] // theirs["num_attention_heads"]
    return key in HARMLESS_VALUES and value == HARMLESS_VALUES[key]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
