"""A backend of Ray Train: the program of the page, and workers that fail, which go on in a new world."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from ray_clusters import driven, marks, program

pytestmark = [
    *marks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (find_spec("pyarrow") and find_spec("pandas")),
        reason="Ray Train needs pyarrow and pandas; pip install 'ray[train]'",
    ),
]


@pytest.mark.parametrize("version", ["0", "1"], ids=["v1", "v2"])
def test_the_program_of_the_page_and_workers_that_fail(version: str) -> None:
    page = program("A backend of Ray Train")
    with driven("train_driver.py", page, limit_s=480, RAY_TRAIN_V2_ENABLED=version) as said:
        assert said["page"] == ([3.0] if version == "1" else [])
        for how in ("raise", "kill"):
            assert (said[how]["total"], said[how]["step"]) == (7, 3)
            assert said[how]["start"] > 0
        assert "TrainingFailedError" in said["once too often"] or "WorkerGroupError" in said["once too often"]
