"""The site of the documents: Sphinx makes it without a warning, and the reference has every public name."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import meshdist
from meshdist.collectives import methods

pytestmark = pytest.mark.timeout(250)
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What a page says of them in words, as they are values.
IN_WORDS = {"SHRINK_ABORT", "SHRINK_DEFAULT", "__version__", "default_pg_timeout", "functional", "group", "reduce_op"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "myst_parser", "furo"):
        if find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install -e ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", folder / "doctrees", DOCS, folder / "site"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "site"


@pytest.mark.slow
def test_every_page_is_made(site):
    assert {path.stem for path in site.glob("*.html")} >= {path.stem for path in DOCS.glob("*.md")}


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    documented = set(re.findall(r'id="meshdist\.(\w+)"', reference))
    assert sorted(set(meshdist.__all__) - documented - IN_WORDS) == []
    assert "Reduce <code" in reference  # the docstring of all_reduce


@pytest.mark.slow
def test_the_reference_has_types_sources_and_the_methods_of_meshes_and_groups(site):
    entry = re.search(r'<dt[^>]*id="meshdist\.DeviceMesh\.flatten">.*?</dt>', _page(site, "meshes"), re.DOTALL).group()
    assert 'mesh_slices.html#DeviceMesh.flatten"' in entry
    assert "Sequence[int | str] | None" in re.sub(r"<[^>]+>", "", entry)
    for subject in ("meshes", "groups"):
        linked = set(re.findall(r'href="collectives\.html#meshdist\.(\w+)"', _page(site, subject)))
        linked |= set(re.findall(r'href="messages\.html#meshdist\.(\w+)"', _page(site, subject)))
        assert set(methods.__all__) <= linked


@pytest.mark.slow
def test_the_reference_lists_no_private_arguments(site):
    listed = {page.name for page in (site / "api").glob("*.html") if re.search(r"\b_init_\w+", page.read_text())}
    assert listed == set()


# Names in signatures that come from Python, or stand for any type.
OF_PYTHON = {"Any", "BaseException", "Callable", "False", "Iterable", "Iterator", "Literal", "Mapping", "None", "Path"}
OF_PYTHON |= {"AbstractContextManager", "PathLike", "Self", "Sequence", "T", "True"}
OF_NUMPY = {"DTypeLike"}


@pytest.mark.slow
def test_every_type_in_a_signature_links_to_its_description(site):
    entries = re.compile(r'<dt class="sig[^>]*id="([^"]*)"[^>]*>(.*?)</dt>', re.DOTALL)
    pages = [page for page in (site / "api").glob("*.html") if page.stem != "types"]
    unknown = {
        (name, found)
        for page in pages
        for name, signature in entries.findall(page.read_text())
        for found in _unlinked_types(signature) - OF_PYTHON - OF_NUMPY
    }
    assert sorted(unknown) == [], "describe them in docs/api/types.md, or list their classes on a page"
    assert '<a class="reference internal" href="types.html#AnyArray"' in _page(site, "collectives")


def _unlinked_types(signature):
    linked, name = r"<a .*?</a>", r'<span class="sig-(?:pre)?name.*?</span></span>'
    default = r'<span class="default_value">.*?</span>(?:</span>)?'
    signature = re.sub(f"{linked}|{name}|{default}", "", signature, flags=re.DOTALL)
    return set(re.findall(r"\b[A-Z]\w*", re.sub(r"<[^>]+>", "", signature)))


@pytest.mark.slow
def test_the_collectives_begin_with_a_table_of_the_functions(site):
    begin = _page(site, "collectives").partition('id="meshdist.all_reduce"')[0]
    assert 'href="#meshdist.all_to_all_single"' in begin
    assert "Wait until all ranks of the group have called." in begin


@pytest.mark.slow
def test_the_site_does_not_say_how_to_build_it(site):
    pages = [site / "index.html", site / "api.html", *(site / "api").glob("*.html")]
    assert [page.name for page in pages if "sphinx-build" in page.read_text()] == []


def test_the_pages_of_the_reference_say_how_to_read_them():
    command = '`pip install -e ".[docs]" && sphinx-build docs build/site`'
    made = [page for page in (DOCS / "api").glob("*.md") if "{eval-rst}" in page.read_text()]
    assert [page.name for page in made if command not in page.read_text()] == []


def _page(site, subject):
    return (site / "api" / f"{subject}.html").read_text()


@pytest.mark.slow
def test_the_results_of_measurements_are_those_of_the_benchmarks(site):
    performance = (site / "performance.html").read_text().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    headings = re.findall(r"^## (.*)$", (ROOT / "benchmarks" / "RESULTS.md").read_text(), re.MULTILINE)
    assert len(headings) > 3
    assert [heading for heading in headings if heading not in performance] == []


@pytest.mark.slow
def test_every_notebook_is_a_page_with_what_it_shows(site):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / f"{path.stem}.html").read_text()
        cells = json.loads(path.read_text())["cells"]
        drawn = sum("image/png" in output.get("data", ()) for cell in cells for output in cell.get("outputs", ()))
        assert page.count("data:image/png") == drawn
        assert page.count('class="highlight-') > 3


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text()
    listed = [line for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in block.split()]
    pages = DOCS.rglob("*.md")
    names = {str(path.relative_to(DOCS).with_suffix("")) for path in pages} - {"index"}
    missing = sorted(names - set(listed))
    assert missing == [], "list them under a toctree of docs/index.md"
