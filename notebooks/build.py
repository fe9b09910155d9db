"""Makes the notebooks from their sources: `python notebooks/build.py [NAME ...]`.

A source, `notebooks/sources/NAME.py`, is a script whose cells begin with `# %%`, or `# %% [markdown]` for text, or
`# %% varies` if they do not show the same every time. It is run from top to bottom by a kernel, and stored with what it
shows as `notebooks/NAME.ipynb`.
"""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "sources"
_CELL = re.compile(r"^# %%(?: (.*))?\n", re.MULTILINE)


def notebook_of(source: str) -> Any:
    """Return the notebook of a source, not yet run."""
    _, *parts = _CELL.split(source)
    cells = []
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if kind == "[markdown]":
            cell = nbformat.v4.new_markdown_cell(re.sub("^# ?", "", text.strip(), flags=re.MULTILINE))
        else:
            # What only a notebook understands is a comment in the source.
            cell = nbformat.v4.new_code_cell(re.sub(r"^# (?=%)", "", text.strip(), flags=re.MULTILINE))
            if cell.source.startswith("%%"):
                cell.source = re.sub("^# ?", "", cell.source, flags=re.MULTILINE)
            if kind == "varies":
                cell.metadata["tags"] = ["varies"]
        cell.id = f"cell-{number:02}"
        cells.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={**kernel, "language_info": {"name": "python"}})
    notebook.nbformat_minor = 5
    return notebook


def executed(notebook: Any) -> Any:
    """Run a notebook in its folder and return it with what it shows."""
    import nbclient

    folder = {"metadata": {"path": str(FOLDER)}}
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources=folder, coalesce_streams=True
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it was run
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    names = sys.argv[1:] or sorted(path.stem for path in SOURCES.glob("*.py"))
    for name in names:
        notebook = executed(notebook_of((SOURCES / f"{name}.py").read_text()))
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}.ipynb: {len(notebook.cells)} cells")


if __name__ == "__main__":
    main()
