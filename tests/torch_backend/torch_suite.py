"""Run torch's own tests of torch.distributed over backend meshdist, beside Gloo.

    pip install expecttest
    python tests/torch_backend/torch_suite.py --world-size 2 3 4 --out tests/torch_backend/torch_suite.txt
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
_ROW = "{case:<64} {gloo:<8} {meshdist:<8} {note}"
_ONLY_GLOO = "torch refuses monitored_barrier for backends other than Gloo"
_OTHER_WORDS = "the error comes, and in other words than Gloo's"
# Cases that only Gloo passes, and why.
DIFFERENT = {
    "test_barrier_timeout_full_group": _OTHER_WORDS,
    "test_get_backend": "the name of the backend is another",
    "test_monitored_barrier_gloo": _ONLY_GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": _OTHER_WORDS,
    "test_monitored_barrier_gloo_subgroup": _ONLY_GLOO,
}


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
            # Not spawned, as torch does: importing torch again takes most of the time of a case.
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


def listed(
    world_size: int, match: str, backends: tuple[str, ...], timeout_s: int, *, with_errors: bool
) -> Iterator[str]:
    """Yield the lines of the list for one world size; it ends with what only Gloo passes."""
    tests = load(world_size)
    yield f"{world_size} ranks"
    yield _ROW.format(case="case", gloo="gloo", meshdist="meshdist", note="").rstrip()
    counts: dict[str, Counter[str]] = {backend: Counter() for backend in backends}
    unexplained = []
    for row in run(tests, match, backends, timeout_s):
        for backend in backends:
            counts[backend][row[backend]] += 1
        fails = row.get("meshdist") == "fails"
        known = DIFFERENT.get(row["case"], "")
        yield _ROW.format(**{"gloo": "", "meshdist": "", **row}, note=known if fails else "").rstrip()
        if fails and with_errors:
            print(row["why meshdist"], flush=True)  # not a line of the list
        if fails and not known and row.get("gloo", "passes") == "passes":
            unexplained.append(row["case"])
    for backend in backends:
        yield f"{backend}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts[backend].items()))}"
    yield f"only Gloo passes, for no known reason: {', '.join(unexplained) or 'none'}"


def run_size(size: int, options: argparse.Namespace, lines: Any) -> None:
    """Send the lines of the list for one world size."""
    for line in listed(size, options.match, tuple(options.backends), options.timeout, with_errors=options.errors):
        lines.send(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, nargs="+", default=[3])
    parser.add_argument("--match", default="", help="a pattern of the names of cases")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="write the list to this file as well")
    parser.add_argument("--errors", action="store_true", help="print the errors of backend meshdist")
    options = parser.parse_args()
    torch = import_module("torch")
    import_module("meshdist.torch")  # registers the backend
    # torch decides when its tests are imported which cases a world of this size can run, so each size has a process.
    fork = multiprocessing.get_context("fork")
    sizes = " ".join(map(str, options.world_size))
    lines = [
        f"The tests of torch.distributed that torch {torch.__version__} brings, over Gloo and over backend meshdist:",
        "all cases for CPU tensors that are not skipped with Gloo. Made by",
        f"python tests/torch_backend/torch_suite.py --world-size {sizes}",
    ]
    print("\n".join(lines), flush=True)
    for size in options.world_size:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=run_size, args=(size, options, sender))
        process.start()
        sender.close()
        lines.append("")
        with contextlib.suppress(EOFError):
            while True:
                lines.append(receiver.recv())
                print(lines[-1], flush=True)
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
