"""How Sphinx makes the site: `sphinx-build -W -b html docs build/site`."""

import gc
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import method_tables  # noqa: E402
import notebook_pages  # noqa: E402
import source_links  # noqa: E402

from meshdist._version import __version__  # noqa: E402

# What Sphinx makes stays until the end; looking for garbage in it again and again takes a quarter of the time.
gc.set_threshold(200_000, 50, 100)

project = "meshdist"
author = "The meshdist developers"
copyright = f"2026, {author}, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
default_role = "code"  # what docstrings have in single backquotes is code
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"meshdist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def without_note(app: Any, name: str, content: list[str]) -> None:
    """Leave out of a page how to make the site, for readers outside of it: the event "source-read"."""
    content[0] = re.sub(r"^> Sphinx makes .*?\n\n", "", content[0], flags=re.MULTILINE | re.DOTALL)


_trees: dict[tuple[str, str], Any] = {}


def one_tree_for_sources(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the sources of a folder one navigation tree, as their pages are not in it: the event "html-page-context"."""
    if page.startswith("_modules/"):
        folder, make = page.rpartition("/")[0], context["toctree"]

        def toctree(**options: Any) -> Any:
            key = folder, repr(sorted(options.items()))
            if key not in _trees:
                _trees[key] = make(**options)
            return _trees[key]

        context["toctree"] = toctree


# Classes whose objects users get from calls, and do not create.
_FROM_CALLS = {
    *("Account", "Candidate", "CoalescedCalls", "DTensor", "DryRun", "Event", "Generator", "GradBucket", "PendingSave"),
    *("PipelineStep", "PipelineTimeline", "Plan", "PostLocalSGD", "PowerSGD", "ProcessGroup", "Profile"),
    *("ReducerStatistics", "Slowest", "SpawnContext", "StepTimes", "Timeline", "Total", "Track", "Volume", "Work"),
}


def as_used(app: Any, what: str, name: str, thing: Any, options: Any, args: str, returned: str) -> Any:
    """Leave out of signatures what users do not write: the event "autodoc-process-signature".

    These are the arguments with private names, and those of classes whose objects users do not create.
    """
    if args and (what == "exception" or (what == "class" and name.rpartition(".")[2] in _FROM_CALLS)):
        return "", ""
    return args and re.sub(r", _\w+: \w+ = \w+", "", args), returned


def link_by_last_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a type that is described under a shorter name than that of its module: the event "missing-reference"."""
    domain, (package, _, name) = env.get_domain("py"), node.get("reftarget", "").rpartition(".")
    if node.get("reftype") not in ("class", "exc", "obj"):
        return None
    found = []
    for full, entry in domain.objects.items():
        described_in, _, last = full.rpartition(".")
        if (
            last == name
            and entry.objtype in ("class", "exception", "type")
            and (not package or package.startswith(described_in))
        ):
            found.append(full)
    if not found:
        return None
    nearest = max(found, key=len)
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], nearest, node, content)


def setup(app: Any) -> None:
    """Complete pages with notebooks and tables of methods, and link inherited methods to their source."""
    app.connect("autodoc-process-signature", as_used)
    app.connect("html-page-context", one_tree_for_sources, priority=100)  # before the theme's
    app.connect("missing-reference", link_by_last_name)
    app.connect("source-read", without_note)
    app.connect("source-read", method_tables.complete)
    app.connect("source-read", notebook_pages.complete)
    app.connect("viewcode-follow-imported", source_links.defining_module)
    app.connect("viewcode-find-source", source_links.source)
