"""docs/pipelines.md: its table of schedules is what they simulate, and the reference has every public name."""

import re
from pathlib import Path

import meshdist.parallel

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_has_the_bubbles_and_activations_of_the_schedules():
    rows = re.findall(r"^\| `(\w+)\(4, 8\)` \| (\d+)% \| (\d+)", (DOCS / "pipelines.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for name, bubble, activations in rows:
        timeline = getattr(meshdist.parallel, name)(4, 8).simulate()
        assert (round(100 * timeline.bubble), max(timeline.peak_activations)) == (int(bubble), int(activations)), name


def test_every_public_name_of_parallel_is_in_the_reference():
    page = (DOCS / "api" / "training.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: meshdist\.parallel\.(\w+)$", page, re.MULTILINE)
    assert set(listed) == set(meshdist.parallel.__all__) - {"communication_hooks"}  # a module
