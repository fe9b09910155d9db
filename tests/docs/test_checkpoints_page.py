"""docs/api/checkpoints.md has every public name of meshdist.checkpoint, and the page every option of save."""

import inspect
import re
from pathlib import Path

import meshdist.checkpoint

DOCS = Path(__file__).parents[2] / "docs"


def test_every_public_name_is_on_the_page_of_the_api():
    text = (DOCS / "api" / "checkpoints.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: meshdist\.checkpoint\.(\w+)$", text, re.MULTILINE))
    assert listed == set(meshdist.checkpoint.__all__)
    assert all(getattr(meshdist.checkpoint, name).__doc__ for name in meshdist.checkpoint.__all__)


def test_the_page_names_every_option():
    page = (DOCS / "checkpoints.md").read_text()
    for function in (meshdist.checkpoint.save, meshdist.checkpoint.load):
        options = [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
        assert [name for name in options if f"{name}=" not in page] == []
