"""What the errors of messages say to write instead, to who comes from MPI."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import meshdist as dist


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dist.recv(np.ones(1), src=-1), r"one of \[0\], got -1; leave src out to receive from any rank$"),
        (lambda: dist.send(np.ones(1), dst=-1), r"one of \[0\], got -1$"),
        (lambda: dist.recv(np.ones(1), tag=None), "got None; probe tells the tag of a message, whatever it is$"),
        (lambda: dist.batch_isend_irecv([(dist.isend, np.ones(1), 0)]), r"got tuple; write meshdist\.P2POp\("),
        (lambda: dist.Waitall, r"'Waitall': write `for work in works: work\.wait\(\)`$"),
        (lambda: dist.Sendrecv_replace, r": write `sendrecv\(x\.copy\(\), x, dst, src\)`$"),
    ],
    ids=["any source", "no destination", "any tag", "batch of tuples", "Waitall", "Sendrecv_replace"],
)
def test_what_to_write_instead(call, words):
    def main():
        with pytest.raises((ValueError, TypeError, AttributeError), match=words):
            call()

    dist.run(main, 1)


def test_a_recv_that_times_out_names_the_messages_that_are_there():
    have_sent, is_told = threading.Barrier(3), threading.Event()

    def main():
        rank = dist.get_rank()
        if rank:
            dist.send(np.ones(1), dst=0, tag=3 if rank == 2 else 7)
        have_sent.wait(10)
        if rank:
            assert is_told.wait(10)
            return ""
        with pytest.raises(dist.DistTimeoutError) as failed:
            dist.recv(np.ones(1), src=1, tag=3)
        is_told.set()
        return str(failed.value)

    text = dist.run(main, 3, timeout=0.5)[0]
    assert "a message from rank 1 with tag 3; there is one with tag 7; there is one with this tag from rank 2" in text
