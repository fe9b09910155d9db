"""docs/api/training.md has every public name of meshdist.parallel that docs/data-parallel.md introduces."""

import re
from pathlib import Path

import meshdist.parallel
from meshdist.parallel import communication_hooks

API = Path(__file__).parents[2] / "docs" / "api" / "training.md"


def test_every_public_name_is_on_the_page_of_the_api():
    text = API.read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: meshdist\.parallel\.(\w+)$", text, re.MULTILINE))
    assert listed == set(meshdist.parallel.__all__) - {"communication_hooks"}
    hooks = set(re.findall(r"^\.\. auto\w+:: meshdist\.parallel\.communication_hooks\.(\w+)$", text, re.MULTILINE))
    assert hooks == set(communication_hooks.__all__)


def test_names_are_imported_when_they_are_used_first():
    assert set(meshdist.parallel.__all__) <= set(dir(meshdist.parallel))
    for name in meshdist.parallel.__all__:
        assert getattr(meshdist.parallel, name).__doc__
