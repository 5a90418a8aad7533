"""megajax and PyTorch take the same training steps: an independent model, optimizer and clipping."""

import pytest

from benchmarks.curve_beside_torch import SETTINGS, compare, summary

TINY = (
    "--precision.compute=float32", "--model.num_layers=2", "--model.embed_dim=32", "--model.num_heads=4",
    "--model.mlp_dim=64", "--training.sequence_length=32", "--training.global_batch_size=4", "--training.steps=12",
    "--optimizer.warmup_steps=2", "--optimizer.learning_rate=0.01", "--data.text=docs/index.md,docs/design.md",
)  # fmt: skip


@pytest.mark.parametrize("config", ["gpt2_124m", "llama3_8b"])
def test_losses_are_those_of_pytorch(config):
    """Learned positions, biases and tied embeddings; rotary positions, grouped heads and gated activations."""
    pytest.importorskip("torch")
    own = ["--model.num_kv_heads=2"] if config == "llama3_8b" else []
    found = compare([config, *SETTINGS, *TINY, *own])
    ours, theirs = (found[name]["losses"] for name in ("megajax", "torch"))
    assert ours[0] - ours[-1] > 1
    assert ours == pytest.approx(theirs, abs=2e-4), summary(found)
