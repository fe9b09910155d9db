"""docs/backends.md: its tables are those that the code makes."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "backends.md"


def test_the_tables_are_up_to_date():
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    spec = importlib.util.spec_from_file_location("write_backends", ROOT / "docs" / "write_backends.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = PAGE.read_text()
    assert module.written(text) == text, "run `python docs/write_backends.py`"
