"""Equal layouts are one object, whichever threads make them: ranks decide by identity whether to send."""

from __future__ import annotations

import sys
import threading

from meshdist.tensor.array_layout import ArrayLayout, Cut


def test_threads_that_make_a_layout_at_once_get_one_object():
    barrier = threading.Barrier(4)
    made = [[] for _ in range(4)]

    def make(found):
        for rows in range(200):
            barrier.wait(60)
            found.append(ArrayLayout.of_cuts((rows + 7,), (2,), (Cut((0,), (rows, 7)),), {}))

    threads = [threading.Thread(target=make, args=(found,)) for found in made]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(one is first for first, *others in zip(*made, strict=True) for one in others)
