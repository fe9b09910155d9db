"""Profiles: which calls are recorded, how ranks are merged, what the table and the trace say of them."""

import contextlib
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
import pytest
from figures import unreadable

import meshdist as dist
from meshdist.profiler.call_matching import pairs, with_waits
from meshdist.profiler.event import Event, Track
from meshdist.profiler.summary import fitting, rows
from meshdist.profiler.tables import text_width
from meshdist.profiler.timeline import Timeline, clock_offset_ns
from meshdist.profiler.timeline_plot import colours_of

pytestmark = pytest.mark.timeout(60)
MS = 10**6


def make_calls():
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("ring",))
    x = np.zeros(100)
    dist.barrier()  # before the block
    with dist.profile() as p:
        dist.all_reduce(x)
        mesh.all_gather_into_tensor(np.empty(100 * size), x)
        dist.all_gather([np.empty(100) for _ in range(size)], x)
        dist.new_group(range(size), group_desc="all of them").broadcast(x, src=0)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.all_gather_object([None] * size, rank)
        mesh.isend(x[:10], dst=(rank + 1) % size, tag=3)
        dist.recv(np.empty(10), src=(rank - 1) % size, tag=3)
        with dist.coalescing_manager():
            for half in np.split(x, 2):
                dist.all_reduce(half)
    dist.barrier()  # after the block
    return p.events, p.merged(dst=size - 1)


def profile_axis_of_all_ranks():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with dist.profile() as p:
        mesh["dp"].all_reduce(np.zeros(100))
        dist.all_reduce(np.zeros(100))
    return [event.group for event in p.events]


def test_an_axis_of_all_ranks_is_in_the_rows_of_the_world():
    assert dist.run(profile_axis_of_all_ranks, 2) == [["world", "world"]] * 2


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_every_call_of_the_block_is_an_event(worlds, backend):
    if backend == "gloo" and sys.platform != "linux":
        pytest.skip("backend gloo shares memory on Linux only")
    results = worlds.world(backend, 3).run(make_calls)
    for rank, (events, _) in enumerate(results):
        assert [(event.name, event.nbytes) for event in events] == [
            ("all_reduce", 800),
            ("all_gather_into_tensor", 2400),
            ("all_gather", 2400),
            ("broadcast", 800),
            ("all_reduce", 800),
            ("all_gather_object (sizes)", 24),
            ("all_gather_object", events[6].nbytes),
            ("isend", 80),
            ("recv", 80),
            ("all_reduce_coalesced", 800),
        ]
        assert [event.name for event in events if event.is_async] == ["all_reduce", "isend"]
        assert [event.peer for event in events if event.is_message] == [(rank + 1) % 3, (rank - 1) % 3]
        assert {event.site.rpartition(":")[0] for event in events} == {"test_profile.py"}
        assert {event.group for event in events} == {events[0].group, "all of them"}
        for event in events:
            assert event.begin_ns <= event.end_ns
            assert event.held_ns >= 0
            assert not event.failed
    assert [merged is None for _, merged in results] == [True, True, False]
    timeline = results[2][1]
    assert [track.rank for track in timeline.tracks] == [0, 1, 2]
    for track, (events, _) in zip(timeline.tracks, results, strict=True):
        assert [event.name for event in track.events] == [event.name for event in events]
        assert all(event.wait_ns is not None for event in track.events)
        sync = [event for event in track.events if not event.is_async]  # who waited for a Work also had to wake up
        assert all(0 <= event.wait_ns <= event.end_ns - event.begin_ns for event in sync)
    check_trace(timeline.chrome_trace(), num_messages=3)


def check_trace(trace, num_messages):
    """Assert that slices of a line contain each other or are apart, and that arrows begin and end inside of slices."""
    assert json.loads(json.dumps(trace)) == trace
    lines = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in lines.values():
        slices.sort(key=lambda ends: (ends[0], -ends[1]))
        for (_, end), (begin, other_end) in itertools.pairwise(slices):
            assert begin >= end - 1e-3 or other_end <= end + 1e-3
    arrows = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
            slices = lines[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in slices)
    assert len(arrows) == num_messages
    assert all(arrow.keys() == {"s", "f"} for arrow in arrows.values())


def names_of_lines(trace):
    return {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_the_trace_is_a_file(tmp_path):
    def main():
        with dist.profile() as p:
            dist.all_reduce(np.zeros(3))
        p.export_chrome_trace(tmp_path / f"{dist.get_rank()}.json")

    dist.run(main, 2)
    trace = json.loads((tmp_path / "1.json").read_text())
    check_trace(trace, num_messages=0)
    assert names_of_lines(trace) == {20: "rank 1"}


def test_what_goes_wrong_is_recorded_and_the_arguments_that_are_refused_are_not():
    def main():
        with dist.profile() as p:
            with pytest.raises(TypeError):
                dist.all_reduce("none")
            with pytest.raises(dist.DistError):
                dist.all_reduce(np.zeros(3, "f4" if dist.get_rank() else "i4"))
        return [(event.name, event.failed) for event in p.events]

    assert dist.run(main, 2) == [[("all_reduce", True)]] * 2


def test_a_block_that_raises_ends_recording():
    def main():
        profiles = []

        def block():
            with dist.profile() as p:
                profiles.append(p)
                dist.barrier()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            block()
        dist.barrier()
        return [event.name for event in profiles[0].events]

    assert dist.run(main, 2) == [["barrier"]] * 2


def test_only_so_many_calls_are_kept():
    def main():
        with dist.profile(limit=2) as p:
            for _ in range(5):
                dist.barrier()
        return len(p.events), str(p).splitlines()[-1]

    assert dist.run(main, 1) == [(2, "rank 0: 3 further calls were not recorded")]


def test_arrays_are_not_kept():
    def main():
        with dist.profile() as p:
            arrays = [np.zeros(4), np.zeros(4)]
            dist.all_reduce(arrays[0])
            dist.all_reduce(arrays[1], async_op=True).wait()
            dist.barrier(async_op=True).wait()  # the progress thread keeps the last call
            gone = [weakref.ref(array) for array in arrays]
            arrays.clear()
            gc.collect()
            return [ref() is None for ref in gone], len(p.events)

    assert dist.run(main, 2) == [([True, True], 3)] * 2


def test_profiles_may_be_inside_of_each_other():
    def main():
        with dist.profile() as outer:
            dist.barrier()
            with dist.profile() as inner:
                dist.barrier()
            dist.barrier()
        return len(outer.events), len(inner.events)

    assert dist.run(main, 2) == [(3, 1)] * 2


def test_where_there_is_no_world_it_says_so():
    with pytest.raises(ValueError, match="init_process_group"), dist.profile():
        pass


@pytest.mark.parametrize(("limit", "error"), [(-1, ValueError), ("many", TypeError)])
def test_a_wrong_limit_is_refused(limit, error):
    with dist.dry_run(1, 0):
        dist.init_process_group()
        with pytest.raises(error), dist.profile(limit):
            pass


def test_where_cupy_is_loaded_calls_are_nvtx_ranges(monkeypatch):
    said = []
    nvtx = types.SimpleNamespace(RangePush=said.append, RangePop=lambda: said.append("end"))
    stand_in = types.SimpleNamespace(cuda=types.SimpleNamespace(nvtx=nvtx))
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    with dist.dry_run(4, 0):
        dist.init_process_group()
        x = np.zeros(3)
        with dist.profile():
            dist.broadcast(x, src=0)
            with pytest.raises(TypeError):
                dist.all_reduce("none")
        dist.all_reduce(x)
    assert said == ["broadcast world", "end", "all_reduce world", "end"]


def test_clocks_of_other_hosts_are_found_out():
    hosts = ["a", "b", "a", "b", "c"]
    behind_s = {"a": 0, "b": -1000, "c": 5}
    store, found = dist.HashStore(), {}

    def measure(rank):
        ahead_ns = -behind_s[hosts[rank]] * 10**9
        found[rank] = clock_offset_ns(store, rank, hosts, lambda: perf_counter_ns() + ahead_ns)

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [round(found[rank] / 10**9) for rank in range(5)] == [behind_s[host] for host in hosts]
    assert found[1] == found[3]
    assert found[0] == found[2] == 0


# Of calls that are made up, what is found is known.


def made_up(name, begin_ms, end_ms, key, peer=None, group="tp", is_async=False):
    begin, end = round(begin_ms * MS), round(end_ms * MS)
    held = 1 * MS if is_async else end - begin
    wait = 0 if is_async else None
    return Event(name, group, (0, 1, 2), begin, end, held, wait, 1000, "x.py:1", is_async, False, peer, 0, ("g", key))


def timeline():
    tracks = [
        Track(0, "here", 0, 100 * MS, [made_up("all_reduce", 10, 31, 0), made_up("recv", 40, 70, -1, peer=1)]),
        Track(
            1,
            "here",
            0,
            100 * MS,
            [
                made_up("all_reduce", 20, 31, 0),
                made_up("isend", 60, 71, -1, peer=0, is_async=True),
                made_up("isend", 65, 72, -1, peer=2, is_async=True),
            ],
        ),
        Track(2, "there", 0, 100 * MS, [made_up("all_reduce", 30, 31, 0), made_up("recv", 80, 81, -1, peer=1)]),
    ]
    return Timeline(with_waits(tracks))


def test_who_waited_for_whom():
    waits = [(event.wait_ns / MS, event.waits_for) for event in timeline()]
    assert waits == [(20, 2), (20, 1), (10, 2), (0, None), (0, None), (0, None), (0, None)]
    slowest = timeline().slowest()
    assert (slowest.rank, slowest.wait_s, slowest.calls) == (2, pytest.approx(0.03), 2)


def test_an_async_call_waits_whatever_its_rank_does_meanwhile():
    calls = [made_up("all_reduce", begin, end, 0, is_async=True) for begin, end in ((10, 60), (50, 60), (20, 60))]
    tracks = with_waits([Track(rank, "here", 0, 100 * MS, [call]) for rank, call in enumerate(calls)])
    found = [(call.waits_for, call.late_ns / MS) for track in tracks for call in track.events]
    assert found == [(1, 40), (None, 0), (1, 30)]
    assert Timeline(tracks).slowest() is None  # their ranks were not blocked
    blocked = [replace(track, events=[replace(track.events[0], wait_ns=15 * MS)]) for track in tracks]
    slowest = Timeline(blocked).slowest()
    assert (slowest.rank, slowest.wait_s, slowest.calls) == (1, pytest.approx(0.03), 2)


def test_the_bar_of_an_async_call_is_hatched_while_it_waits():
    calls = [made_up("all_reduce", begin, 60, 0, is_async=True) for begin in (10, 50)]
    tracks = with_waits([Track(rank, "here", 0, 100 * MS, [call]) for rank, call in enumerate(calls)])
    hatched = [patch for patch in Timeline(tracks).plot().patches if patch.get_hatch()]
    assert [round(patch.get_width()) for patch in hatched] == [40]


def test_a_sender_that_is_still_there_waited_for_the_receiver():
    def sent(end_ms):
        sender = Track(0, "here", 0, 100 * MS, [made_up("send", 10, end_ms, -1, peer=1)])
        receiver = Track(1, "here", 0, 100 * MS, [made_up("recv", 50, 60, -1, peer=0)])
        return with_waits([sender, receiver])[0].events[0]

    assert (sent(61).wait_ns, sent(61).waits_for) == (40 * MS, 1)
    assert (sent(12).wait_ns, sent(12).waits_for) == (0, None)  # it was buffered


def test_the_table(terminal):
    terminal(200)
    assert str(timeline()).splitlines() == [
        "group  call        calls   bytes     time  waiting  share     mean  longest      bytes/s",
        "tp     all_reduce      1  1000 B  11.0 ms  10.0 ms  11.0%  11.0 ms  21.0 ms  88.78 KiB/s",
        "tp     recv          0.7   667 B  10.3 ms  6.67 ms  10.3%  15.5 ms  30.0 ms  63.00 KiB/s",
        "tp     isend         0.7   667 B   667 us        0   0.7%  1.00 ms  11.0 ms    977 KiB/s",
        "in communication: 22.0% of 100 ms, averaged over 3 ranks; least on rank 2 (2.0%), most on rank 0 (51.0%)",
        "slowest: rank 2; the others waited 30.0 ms for it, in 2 of their calls",
    ]


@pytest.mark.parametrize("is_warm", [False, True])
def test_the_set_up_of_groups_is_told(is_warm):
    def main():
        group = dist.new_group()
        if is_warm:
            group.barrier()
        with dist.profile() as p:
            for _ in range(2):
                group.all_reduce(np.ones(2))
        return [event.sets_up for event in p.events]

    assert dist.run(main, 2) == [[not is_warm, False]] * 2


def test_much_set_up_has_a_line():
    events = [replace(made_up("all_reduce", 0, 40, 0), sets_up=True), made_up("all_reduce", 50, 60, 1)]
    lines = str(Timeline([Track(0, "here", 0, 100 * MS, events)])).splitlines()
    assert lines[-1].startswith("of that, set-up of groups in their first calls: tp 40.0 ms; to exclude it")


def test_set_up_is_neither_waiting_nor_slowness():
    def track(rank, *calls):
        events = [made_up("all_reduce", begin, end, key) for key, (begin, end) in enumerate(calls)]
        return Track(rank, "here", 0, 100 * MS, [replace(events[0], sets_up=True), *events[1:]])

    # Rank 2 comes 40 ms late to the first call, rank 1 comes 3 ms late to the others.
    late, others = track(2, (40, 50), (50, 55), (60, 65)), track(0, (0, 50), (50, 55), (60, 65))
    found = Timeline(with_waits([others, track(1, (0, 50), (53, 55), (63, 65)), late]))
    slowest = found.slowest()
    assert (slowest.rank, slowest.wait_s, slowest.calls) == (1, pytest.approx(0.012), 4)
    assert found.totals()["tp"]["all_reduce"].wait_s == pytest.approx(0.012)


def test_the_trace_of_what_overlaps():
    trace = timeline().chrome_trace()
    check_trace(trace, num_messages=2)
    # Viewers take numbers of threads as those of the whole system, and the process's own for its main thread.
    assert names_of_lines(trace) == {
        10: "rank 0 on here",
        20: "rank 1 on here",
        21: "rank 1, async 1",
        22: "rank 1, async 2",
        30: "rank 2 on there",
    }
    assert {event["pid"] for event in trace["traceEvents"]} == {1}
    named = [(event["tid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    assert named == [
        (10, "all_reduce tp"),
        (10, "waits for rank 2"),
        (10, "recv tp"),
        (10, "waits for rank 1"),
        (20, "all_reduce tp"),
        (20, "waits for rank 2"),
        (21, "isend tp"),
        (22, "isend tp"),
        (30, "all_reduce tp"),
        (30, "recv tp"),
    ]


def test_show_draws_a_plot(capsys):
    pytest.importorskip("matplotlib")
    assert timeline().show("plot").get_title() == timeline().plot().get_title()
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="form must be 'text' or 'plot', got 'html'"):
        timeline().show("html")


def test_show_prints_the_same_without_rich(monkeypatch, capsys, terminal):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal(200)
    timeline().show()
    assert capsys.readouterr().out == f"{timeline()}\n"


def test_show_prints_a_table_with_rich(capsys, terminal):
    pytest.importorskip("rich", reason="rich is not installed")
    terminal(200)
    timeline().show()
    printed = capsys.readouterr().out
    assert "all_reduce" in printed
    assert "slowest: rank 2" in printed


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_of_80_columns_gets_every_number(monkeypatch, capsys, terminal, with_rich):
    if with_rich:
        pytest.importorskip("rich", reason="rich is not installed")
        monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich writes as to a terminal
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal(80)
    timeline().show()
    printed = re.sub("\x1b.*?m", "", capsys.readouterr().out)
    head, *table = rows(timeline().tracks, timeline().totals())
    numbers = [cell for row in table for cell in row[2:] if cell]
    assert len(numbers) > 10
    assert [cell for cell in numbers if cell not in printed] == []
    assert all(name in printed for name in head)
    assert max(map(len, printed.splitlines()[: 2 * len(table)])) <= 80


def test_print_for_a_terminal_of_80_columns(terminal):
    terminal(80)
    printed = str(timeline())
    times, volume, said = printed.split("\n\n")
    assert times.split("\n")[0].split() == ["group", "call", "calls", "time", "waiting", "share", "mean", "longest"]
    assert volume.split("\n")[0].split() == ["group", "call", "calls", "bytes", "bytes/s"]
    assert said.split("\n")[:2] == [
        "in communication: 22.0% of 100 ms, averaged over 3 ranks; least on rank 2",
        "  (2.0%), most on rank 0 (51.0%)",
    ]


@pytest.mark.parametrize("length", [15, 25])
def test_long_names_share_the_width_with_as_many_columns_as_fit(length):
    head, row, *_ = rows(timeline().tracks, timeline().totals())
    table = [head, ("g" * length, "all_gather_into_tensor", *row[2:])]
    parts = fitting(table, 80, text_width)
    assert all(text_width(part) <= 80 for part in parts)
    assert [part[0][:2] for part in parts] == [head[:2]] * len(parts)
    assert sorted(name for part in parts for name in part[0][2:]) == sorted(head[2:])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_without_a_size_gets_lines(with_rich):
    program = """
import sys, meshdist as dist, numpy as np
if sys.argv[1] == "False":
    sys.modules["rich.console"] = None
from meshdist.parallel import one_f_one_b
with dist.dry_run(4):
    with dist.profile() as p:
        dist.all_reduce(np.zeros(8))
    p.timeline.show()
    dist.init_device_mesh("cpu", (2, 2)).show()
one_f_one_b(2, 2).show()
"""
    ours, theirs = os.openpty()  # of 0 x 0
    with open(ours, "rb", buffering=0) as terminal:
        environment = {**os.environ, "COLUMNS": "", "LINES": "", "TERM": "dumb"}
        command = [sys.executable, "-c", program, str(with_rich)]
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        printed = b""
        with contextlib.suppress(OSError):  # Linux: the program has ended
            while chunk := terminal.read(1 << 16):
                printed += chunk
        assert process.wait(timeout=30) == 0, printed.decode()
    lines = printed.decode().splitlines()
    for start in ("mesh (2, 2)", "rank 1", "in communication"):
        assert any(line.startswith(start) for line in lines), lines
    assert any("all_reduce" in line for line in lines)


def test_the_picture():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    ax = timeline().plot(Figure(figsize=(8, 5)).subplots())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "all_reduce",
        "recv",
        "isend",
        "waiting for another rank",
        "async call (outlined, below the sync calls)",
        "message",
    ]
    assert ax.get_xlabel() == "time (ms)"
    arrows = [text for text in ax.texts if not text.get_text()]
    assert len(arrows) == 2
    assert min(arrow.get_zorder() for arrow in arrows) > max(bar.get_zorder() for bar in ax.patches)
    written = [text for text in ax.texts if text.get_text()]
    assert {text.get_text() for text in written[:2]} == {"all_reduce", "recv"}  # of rank 0
    assert len({text.get_fontsize() for text in written}) == 1
    assert len(written) == len(list(timeline()))
    assert unreadable(ax.figure) == []
    # The recv of rank 2 takes 1 ms: its name is beside the bar.
    bars = [patch.get_window_extent() for patch in ax.patches if patch.get_width() == pytest.approx(1)]
    assert sum(0 <= written[-1].get_window_extent().x0 - bar.x1 < 5 for bar in bars) == 1


def test_a_call_has_one_label_of_one_size():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    def written(*durations):
        """Return the labels of all_reduce calls that follow each other closely; another group has a barrier."""
        calls, begin = [made_up("barrier", 0, 12, 0, group="world")], 12
        for number, duration in enumerate(durations):
            calls.append(made_up("all_reduce", begin, begin + duration, number, group="dp"))
            begin += duration
        ax = Timeline([Track(0, "here", 0, 100 * MS, calls)]).plot(Figure(figsize=(10, 4)).subplots())
        names = [text for text in ax.texts if text.get_text()]
        assert len({text.get_fontsize() for text in names}) == 1
        return {text.get_text() for text in names if "all_reduce" in text.get_text()}

    assert written(30, 9, 20) == {"all_reduce (dp)"}
    assert written(9, 9, 9, 20, 9, 9) == {"all_reduce"}


def test_no_hatching_crosses_a_name():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    ax = timeline().plot(Figure().subplots())
    ax.figure.draw_without_rendering()
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    names = [text for text in ax.texts if text.get_text()]
    crossed = [
        name for name in names if any(name.get_window_extent().overlaps(patch.get_window_extent()) for patch in hatched)
    ]
    assert crossed
    for name in crossed:
        ground, box = name.get_bbox_patch(), name.get_window_extent()
        assert ground.get_facecolor()[3] == 1
        assert ground.get_window_extent().x0 <= box.x0 < box.x1 <= ground.get_window_extent().x1


def test_names_of_short_calls_are_written_where_there_is_room():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    def written(*begins):
        calls = [made_up("all_reduce", begin, begin + 1, number) for number, begin in enumerate(begins)]
        ax = Timeline([Track(0, "here", 0, 100 * MS, calls)]).plot(Figure(figsize=(10, 4)).subplots())
        assert unreadable(ax.figure) == []
        return len([text for text in ax.texts if text.get_text()])

    assert written(20, 60) == 2
    assert written(99) == 1  # before the bar
    assert written(20, 22, 24, 26) == 2  # before the first and after the last one
    assert written(*range(0, 100, 2)) == 0


def test_no_arrow_crosses_a_name():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure
    from matplotlib.path import Path

    # Messages from rank 0 to rank 2 pass the calls of rank 1: to the right of a short one, and through a long one.
    sends = [made_up("send", begin, begin + 1, -1, peer=2) for begin in (10, 50)]
    recvs = [made_up("recv", begin, begin + 1, -1, peer=0) for begin in (30, 70)]
    between = [made_up("broadcast", 18, 18.5, 0), made_up("all_reduce", 45, 75, 1)]
    tracks = [Track(rank, "here", 0, 100 * MS, calls) for rank, calls in enumerate((sends, between, recvs))]

    def names_and_crossed(arrows):
        ax = Timeline(tracks).plot(Figure(figsize=(10, 3)).subplots(), arrows=arrows)
        ax.figure.draw_without_rendering()
        names = [text for text in ax.texts if text.get_text()]
        lines = [Path(ax.transData.transform([text.xyann, text.xy])) for text in ax.texts if not text.get_text()]
        assert len(lines) == arrows
        crossed = [
            name.get_text()
            for name in names
            if any(line.intersects_bbox(name.get_window_extent(), filled=False) for line in lines)
        ]
        return sorted(name.get_text() for name in names), crossed

    everything = ["all_reduce", "broadcast", "recv", "recv", "send", "send"]
    assert names_and_crossed(0) == (everything, [])
    assert names_and_crossed(2) == (everything, [])


@pytest.mark.parametrize(("arrows", "told"), [(0, []), (1, ["message (the longest 1 of 2)"]), (2, ["message"])])
def test_the_longest_messages_have_arrows(arrows, told):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    ax = timeline().plot(Figure().subplots(), arrows=arrows)
    assert len([arrow for arrow in ax.texts if not arrow.get_text()]) == arrows
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [text for text in texts if text.startswith("message")] == told


def test_the_picture_begins_after_the_set_up_of_groups():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    def drawn(*calls):
        events = [replace(made_up("all_reduce", *call), sets_up=sets_up) for *call, sets_up in calls]
        ax = Timeline([Track(0, "here", 0, 100 * MS, events)]).plot(Figure().subplots())
        return ax.get_xlim()[0], ax.get_xlabel(), ax.get_title("left").partition(", ")[2]

    assert drawn((0, 80, 0, True), (85, 86, 1, False)) == (
        80,
        "time (ms); left out: the first 80.0 ms, in which groups are set up",
        "20.0 ms; 5% of the time in communication",
    )
    # A group that is set up later, and a set-up that takes less than half of the picture, are shown.
    whole = "time (ms)", "100 ms; 81% of the time in communication"
    assert drawn((0, 1, 0, False), (5, 85, 1, True)) == (0, *whole)
    assert drawn((0, 20, 0, True), (39, 100, 1, False)) == (0, *whole)


def test_the_name_of_a_call_is_in_its_visible_part():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    first = [replace(made_up("all_reduce", 0, 80, 0), sets_up=True), made_up("all_reduce", 99, 100, 1)]
    second = [made_up("all_reduce", 60, 90, 0)]
    tracks = [Track(rank, "here", 0, 100 * MS, calls) for rank, calls in enumerate((first, second))]
    ax = Timeline(tracks).plot(Figure(figsize=(10, 2)).subplots())
    assert ax.get_xlim()[0] == 80
    _, name = [text for text in ax.texts if text.get_text()]
    name_box, visible = name.get_window_extent(), ax.get_window_extent()
    assert visible.x0 <= name_box.x0
    assert name_box.x1 <= visible.x0 + visible.width / 2  # the call ends at 90 of 80 to 100


def test_the_shortest_calls_can_be_seen():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    calls = [made_up("all_reduce", 10, 10.001, 0), made_up("all_reduce", 50, 90, 1)]
    ax = Timeline([Track(0, "here", 0, 100 * MS, calls)]).plot(Figure(figsize=(10, 2)).subplots())
    widths = [patch.get_window_extent().width for patch in ax.patches if patch.get_width() < 50]
    assert min(widths) >= 1.5  # pixels


def test_many_kinds_of_calls_share_colours_by_name():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    calls = [made_up(f"call{k % 10}", k, k + 1 + k / 100, k, group=f"axis{k // 10}") for k in range(20)]
    ax = Timeline([Track(0, "here", 0, 22 * MS, calls)]).plot(Figure().subplots())
    *names, others = [text.get_text() for text in ax.get_legend().get_texts()]
    assert (names, others) == ([f"call{k}" for k in range(2, 10)], "other calls")


def test_a_call_has_the_same_colour_in_every_picture():
    ring = colours_of(["isend", "irecv", "all_reduce"])
    training = colours_of(["barrier", "all_reduce", "all_gather_into_tensor", "my_call", "irecv"])
    assert {name: training[name] for name in ("irecv", "all_reduce")} == {
        name: ring[name] for name in ("irecv", "all_reduce")
    }
    assert ring == colours_of(["all_reduce", "irecv", "isend"])
    axes = colours_of(["all_reduce (tp)", "all_reduce (dp)", "barrier (dp)"])
    assert axes["all_reduce (dp)"] == ring["all_reduce"]
    for chosen in (ring, training, axes):
        assert len({*chosen.values()}) == len(chosen)


def exchanges():
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    given, taken, block = np.zeros(10), np.zeros(10), np.zeros((3, 5))
    with dist.profile() as p:
        mesh.shift(given)
        mesh.halo_exchange(block)
        source = mesh.sendrecv(given, taken, (rank + 1) % size, None, tag=2)
        dist.barrier()
    return source, p.merged()


def test_an_exchange_is_one_call_by_the_name_that_the_user_called():
    results = dist.run(exchanges, 3)
    assert [source for source, _ in results] == [2, 0, 1]
    timeline = results[0][1]
    calls = [[(event.name, event.nbytes) for event in track.events] for track in timeline.tracks]
    assert calls[1] == [("shift", 80), ("halo_exchange", 80), ("sendrecv", 80), ("barrier", 0)]
    assert [name for name, _ in calls[0]] == [name for name, _ in calls[2]] == [name for name, _ in calls[1]]
    parts = [[(part.name, part.peer) for part in event.parts] for event in timeline.tracks[1].events]
    passed_on = [("isend", 2), ("irecv", 0)]
    assert parts == [passed_on, [("isend", 0), ("isend", 2), ("irecv", 2), ("irecv", 0)], passed_on, []]
    assert len(pairs(timeline.tracks)) == 3 + 4 + 3
    assert all(event.wait_ns is not None and not event.is_async for event in timeline)
    assert {len(row) for row in timeline.totals().values()} == {4}
    check_trace(timeline.chrome_trace(), num_messages=10)


def receive_twice():
    with dist.profile() as p:
        for _ in range(2):
            work = dist.irecv(np.zeros(10), src=0)
            dist.isend(np.zeros(10), dst=0)
            work.wait()
    return [(event.name, event.is_async) for event in p.events]


def test_an_irecv_that_is_posted_later_is_async_too():
    assert dist.run(receive_twice, 1) == [[("irecv", True), ("isend", True)] * 2]


def test_an_exchange_waits_for_the_last_sender():
    def exchange(rank, begin_ms, end_ms):
        whole = made_up("shift", begin_ms, end_ms, -1)
        sent, received = (replace(whole, name="isend", peer=1 - rank), replace(whole, name="irecv", peer=1 - rank))
        return Track(rank, "here", 0, 100 * MS, [replace(whole, parts=(sent, received))])

    first, last = with_waits([exchange(0, 10, 31), exchange(1, 30, 31)])
    assert (first.events[0].wait_ns, first.events[0].waits_for) == (20 * MS, 1)
    assert (last.events[0].wait_ns, last.events[0].waits_for) == (0, None)


def test_a_notebook_shows_a_table():
    assert timeline()._repr_html_().startswith("<table><tr><th")


def test_the_repr_of_a_timeline_is_one_line():
    calls = [made_up("all_reduce", 0, 11, 0)]
    one = repr(Timeline(with_waits([Track(0, "here", 0, 22 * MS, calls)])))
    assert one == "<Timeline: 1 call of 1 rank in 0.022 s, 50% of it in calls; print it for the table>"
    assert repr(timeline()).startswith("<Timeline: 7 calls of 3 ranks in 0.1 s, ")

    def of_a_rank():
        with dist.profile() as p:
            dist.barrier()
        return repr(p), repr(p.timeline)

    for profile, of_its_timeline in dist.run(of_a_rank, 2):
        assert re.fullmatch(
            r"<Profile: 1 call of 1 rank in \S+ s, \d+% of it in calls; print it for the table>", profile
        )
        assert profile.replace("Profile", "Timeline") == of_its_timeline
