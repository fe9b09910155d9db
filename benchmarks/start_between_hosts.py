"""Time the start of a job on two hosts, which are network namespaces of this one, by a meshrun on each. As root.

python benchmarks/start_between_hosts.py
python benchmarks/start_between_hosts.py --per-host 2 --rounds 3 --json out.json
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time

from sidebyside import machine, report
from sidebyside.hosts import ADDRESSES, NoHostsError, two_hosts
from sidebyside.libraries import BENCHMARKS, environment, installed
from sidebyside.options import positive

METHOD = """\
The median of {rounds} rounds, after one that does not count, and in brackets the shortest. From the start of two \
meshruns, one in each namespace, with {per_host} ranks each, until the last rank is back from `init_process_group`; \
from its first all_reduce, which connects the hosts; and until both meshruns have ended. Beside it, in each round, how \
long as many interpreters as there are ranks take to start and import meshdist, all at once: how busy the machine is."""
_PORT = 29400
_END_S = 120.0
_SCRIPT = str(BENCHMARKS / "sidebyside" / "launch_between_hosts.py")
_ROWS = {
    "met": "all ranks have met",
    "called": "the first all_reduce is done",
    "ended": "both meshruns have ended",
    "imports": "as many interpreters that import meshdist",
}


class StartError(RuntimeError):
    """What was to be timed failed; the message shows its output."""


def start_s(names: list[str], per_host: int) -> dict[str, float]:
    """Return how long a job takes to start and to end."""
    where = ["--nnodes", "2", "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}", "--nproc-per-node", str(per_host)]
    meshrun = [sys.executable, "-m", "meshdist.launch.meshrun", *where, _SCRIPT]
    variables = {**environment(), "MESHDIST_SECRET": secrets.token_hex(16)}
    begin = time.time()  # the ranks tell the time of the same clock
    both = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *meshrun],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        outputs = [process.communicate(timeout=_END_S) for process in both]
    except BaseException:
        for process in both:
            process.terminate()  # a meshrun ends its ranks
            process.wait()
        raise
    ended = time.time()
    told = [json.loads(line) for out, _ in outputs for line in out.splitlines()]
    if any(process.returncode for process in both) or len(told) != 2 * per_host:
        raise StartError("a job did not start:\n" + "".join(err for _, err in outputs))
    return {**{key: max(each[key] for each in told) - begin for key in ("met", "called")}, "ended": ended - begin}


def imports_s(num_processes: int) -> float:
    """Return how long it takes until so many processes have imported meshdist."""
    begin = time.time()
    command = [sys.executable, "-c", "import meshdist; meshdist.init_process_group, meshdist.all_reduce"]
    processes = [subprocess.Popen(command, env=environment()) for _ in range(num_processes)]
    statuses = [process.wait(_END_S) for process in processes]
    if any(statuses):
        raise StartError("meshdist cannot be imported")
    return time.time() - begin


def measure(per_host: int, rounds: int) -> dict[str, list[float]]:
    """Return what was measured in each round."""
    times: dict[str, list[float]] = {what: [] for what in _ROWS}
    with two_hosts() as names:
        for number in range(rounds + 1):  # the first fills the caches of files and bytecode
            found = {**start_s(names, per_host), "imports": imports_s(2 * per_host)}
            for what, seconds in found.items():
                times[what].extend([seconds] if number else [])
    return times


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the start of a job on two hosts, by meshrun.")
    add = parser.add_argument
    add("--per-host", type=positive, default=8, metavar="RANKS", help="ranks on each host (default: %(default)s)")
    add("--rounds", type=positive, default=5, help="(default: %(default)s)")
    report.add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    args = parse()
    try:
        times = measure(args.per_host, args.rounds)
    except (NoHostsError, StartError, subprocess.TimeoutExpired) as error:
        print(f"start_between_hosts.py: {error}", file=sys.stderr)
        return 1
    body = METHOD.format(rounds=args.rounds, per_host=args.per_host) + "\n\n"
    rows = [[title, report.median_and_least(times[what])] for what, title in _ROWS.items()]
    body += report.table(["", f"2 x {args.per_host} ranks"], rows)
    report.publish(args, "Start on two hosts", machine.describe(installed(["meshdist"])), body, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
