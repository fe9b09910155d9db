"""Messages of a rank that has left are received, although the store reports its departure first."""

import numpy as np
import pytest
from until import until

import meshdist as dist
from meshdist.backends.backend_options import withdrawn_key
from meshdist.backends.gloo.tcp.transport import TcpTransport
from meshdist.backends.gloo.tcp.waits import StoreMonitor

pytestmark = pytest.mark.timeout(60)


def read_after_asking(monkeypatch):
    """Have this rank read no more before all others have left and it has asked about one; return whom it asked by."""
    progress, questions = TcpTransport.progress, []

    def is_due(self):
        if not questions:
            others = [rank for rank in range(len(self._options.ranks)) if rank != self._options.rank]
            keys = [withdrawn_key(rank) for rank in others]
            until(lambda: all(self._options.store.check([key]) for key in keys), "the others have left")
        questions.append(self)
        return True

    monkeypatch.setattr(StoreMonitor, "is_due", is_due)
    monkeypatch.setattr(TcpTransport, "progress", lambda self: progress(self) if len(questions) > 1 else None)
    return questions


def calls_and_leaves(kind):
    group, rank, x = dist.new_group(), dist.get_rank(), np.array(1)
    group.all_reduce(x)  # which connects all
    with pytest.MonkeyPatch.context() as monkeypatch:
        questions = None
        if rank == 0:
            questions = read_after_asking(monkeypatch)
            for other in (1, 2):
                group.send(x, other)
        else:
            group.recv(np.array(0), 0)  # so nothing of what follows is there before rank 0 reads no more
        if kind == "collective":
            group.all_reduce(x)
        elif rank == 1:
            group.send(x, 0)
        elif rank == 0:
            group.recv(x, 1)
        if questions is not None:
            assert len(questions) > 1, "it has asked before it read"
    dist.destroy_process_group(group)
    return int(x)


@pytest.mark.parametrize(("kind", "values"), [("collective", [9, 9, 9]), ("message", [3, 3, 3])])
def test_what_was_sent_before_leaving_is_read(worlds, kind, values):
    assert worlds.world("gloo-tcp", 3).run(calls_and_leaves, kind) == values
