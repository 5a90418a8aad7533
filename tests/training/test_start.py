"""The start of a run: the step is traced once, in a thread beside the one that makes the state."""

import threading

import pytest

import configs
from megajax import run
from megajax.overrides import override
from megajax.training import step

TINY = {
    "model.num_layers": 1, "model.embed_dim": 16, "model.num_heads": 2, "model.mlp_dim": 32, "model.vocab_size": 256,
    "data.source": "mock", "data.text": "", "data.tokenizer": "null:255", "training.sequence_length": 16,
    "training.sample_prompt": "", "training.global_batch_size": 16, "training.eval_every_steps": 0,
    "training.steps": 4, "checkpoint.every_steps": 2, "logging.tensorboard": False, "mesh.fsdp": 8, "mesh.data": 1,
}  # fmt: skip
FLOAT16 = {
    "precision.recipe": "fp16", "precision.compute": "bfloat16", "optimizer.moments": "float8",
    "training.microbatch_size": 1,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, FLOAT16])
def test_the_call_finds_the_step_that_a_thread_has_lowered(changes, tmp_path, monkeypatch):
    tracing = []
    loss_weights = step.loss_weights

    def noted(*arguments):
        tracing.append(threading.current_thread())
        return loss_weights(*arguments)

    monkeypatch.setattr(step, "loss_weights", noted)
    config = override(configs.recipe("gpt_tiny"), TINY | {"run_dir": tmp_path / "run"} | changes)
    for stop in ({"launch.exit_at_step": 2}, {}):
        tracing.clear()
        outcome = run.train(override(config, stop))
        assert len(tracing) == 1
        assert tracing[0] is not threading.main_thread()
    assert outcome == "finished"
    tracing.clear()
    assert run.train(config) == "already finished"
    assert not tracing
