"""Exported programs give the tokens of the engine in a process that cannot import megajax."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.layout import recorded
from megajax.config import Config
from megajax.convert.export import main
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine
from megajax.inference.tokens.sampling import Sampling
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.training.config import TrainingConfig
from megajax.weights.stablehlo import export_programs

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "serving.md"
PROMPT = [100, 101, 102, 32]
IDS_AS_TEXT = f"""
class SentencePieceProcessor:
    def __init__(self, model_file):
        pass
    def encode(self, text):
        return {PROMPT}
    def decode(self, ids):
        return ids
"""
CONFIG = Config(
    model=DecoderConfig(
        num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=32, vocab_size=300, position="rope",
        norm="rmsnorm", activation="swiglu", biases=(), init_std=0.5,
    ),
    training=TrainingConfig(sequence_length=64),
    data=DataConfig(source="mock", tokenizer="bytes"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    pytest.importorskip("flatbuffers")
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "config.json").write_text(CONFIG.to_json())
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        model = Model(CONFIG.model)
        checkpointer.write(3, {"params": model.init(seed=3)}, recorded(model.layer_rows))
    return run_dir


def test_the_page_gives_the_tokens_of_the_engine_without_megajax(run_dir, tmp_path):
    main([f"--run={run_dir}", f"--output={tmp_path / 'out'}", "--stablehlo", "--max_length=64"])
    (lines,) = re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for shown, here in {"exports/programs": str(tmp_path / "out"), "LENGTH = 256": "LENGTH = 64"}.items():
        assert shown in lines
        lines = lines.replace(shown, here)
    lines = lines.replace("from sentencepiece import SentencePieceProcessor", IDS_AS_TEXT)
    alone = "import sys\nfor name in ('megajax', 'flax', 'orbax'): sys.modules[name] = None  # cannot be imported\n"
    done = subprocess.run([sys.executable, "-c", alone + lines], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (expected,) = Engine.from_run(run_dir).generate_tokens([PROMPT], Sampling(max_tokens=32, temperature=0.0))
    assert len(set(expected)) > 3 and len(expected) == 32
    assert json.loads(done.stdout) == PROMPT + expected


def test_rows_of_several_lengths_and_what_is_beside_the_programs(run_dir, tmp_path):
    export_programs(run_dir, tmp_path / "out", dtype="float32", batch_size=2, max_length=16)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (about["batch_size"], about["max_length"], about["vocab_size"]) == (2, 16, 257)
    assert about["platforms"] == ["cpu", "cuda"]
    read = (tmp_path / "out" / "prefill.bin").read_bytes()
    prefill = jax.jit(jax.export.deserialize(bytearray(read)).call)
    params = dict(np.load(tmp_path / "out" / "parameters.npz"))
    tokens = np.zeros((2, 16), np.int32)
    tokens[0, :4] = PROMPT
    tokens[1, :2] = PROMPT[:2]
    logits, _ = prefill(params, tokens, np.array([4, 2], np.int32))
    tokens[0, 2:] = 7  # beyond its row now
    again, _ = prefill(params, tokens, np.array([2, 2], np.int32))
    assert logits.shape == (2, 257)
    np.testing.assert_allclose(again[0], logits[1], rtol=1e-5, atol=1e-5)
    assert np.abs(logits[0] - logits[1]).max() > 0.1


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(run_dir, tmp_path):
    learned = dataclasses.replace(CONFIG.model, position="learned", max_positions=32)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        export_programs(run_dir, tmp_path / "out", batch_size=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(dataclasses.replace(CONFIG, model=learned).to_json())
    (tmp_path / "run" / "checkpoints").symlink_to(run_dir / "checkpoints")
    for length in (0, 64):
        with pytest.raises(ValueError, match=f"max_length={length}: the model reads 1 to 32 tokens"):
            export_programs(tmp_path / "run", tmp_path / "out", max_length=length)
    assert not list(tmp_path.glob("*out*"))
