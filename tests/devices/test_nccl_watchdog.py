"""The watchdog thread of operations in flight."""

import contextlib
import threading

import pytest

from meshdist.backends.nccl import watchdog
from meshdist.runtime.work import ProgressThread

pytestmark = pytest.mark.timeout(60)
OTHER_S = 0.3


class NothingOnItsWay:
    flights = ()

    def has_works(self):
        return False

    def completed(self):
        return []


def test_streams_that_are_made_at_once_have_one_watchdog_and_it_has_them_all(monkeypatch):
    both = threading.Barrier(2)

    class Together(ProgressThread):
        """Is not made before another one is about to be, if there is to be one."""

        def __init__(self, **how):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(OTHER_S)
            super().__init__(**how)

    monkeypatch.setattr(watchdog, "ProgressThread", Together)
    began, streams = [], [NothingOnItsWay(), NothingOnItsWay()]
    dog = watchdog.Watchdog("dog", lambda stream: None, began.append, lambda: began.append("begun"))
    makers = [threading.Thread(target=dog.watch, args=(stream,)) for stream in streams]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    dog.stop()
    assert began == ["begun"]
    assert set(dog._comm_streams) == set(streams)
