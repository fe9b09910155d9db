"""What a call costs above its plan, and how much of that is the flight recorder: in turns, on one rank.

    python benchmarks/call_overhead.py

The world has one rank, so nobody is waited for. "call" is what a user writes, "plan" what the engine is then
asked to do, which is next to nothing here; the difference is what meshdist's own layers take of every call: finding the
group and the plan, looking whether the arrays are fit, and keeping a record. "record" is that last part alone. Printed
are the shortest rounds, those of a machine at rest. That calls are compared by the ranks costs nothing more: what they
post to meet holds it.
"""

import argparse
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np

import meshdist as dist
from meshdist.debug.flight_recorder import COMPLETED, FlightRecorder, clock, place_of


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call."""
    began = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - began) / calls


def recording() -> Callable[[], object]:
    """Return what `ProcessGroup.submit` does to keep a record of a call, and nothing else."""
    keep = FlightRecorder().keep

    def record() -> None:
        code, instruction = place_of(sys._getframe(1))
        now = clock()
        kept = [None, 1, now, now, 0, code, instruction]
        keep(kept)
        kept[COMPLETED] = clock()

    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a call costs above its plan.")
    parser.add_argument("--rounds", type=int, default=500, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="in each part of a round (default: %(default)s)")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x, out = np.zeros(1), np.zeros(1)
    calls: dict[str, tuple[Callable[[], object], object, object]] = {
        "all_reduce": (lambda: dist.all_reduce(x), x, x),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(out, x), x, out),
    }
    record = recording()
    for name, (call, send, recv) in calls.items():
        call()
        plan = next(reversed(dist.group.WORLD._plans.values()))

        def run(plan=plan, send=send, recv=recv) -> None:
            plan.run(send, recv)

        rounds = [[seconds_per_call(timed, args.calls) for timed in (call, run, record)] for _ in range(args.rounds)]
        whole, planned, recorded = 1e6 * np.min(rounds, axis=0)
        print(
            f"{name:24} call {whole:.2f} us, plan {planned:.2f} us: {whole - planned:.2f} us above it;"
            f" record {recorded:.2f} us"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
