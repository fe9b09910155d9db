"""The parts that accounts and timelines are made of: axes, clocks, and numbers in words."""

from threading import Thread
from time import perf_counter_ns

import numpy as np

from meshdist.profiler.accounting import Axes
from meshdist.profiler.summary import duration_text
from meshdist.profiler.tables import binary_step, bytes_text, short_bytes_text
from meshdist.profiler.timeline import clock_offset_ns
from meshdist.store import HashStore


def test_axes():
    axes = Axes(np.arange(8).reshape(2, 2, 2), ("dp", "cp", "tp"), rank=0)
    assert (axes.of((0, 1)), axes.of((0, 1, 4, 5)), axes.of((0, 7))) == ("tp", "dp,tp", None)


def test_clock_offset_ns():
    store, hosts = HashStore(), ["here", "there"]
    other = Thread(target=clock_offset_ns, args=(store, 0, hosts))
    other.start()
    late_ns = clock_offset_ns(store, 1, hosts, lambda: perf_counter_ns() - 60 * 10**9)
    other.join()
    assert round(late_ns / 10**9) == 60


def test_duration_text():
    assert (duration_text(1.5), duration_text(0.0123456), duration_text(2e-6), duration_text(0)) == (
        "1.50 s",
        "12.3 ms",
        "2.00 us",
        "0",
    )


def test_bytes_text():
    assert (bytes_text(1000), bytes_text(3 << 20)) == ("1000 B", "3.00 MiB")


def test_short_bytes_text():
    assert (short_bytes_text(0), short_bytes_text(512), short_bytes_text(1 << 20), short_bytes_text(3 << 29)) == (
        "0",
        "512 B",
        "1 MiB",
        "1.5 GiB",
    )


def test_binary_step():
    assert (binary_step(0), binary_step(100), binary_step(7 << 20) == 2 << 20) == (1, 32, True)
