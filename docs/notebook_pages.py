"""Shows the stored notebooks as pages of the site: each page in docs/notebooks/ is completed by its notebook.

In the repository, the other pages link to the notebooks themselves, which GitHub shows with their outputs; on the site,
they link to these pages.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "notebooks/"
# The first words of a page; they are for readers outside of the site.
_ON_GITHUB = re.compile(r"GitHub shows this notebook with its outputs: (\[.*?\]\(.*?\))")
_ON_THE_SITE = r"This page shows the notebook \1 with its outputs"
# A link from a page in docs/, or in a folder of it, to a notebook.
_LINK = re.compile(r"\]\(\.\./((?:\.\./)?)notebooks/(\w+)\.ipynb\)")


def page_of(notebook: dict[str, Any]) -> str:
    """Return the cells of a notebook, but for its title, and what they show, as Markdown."""
    title, *cells = notebook["cells"]
    assert title["cell_type"] == "markdown", "a notebook begins with its title"
    intro = "".join(title["source"]).partition("\n")[2]
    return "\n\n".join([_in_place(intro), *(part for cell in cells for part in _parts(cell))]) + "\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield _in_place(source)
        return
    # What begins with a magic is not Python to a highlighter.
    yield _block("text" if source.startswith("%") else "python", source)
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text" in output:
            yield _block("text", "".join(output["text"]).rstrip())
        elif "image/png" in data:
            yield f"![what the cell has drawn](data:image/png;base64,{''.join(data['image/png']).strip()})"
        else:
            yield _block("text", "".join(data["text/plain"]))


def _in_place(text: str) -> str:
    return text.replace("](../", "](../../")  # pages are a folder deeper than the notebooks


def _block(language: str, text: str) -> str:
    return f"~~~~{language}\n{text}\n~~~~"


def complete(app: Any, name: str, content: list[str]) -> None:
    """Add the notebook to its page, and link other pages to that: the event "source-read" of Sphinx."""
    if name.startswith(FOLDER):
        path = ROOT / f"{name}.ipynb"
        app.env.note_dependency(path)
        content[0] = f"{_ON_GITHUB.sub(_ON_THE_SITE, content[0])}\n{page_of(json.loads(path.read_text()))}"
    else:
        content[0] = _LINK.sub(r"](\1notebooks/\2.md)", content[0])
