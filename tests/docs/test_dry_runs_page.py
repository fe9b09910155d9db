"""docs/dry-runs.md: its program prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
PAGE = (Path(__file__).parents[2] / "docs" / "dry-runs.md").read_text()


def test_the_program_prints_what_the_page_says():
    ((program, output),) = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "dry_runs_page"})
    assert printed.getvalue() == output
