"""The wheel holds all that the command needs, and the command works from any directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("megajax", "configs", "pallas_kernels", "pyproject.toml", "README.md", "LICENSE")


@pytest.mark.slow
def test_wheel_works_without_the_sources(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        shutil.copytree(path, source / name) if path.is_dir() else shutil.copy(path, source)
    pip = [sys.executable, "-m", "pip"]
    target = tmp_path / "installed"
    subprocess.run([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", tmp_path], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    for path in [*(ROOT / "megajax").rglob("*.pbtxt"), *(ROOT / "megajax").rglob("*.html")]:
        assert (target / path.relative_to(ROOT)).is_file()

    def megajax(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(target)}
        command = [sys.executable, target / "bin" / "megajax", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    assert "llama3_70b" in megajax("configs")
    assert "does not fit" in megajax("plan", "--config=gpt_175b", "--plan=a100", "--mesh.fsdp=1", "--mesh.tensor=1")
    # With a supervisor, which starts the same command again as its child.
    model = ["--model.num_layers=1", "--model.embed_dim=32", "--model.num_heads=2", "--model.vocab_size=512"]
    data = ["--data.source=mock", "--data.text=", "--data.tokenizer=bytes", "--training.sequence_length=32"]
    steps = ["--training.steps=1", "--optimizer.schedule=constant", "--optimizer.warmup_steps=0"]
    quiet = ["--training.sample_prompt=", "--training.eval_every_steps=0", "--launch.max_restarts=1"]
    assert "finished" in megajax("train", "--config=gpt_tiny", "--run_dir=run", *model, *data, *steps, *quiet)
    assert (tmp_path / "run" / "config.json").is_file()
