"""What backend meshdist refuses, and what it says then: where, what came, and what works instead."""

from __future__ import annotations

import re
import signal

import pytest
from both_backends import BothBackends, join, run_program
from worlds import needs_linux

pytestmark = [needs_linux, pytest.mark.torch, pytest.mark.timeout(100)]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sparse", r"broadcast on group 'world' \(rank \d of 2\): .*has layout torch.sparse_coo.*to_dense\(\)"),
        ("sparse_rows", r"all_reduce on group 'world' \(rank \d of 2\): .*layout torch.sparse_csr.*to_dense\(\)"),
        ("sparse_product", r"all_reduce on group 'world' .*only by SUM, got ReduceOp.PRODUCT"),
        ("on_meta", r"broadcast on group 'world' \(rank \d of 2\): .* is on meta.*CPU tensors.*\.cpu\(\)"),
        ("two_tensors", r"all_reduce on group 'world' \(rank \d of 2\): expected one tensor.*got 2"),
        ("other_timeout", r"set_timeout on group 'world' .*init_process_group or new_group"),
        ("options", r"backend meshdist has no pg_options, got dict"),
        ("initialize_meshdist", r"already initialized.*destroy_process_group\(\)"),
        ("wrong_shape", r"all_gather_into_tensor on group 'world' \(rank \d of 2\): .*\(3,\)"),
        ("slice_of_a_mesh", r"from_torch: mesh is the slice \('tp',\).*pass the whole one"),
    ],
)
def test_what_is_wrong_on_a_rank_is_said_there(program: str, words: str, both_backends: BothBackends) -> None:
    for kind, text in both_backends.run("meshdist", 2, "refused", program):
        assert kind in ("TypeError", "ValueError", "NotImplementedError")
        assert re.search(words, text), text
    assert both_backends.run("meshdist", 2, "usable") == [True, True]


def test_a_group_has_no_second_backend_for_gpus(both_backends: BothBackends) -> None:
    for sums, text in both_backends.run("meshdist", 2, "with_nccl_for_gpus"):
        assert sums == [2.0, 2.0]
        assert "backend meshdist takes CPU tensors" in text
        assert "torch.distributed.new_group(backend='nccl')" in text


def test_a_fork_is_no_rank(both_backends: BothBackends) -> None:
    for text in both_backends.run("meshdist", 2, "forked"):
        assert "this process was forked from it and is not a rank" in text


@pytest.mark.parametrize("program", ["wait_in_all_reduce", "wait_in_backward", "wait_for_future"])
def test_the_end_of_a_rank_is_an_error_on_the_others(program: str, both_backends: BothBackends) -> None:
    with both_backends.processes(3) as workers:
        workers.start(run_program, "meshdist", both_backends.meeting(), 3, program, ())
        for rank in range(3):
            assert workers.reported(rank) == "ready"
        workers.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            error = workers.outcome(rank)
            assert isinstance(error, RuntimeError)
            other = r"(rank \d .*failed: )?rank 2 .*(killed by SIGKILL|has died)"
            words = rf"all_reduce on group 'world' \(rank \d of 3\): {other}"
            assert re.search(words, str(error))
            assert re.search(r"at torch_programs\.py:\d+", str(error)), "the line of the user, not of torch"


def test_a_callback_that_waits_for_another_call_is_an_error(both_backends: BothBackends) -> None:
    with both_backends.processes(2) as workers:
        workers.start(run_program, "meshdist", both_backends.meeting(), 2, "callback_waits", ())
        text, _ = workers.gather()
        assert "the callback of a Future asks for the Future of another call" in text


def test_calls_that_differ_are_an_error(both_backends: BothBackends) -> None:
    with both_backends.processes(2) as workers:
        workers.start(run_program, "meshdist", both_backends.meeting(), 2, "sizes_differ", ())
        for rank in range(2):
            error = str(workers.outcome(rank))
            assert re.search(r"float32\[[23]\]", error)
            assert re.search(r"at torch_programs\.py:\d+", error), "the line of the user, not of torch"


def test_ranks_that_do_not_come_are_named(both_backends: BothBackends) -> None:
    with both_backends.processes(2) as workers:
        workers.start(join, "meshdist", both_backends.meeting(), 2, 1.0, ranks=[0])
        assert re.search(r"rank 0 of 2.*1 of 2 ranks joined within 1 s; rank 1 ", str(workers.outcome(0)))


def test_both_libraries_have_the_same_ranks_or_say_so(both_backends: BothBackends) -> None:
    with both_backends.processes(2) as workers:
        workers.join()
        workers.start(run_program, "meshdist", both_backends.meeting(), 2, "both_libraries", ())
        assert workers.gather() == [(3.0, 3.0, True), (3.0, 3.0, True)]
    with both_backends.processes(2) as workers:
        workers.join()
        workers.start(run_program, "meshdist", both_backends.meeting(), 1, "usable", (), ranks=[0])
        assert re.search(r"rank 0 of 2 in meshdist, and rank 0 of 1 in torch", str(workers.outcome(0)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("2.12.1", r"needs torch 2\.13 or later, found 2\.12\.1; install"),
        ("1.9.0+cu111", r"needs torch 2\.13 or later, found 1\.9\.0\+cu111; install"),
        ("without Work", r"torch 3\.1\.0 has no Work in torch\.distributed"),
        ("without torch", r"meshdist\.torch needs torch; install torch .* pip install 'torch>="),
    ],
)
def test_a_torch_that_does_not_do_is_refused(change: str, words: str, both_backends: BothBackends) -> None:
    for text in both_backends.run("meshdist", 2, "unsupported", change):
        assert re.search(words, text), text
