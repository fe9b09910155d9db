"""docs/variables.md against the package: every variable of meshdist's own is in a table, and each of these is read."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"MESHDIST_[A-Z_]+[A-Z]")


def test_the_tables_have_the_variables_that_are_read():
    sources = [path.read_text() for path in (ROOT / "meshdist").rglob("*.py")]
    read = {name for text in sources for name in NAME.findall(text)}
    page = (ROOT / "docs" / "variables.md").read_text()
    documented = {
        name for line in page.splitlines() for name in NAME.findall(line.split(" | ")[0]) if line.startswith("| `")
    }
    assert len(read) >= 8
    assert documented == read


def test_pages_name_no_other_variables():
    documented = set(NAME.findall((ROOT / "docs" / "variables.md").read_text()))
    for page in ("README.md", "CHANGELOG.md", "docs/migration.md"):
        assert set(NAME.findall((ROOT / page).read_text())) - documented == set(), page
