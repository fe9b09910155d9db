"""How Sphinx makes the site: `sphinx-build -W -b html docs build/site`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import notebook_pages  # noqa: E402

from meshdist._version import __version__  # noqa: E402

project = "meshdist"
author = "The meshdist developers"
copyright = f"2026, {author}, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
default_role = "code"  # what docstrings have in single backquotes is code
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # docstrings say in words what goes in, and signatures stay readable
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"meshdist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def setup(app: object) -> None:
    """Have the notebooks shown."""
    app.connect("source-read", notebook_pages.complete)  # type: ignore[attr-defined]
