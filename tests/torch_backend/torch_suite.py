"""Run torch's own tests of torch.distributed over backend meshdist, beside Gloo.

    python tests/torch_backend/torch_suite.py --world-size 3 --out torch_suite.txt
    python tests/torch_backend/torch_suite.py --match 'test_all_reduce|test_broadcast' --backends meshdist

The cases are those of `torch.testing._internal.distributed.distributed_test`, which comes with torch: all that torch
runs with Gloo on CPU tensors. Both backends run the same cases, and these do the same: what they do for Gloo. Each case
has a world of processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

BACKENDS = ("gloo", "meshdist")
# Cases that ask for GPUs in their bodies, which are skipped without them.
_RESULT = "{case:<64} {gloo:<10} {meshdist}"


def load(world_size: int) -> ModuleType:
    """Import torch's tests with the conditions for Gloo."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), TEMP_DIR=os.environ.get("TEMP_DIR", "/tmp"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return import_module("torch.testing._internal.distributed.distributed_test")


def cases_for(tests: ModuleType, backend: str, timeout_s: int) -> type[unittest.TestCase]:
    """Return the class of torch's cases, whose ranks initialize `backend`."""
    torch_dist: Any = import_module("torch.distributed")
    common = import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_DEFAULT = timeout_s
    common.TIMEOUT_OVERRIDE.clear()

    class Cases(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            # Not spawned, as torch does: importing torch anew takes most of the time of a case.
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            # Only the ranks learn of the backend: the cases do what they do for Gloo.
            initialize = torch_dist.init_process_group
            torch_dist.init_process_group = lambda **given: initialize(**{**given, "backend": backend})
            super()._run(*args, **kwargs)

    Cases.__name__ = Cases.__qualname__ = f"CasesOf{backend.title()}"
    return Cases


def outcome(case: unittest.TestCase) -> tuple[str, str]:
    """Run a case; return "passes", "fails" or "skipped", and why."""
    result = unittest.TestResult()
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        case.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    problems = [*result.failures, *result.errors]
    return ("fails", problems[0][1]) if problems else ("passes", "")


def names(tests: ModuleType, match: str) -> list[str]:
    base = tests.DistributedTest._DistTestBase
    return [name for name in unittest.TestLoader().getTestCaseNames(base) if re.search(match, name)]


def run(tests: ModuleType, match: str, backends: tuple[str, ...], timeout_s: int) -> Iterator[dict[str, str]]:
    """Yield the outcome of each case that is not skipped, by backend."""
    classes = {backend: cases_for(tests, backend, timeout_s) for backend in backends}
    for name in names(tests, match):
        row: dict[str, Any] = {"case": name}
        for backend, cases in classes.items():
            row[backend], row[f"why {backend}"] = outcome(cases(name))
            if row[backend] == "skipped":
                break
        if "skipped" not in row.values():
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--match", default="", help="a pattern of the names of cases")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="write the list to this file as well")
    parser.add_argument("--errors", action="store_true", help="print the errors of backend meshdist")
    options = parser.parse_args()
    import torch

    import meshdist.torch  # noqa: F401 - registers the backend

    tests = load(options.world_size)
    command = f"python tests/torch_backend/torch_suite.py --world-size {options.world_size}"
    lines = [
        f"# torch {torch.__version__}'s own tests of torch.distributed, {options.world_size} ranks, CPU tensors.",
        f"# {command}",
        "",
        _RESULT.format(case="case", gloo="gloo", meshdist="meshdist"),
    ]
    print("\n".join(lines), flush=True)
    rows = []
    for row in run(tests, options.match, tuple(options.backends), options.timeout):
        rows.append(row)
        lines.append(_RESULT.format(**{"gloo": "", "meshdist": "", **row}).rstrip())
        print(lines[-1], flush=True)
        if options.errors and row.get("meshdist") == "fails":
            print(row["why meshdist"], flush=True)
    for backend in options.backends:
        counts = Counter(row[backend] for row in rows)
        lines.append(f"# {backend}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}")
        print(lines[-1])
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")
    return int(any(row.get("meshdist") == "fails" and row.get("gloo", "passes") == "passes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
