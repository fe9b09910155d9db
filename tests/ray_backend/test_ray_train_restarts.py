"""Workers of Ray Train that fail: Train starts them again, in a new world, from the last checkpoint."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from ray_clusters import driven, marks

pytestmark = [
    *marks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (find_spec("pyarrow") and find_spec("pandas")),
        reason="Ray Train needs pyarrow and pandas; pip install 'ray[train]'",
    ),
]


@pytest.mark.parametrize("version", ["0", "1"], ids=["v1", "v2"])
def test_failed_workers_are_started_again_in_a_new_world(version: str) -> None:
    with driven("train_driver.py", limit_s=480, RAY_TRAIN_V2_ENABLED=version) as said:
        for how in ("raise", "kill"):
            assert (said[how]["total"], said[how]["step"]) == (7, 3)
            assert said[how]["start"] > 0
        assert "TrainingFailedError" in said["once too often"] or "WorkerGroupError" in said["once too often"]
