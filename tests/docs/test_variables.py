"""docs/variables.md and the list in the package have the variables of meshdist's own that are read, and no others."""

import re
from pathlib import Path

from meshdist.system.variables import VARIABLES

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"MESHDIST_[A-Z_]+[A-Z]")


def test_the_tables_have_the_variables_that_are_read():
    paths = [path for path in (ROOT / "meshdist").rglob("*.py") if path.name != "variables.py"]
    read = {name for path in paths for name in NAME.findall(path.read_text())}
    page = (ROOT / "docs" / "variables.md").read_text()
    documented = {
        name for line in page.splitlines() for name in NAME.findall(line.split(" | ")[0]) if line.startswith("| `")
    }
    assert len(read) >= 8
    assert documented == read == set(VARIABLES)


def test_pages_name_no_other_variables():
    documented = set(NAME.findall((ROOT / "docs" / "variables.md").read_text()))
    for page in ("README.md", "CHANGELOG.md", "docs/migration.md"):
        assert set(NAME.findall((ROOT / page).read_text())) - documented == set(), page
