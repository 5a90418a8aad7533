"""Each notebook runs from its first cell to its last, as it is and with a model that is even smaller."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in (ROOT / "notebooks").glob("*.ipynb")}
MOST_BYTES = 500_000
SMALL = """
STEPS = 4
MORE_STEPS = 2
RUN_DIR = "run"
SIZES = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.mlp_dim": 64, "model.vocab_size": 512,
    "data.source": "mock", "data.text": (), "data.tokenizer": "bytes", "data.cache_dir": "cache",
    "training.sequence_length": 128, "training.global_batch_size": 8, "training.eval_steps": 1,
    "training.sample_prompt": "", "optimizer.warmup_steps": 1,
}
"""


def execute(name: str, folder: Path, monkeypatch, instead: dict[str, str]) -> nbformat.NotebookNode:
    """Runs the notebook in a folder. instead: {how a cell begins: what it becomes}."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    for start, source in instead.items():
        (cell,) = [cell for cell in notebook.cells if cell.source.startswith(start)]
        cell.source = source
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.mark.slow
def test_quickstart_runs_with_a_very_small_model(tmp_path, monkeypatch):
    notebook = execute("quickstart", tmp_path, monkeypatch, {"STEPS =": SMALL})
    figures = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})
    ]
    assert len(figures) == 4
    assert (tmp_path / "run" / "config.json").is_file() and (tmp_path / "run_bfloat16" / "exported.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # with the devices of a person who opens it
    execute(name, tmp_path, monkeypatch, {})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_kept_with_its_outputs_and_small(name):
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert NOTEBOOKS[name].stat().st_size < MOST_BYTES
