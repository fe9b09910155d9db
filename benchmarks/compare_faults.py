"""What goes wrong in distributed programs, and what three libraries do about it: the table of docs/what-it-survives.md.

    python benchmarks/compare_faults.py --page docs/what-it-survives.md
    python benchmarks/compare_faults.py --faults killed,other_dtype --libraries meshdist,torch

Every fault is a function in `faults_compared/` that all ranks run, with each library in processes of their own. Ranks
write down at once what they see; who has not come back within a deadline is ended from outside, and hangs. Libraries
with timeouts are given five seconds. Ranks are started by hand, so that it is the library that notices a fault and not
its launcher; but mpirun has to start those of MPI, and ends them all where it notices that one is gone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults_compared.fault import Fault
from faults_compared.faults import FAULTS, SECTIONS
from faults_compared.jobs import Job
from faults_compared.story import tell
from sidebyside.libraries import Library, installed
from sidebyside.machine import describe
from sidebyside.options import names_from
from sidebyside.report import on_machine

TITLES = {"torch": "torch.distributed (gloo)", "openmpi": "Open MPI", "meshdist": "meshdist"}
MARKS = re.compile(r"(<!-- faults: begin -->\n).*?(<!-- faults: end -->)", re.DOTALL)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare what libraries do about faults.")
    parser.add_argument("--faults", type=names_from(tuple(FAULTS)), default=list(FAULTS), help="(default: all)")
    parser.add_argument("--libraries", type=names_from(tuple(TITLES)), default=list(TITLES), help="(default: all)")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the tables into this page, between the marks")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was seen to this file")
    return parser.parse_args()


def try_out(name: str, fault: Fault) -> tuple[str, list[dict[str, Any]]]:
    """Return what a library does about a fault, in words and as each rank saw it."""
    if name in fault.senseless:
        return fault.senseless[name], []
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        job = Job(name, fault, Path(folder))
        job.run()
        return tell(job, fault), [{**vars(seen), "began_s": job.fault_s} for seen in job.seen]


def tables(cells: dict[str, dict[str, str]], names: list[str], versions: dict[Library, str]) -> str:
    """Return the sections of the page."""
    command = " ".join(["benchmarks/compare_faults.py", *sys.argv[1:]])
    parts = [f"Measured with `python {command}` {on_machine(describe(versions))}."]
    for title, faults in SECTIONS.items():
        rows = [
            "| " + " | ".join([fault.title, *(cells[fault.name][name] for name in names)]) + " |"
            for fault in faults
            if fault.name in cells
        ]
        if rows:
            head = [
                "| " + " | ".join(["", *(TITLES[name] for name in names)]) + " |",
                "|" + " --- |" * (len(names) + 1),
            ]
            parts.append("\n".join([f"## {title}\n", *head, *rows]))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    args = arguments()
    versions = installed(args.libraries)
    names = [name for name in TITLES if name in {library.name for library in versions}]
    cells: dict[str, dict[str, str]] = {}
    seen: dict[str, dict[str, Any]] = {}
    for fault_name in args.faults:
        cells[fault_name], seen[fault_name] = {}, {}
        for name in names:
            cell, ranks = try_out(name, FAULTS[fault_name])
            cells[fault_name][name], seen[fault_name][name] = cell, {"cell": cell, "ranks": ranks}
            print(f"{fault_name} | {name} | {cell}", flush=True)
    text = tables(cells, names, versions)
    if args.json:
        args.json.write_text(json.dumps(seen, indent=1) + "\n")
    if args.page:
        page = args.page.read_text()
        args.page.write_text(MARKS.sub(lambda marks: f"{marks[1]}\n{text}\n{marks[2]}", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
