"""Each notebook runs from its first cell to its last, and draws the figures that it is kept with."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in (ROOT / "notebooks").glob("*.ipynb")}
MOST_BYTES = 500_000


def num_figures(notebook: nbformat.NotebookNode) -> list[int]:
    """Of each cell."""
    return [sum("image/png" in output.get("data", {}) for output in cell.get("outputs", ())) for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_draws_its_figures(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS")  # with the devices of a person who opens it
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    kept = num_figures(notebook)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert num_figures(notebook) == kept and any(kept)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_kept_with_its_outputs_and_small(name):
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert NOTEBOOKS[name].stat().st_size < MOST_BYTES
