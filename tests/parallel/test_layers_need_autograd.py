"""meshdist.parallel imports without the package autograd; only its layers need it, and say so."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["autograd"] = None  # as if it were not installed
import meshdist.parallel
from meshdist.parallel import GradientReducer
try:
    from meshdist.parallel import column_parallel
except ImportError as error:
    print(error)
try:
    meshdist.parallel.column
except AttributeError as error:
    print(error)
"""


def test_only_the_layers_need_the_package_autograd() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "meshdist.autograd needs the package autograd: pip install autograd",
        "module 'meshdist.parallel' has no attribute 'column'",
    ]
