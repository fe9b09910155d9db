"""The notebooks run without an exception, and what they show is what is stored in them."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason='needs nbclient and ipykernel: pip install -e ".[test]"')
nbclient = pytest.importorskip("nbclient", reason='needs nbclient and ipykernel: pip install -e ".[test]"')
pytest.importorskip("ipykernel", reason='needs nbclient and ipykernel: pip install -e ".[test]"')

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCES = sorted((ROOT / "notebooks" / "sources").glob("*.py"))
# Everything is to be over in a minute.
LONGEST_S = 60


def shown(notebook):
    """Return what each code cell shows as text; None for cells that do not show the same every time."""
    return [
        None
        if "varies" in cell.metadata.get("tags", ())
        else [
            output["text"] if output.output_type == "stream" else output["data"]["text/plain"]
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "notebooks" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_notebook_has_a_source():
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_notebook_is_that_of_its_source(path):
    made = builder().notebook_of(path.read_text())
    stored = nbformat.read(ROOT / "notebooks" / f"{path.stem}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.name for path in NOTEBOOKS])
@pytest.mark.slow
def test_notebook_shows_what_is_stored_in_it(path, tmp_path, monkeypatch):
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    # Kernels that the user has installed under the name "python3" are not those of this environment.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # there are more ranks than cores already
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored, pictures = shown(notebook), num_pictures(notebook)
    assert any(stored)
    folder = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=LONGEST_S, kernel_name="python3", resources=folder, coalesce_streams=True
    )
    client.execute()
    assert shown(notebook) == stored
    assert num_pictures(notebook) == pictures


def num_pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", ()) for output in outputs)
