"""The notebooks run without an exception, and what they show is what is stored in them."""

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='needs nbclient and ipykernel: pip install -e ".[test]"')
nbclient = pytest.importorskip("nbclient", reason='needs nbclient and ipykernel: pip install -e ".[test]"')
pytest.importorskip("ipykernel", reason='needs nbclient and ipykernel: pip install -e ".[test]"')

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def shown(notebook):
    """Return what each code cell shows as text."""
    return [
        [output["text"] if output.output_type == "stream" else output["data"]["text/plain"] for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
def test_notebook_shows_what_is_stored_in_it(path, tmp_path, monkeypatch):
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    # Kernels that the user has installed under the name "python3" are not those of this environment.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = shown(notebook)
    assert any(stored)
    folder = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", resources=folder).execute()
    assert shown(notebook) == stored
