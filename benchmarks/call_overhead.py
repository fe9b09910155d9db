"""What a call costs above its plan, and how much of that is the flight recorder: in turns, on one rank.

    python benchmarks/call_overhead.py

Ends with status 1 where an all_reduce takes 0.8 us or more above its plan, or its record 0.3 us.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from timeit import Timer

import numpy as np
from sidebyside import machine, report
from sidebyside.options import positive

import meshdist as dist
from meshdist.core import Record
from meshdist.runtime.flight_recorder import FlightRecorder, clock, place_of

LAYER_US, RECORD_US = 0.8, 0.3
METHOD = """\
The world has one rank, so nobody is waited for. "call" is what a user writes, of one element; "plan" what the engine \
is then asked to do; between them are finding the group and the plan, looking whether the arrays are fit, and keeping \
a record in the flight recorder, which "record" is alone. In turns, {calls} calls each; the shortest of {rounds} \
rounds, which is that of a machine at rest. That the ranks compare their calls costs nothing more: what they post to \
meet has it."""


def recording() -> Callable[[], object]:
    """Return what `ProcessGroup.submit` does to keep a record of a call, and nothing else."""
    keep = FlightRecorder().keep

    def record() -> None:
        code, instruction = place_of(sys._getframe(1))
        now = clock()
        kept = Record(None, 1, now, now, code, instruction)
        keep(kept)
        kept.completed = clock()

    return record


def measure(rounds: int, calls: int) -> dict[str, list[float]]:
    """Return for each call the microseconds of the call, of its plan, and of its record."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x, out = np.zeros(1), np.zeros(1)
    made: dict[str, tuple[str, object, object]] = {
        "all_reduce": ("dist.all_reduce(x)", x, x),
        "broadcast": ("dist.broadcast(x, 0)", x, x),
        "all_gather_into_tensor": ("dist.all_gather_into_tensor(out, x)", x, out),
        "all_gather": ("dist.all_gather(outs, x)", x, [out]),
        "barrier": ("dist.barrier()", None, None),
    }
    found = {}
    for name, (call, send, recv) in made.items():
        names = {"dist": dist, "x": x, "out": out, "outs": [out], "record": recording(), "send": send, "recv": recv}
        exec(call, names)
        names["run"] = next(reversed(dist.group.WORLD.plans.values())).run
        timers = [Timer(statement, globals=names) for statement in (call, "run(send, recv)", "record()")]
        times = [[timer.timeit(calls) / calls for timer in timers] for _ in range(rounds)]
        found[name] = [1e6 * float(time) for time in np.min(times, axis=0)]
    dist.destroy_process_group()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a call costs above its plan.")
    parser.add_argument("--rounds", type=positive, default=500, help="(default: %(default)s)")
    parser.add_argument("--calls", type=positive, default=200, help="in each part of a round (default: %(default)s)")
    report.add_output_options(parser)
    args = parser.parse_args()
    found = measure(args.rounds, args.calls)
    rows = [
        (name, *(f"{time:.2f} us" for time in (call, plan, call - plan, record)))
        for name, (call, plan, record) in found.items()
    ]
    method = METHOD.format(calls=args.calls, rounds=args.rounds)
    table = report.table(("", "call", "plan", "above it", "record"), rows)
    report.publish(args, "A call above its plan", machine.describe({}), f"{method}\n\n{table}", found)
    call, plan, record = found["all_reduce"]
    return 0 if call - plan < LAYER_US and record < RECORD_US else 1


if __name__ == "__main__":
    sys.exit(main())
