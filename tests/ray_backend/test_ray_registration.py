"""Whoever imports what first: `import meshdist.ray` and ray.util.collective make the backend known."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ray_clusters import ROOT, marks

pytestmark = marks


@pytest.mark.parametrize(
    "statements",
    [
        "import meshdist.ray, ray.util.collective",
        "import ray.util.collective, meshdist.ray",
        "import meshdist.ray; meshdist.ray.register()",
        "import meshdist.ray; meshdist.ray.get_group",
    ],
)
def test_the_backend_is_known(statements: str) -> None:
    program = f"{statements}\nfrom ray.util.collective.types import Backend\nprint(Backend.MESHDIST)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "MESHDIST\n"), done.stderr


def test_jobs_import_neither_rays_collectives_nor_train() -> None:
    program = "import sys, meshdist.ray\nprint({'ray.util.collective', 'ray.train', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
