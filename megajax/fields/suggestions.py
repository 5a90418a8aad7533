"""Did you mean: the known name closest to a mistyped one. Has no slow imports."""

import difflib
from collections.abc import Iterable

# Names of fields in other programs, with underscores -> the last part of our name.
SYNONYMS = {
    "lr": "learning_rate",
    "min_lr": "min_learning_rate",
    "wd": "weight_decay",
    "bs": "global_batch_size",
    "batch": "global_batch_size",
    "batch_size": "global_batch_size",
    "gbs": "global_batch_size",
    "mbs": "microbatch_size",
    "micro_batch_size": "microbatch_size",
    "seq_len": "sequence_length",
    "seq_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "context_length": "sequence_length",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "iters": "steps",
    "train_iters": "steps",
    "warmup": "warmup_steps",
    "clip": "clip_norm",
    "clip_grad": "clip_norm",
    "grad_clip": "clip_norm",
    "hidden_size": "embed_dim",
    "d_model": "embed_dim",
    "layers": "num_layers",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "ffn_hidden_size": "mlp_dim",
    "intermediate_size": "mlp_dim",
    "d_ff": "mlp_dim",
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "save_interval": "every_steps",
    "eval_interval": "eval_every_steps",
    "log_interval": "log_every_steps",
    "output_dir": "run_dir",
    "save": "run_dir",
    "load": "run_dir",
    "max_new_tokens": "max_tokens",
    "temp": "temperature",
}
LEAST_SIMILARITY = 0.55  # of 1


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint with the closest known name, or an empty string. The last part, after the dot, counts most."""
    best = max(known, key=lambda candidate: _similarity(name, candidate), default=None)
    if best is None or _similarity(name, best) < LEAST_SIMILARITY:
        return ""
    return f"; did you mean {prefix}{best}?"


def _similarity(typed: str, known: str) -> float:
    """Between 0 and 1."""
    typed_section, _, typed_last = typed.rpartition(".")
    section, _, last = known.rpartition(".")
    similarity = max(_last_part(typed_last, last), _last_part(SYNONYMS.get(typed_last, typed_last), last))
    if not typed_section:  # the shortest section first: training.z_loss before model.moe.router.z_loss
        return similarity - 0.01 * known.count(".")
    return 0.75 * similarity + 0.25 * difflib.SequenceMatcher(None, typed_section, section).ratio()


def _last_part(typed: str, last: str) -> float:
    """1 if equal; 0.7 to 0.9 if one has all words of the other, more for fewer extra words."""
    if typed == last:
        return 1.0
    words = set(typed.split("_"))
    known = set(last.split("_"))
    alike = difflib.SequenceMatcher(None, typed, last).ratio()
    if words <= known or known <= words:
        return max(alike, 0.7 + 0.2 * len(words & known) / len(words | known))
    return alike
