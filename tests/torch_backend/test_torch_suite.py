"""A part of torch's own tests of torch.distributed, over backend meshdist; torch_suite.txt has the results of all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from worlds import needs_linux

pytestmark = [
    needs_linux,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(find_spec("expecttest") is None, reason="torch's tests need expecttest"),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "torch_backend" / "torch_suite.py"
CASES = (
    "test_DistributedDataParallelCPU",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_subgroup",
    "test_all_reduce_complex_unsupported_ops",
    "test_batch_isend_irecv_gloo_tags",
    "test_isend",
    "test_reduce_full_group_max",
    "test_send_recv_any_source",
    "test_static_graph_api_cpu",
)


def test_a_part_of_torchs_own_tests_passes() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--backends",
        "meshdist",
        "--world-size",
        "3",
        "--timeout",
        "40",
        "--errors",
    ]
    done = subprocess.run(
        [*command, "--match", f"^({'|'.join(CASES)})$"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    passed = re.findall(r"^(\w+) +passes$", done.stdout, re.MULTILINE)
    assert sorted(passed) == sorted(CASES), done.stdout
