"""Which rank failed first does not depend on the time of day, which jumps and differs between hosts."""

import pytest
from launching import meshrun, write_script

from meshdist.launch.failures import Failure
from meshdist.launch.job_verdict import Report, judge

SCRIPT = """
real = time.time
time.time = lambda: real() + JUMPS[rank]
if rank == 1:
    def end(*_):
        raise RuntimeError("after the first failure")
    signal.signal(signal.SIGTERM, end)
    tell("ready")
    time.sleep(30)
hear("ready")
raise ValueError("the first failure")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "jumps_s",
    [
        pytest.param((0.0, -86_400.0), id="back"),
        pytest.param((86_400.0, 0.0), id="forth", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_is_ended_is_no_failure_whatever_its_clock_says(tmp_path, jumps_s):
    write_script(tmp_path, SCRIPT.replace("JUMPS", repr(jumps_s)))
    status, _, err = meshrun(tmp_path, "-n", "2", "--error-dir", "errors", "script.py")
    assert status == 1
    assert "ValueError: the first failure" in err
    assert "RuntimeError" not in err


def failed(rank, time_s, *, secondary=False):
    return Failure(rank, 100 + rank, "node", 1, time_s, time_s, secondary)


@pytest.mark.parametrize(
    ("reports", "first", "cause"),
    [
        ([Report(0, [failed(0, 5.0)]), Report(1, [failed(1, 900.0)])], 1, (1, 1)),
        ([Report(0, [failed(0, 5.0)]), Report(1, [failed(1, 900.0)])], None, (0, 0)),
        ([Report(0, [failed(0, 5.0)]), Report(1, [failed(1, 9.0, secondary=True)])], 1, (0, 0)),
        ([Report(0), Report(1, [failed(3, 8.0), failed(2, 7.0)])], 0, (1, 2)),
    ],
)
def test_the_cause_is_on_the_host_whose_stop_came_first(reports, first, cause):
    verdict = judge(reports, may_restart=False, first=first)
    assert (verdict.launcher, verdict.cause.rank) == cause
