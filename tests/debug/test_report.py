"""python -m meshdist.debug report: a page from the files of the ranks."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from sample_states import NOW_S, by_rank, data, record, waiting

import meshdist as dist
from meshdist.debug.__main__ import main
from meshdist.debug.report import ends_on_record, read_dumps, report_on
from meshdist.debug.states import parse_state
from meshdist.debug.wait_drawing import draw_waits, ranks_alike
from meshdist.debug.wait_graph import who_waits

pytestmark = pytest.mark.timeout(60)
WORLD = {"world": [0, 1, 2]}


def write(directory, *states):
    for state in states:
        (directory / f"rank_{state['rank']}.json").write_text(json.dumps(state))


def page_of(tmp_path, capsys, *states):
    write(tmp_path, *states)
    assert main(["report", str(tmp_path)]) == 0
    return capsys.readouterr().out


def test_the_page_names_the_call_in_which_ranks_disagree(tmp_path, capsys):
    page = page_of(
        tmp_path,
        capsys,
        data(0, [record("world", 1, 9.0), record("world", 2, 5.0, "all_reduce(float32[4], op=sum)")], WORLD, size=3),
        data(1, [record("world", 1, 9.0), record("world", 2, 5.0, "all_reduce(float32[8], op=sum)")], WORLD, size=3),
        data(2, [record("world", 1, 9.0), record("world", 2, 5.0, "all_reduce(float32[4], op=sum)")], WORLD, size=3),
    )
    assert "all 3 ranks, on host node1" in page
    assert "call 2 on 'world':" in page
    assert "ranks 0, 2: all_reduce(float32[4], op=sum) at /home/me/train.py:20" in page
    assert "rank 1: all_reduce(float32[8], op=sum)" in page


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes that raise")
def test_a_reader_that_has_gone_ends_the_report_quietly(tmp_path):
    write(tmp_path, data(0, [record("world", 1, 9.0)], WORLD, size=3))
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [sys.executable, "-u", "-m", "meshdist.debug", "report", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=environment, stdout=write_fd, stderr=subprocess.PIPE, timeout=50)
    finally:
        os.close(write_fd)
    assert done.stderr == b""


def test_a_terminal_gets_lines_that_fit(tmp_path, capsys, terminal):
    ranks = [
        data(0, [record("world", 2, 5.0, "all_reduce(float32[4], op=sum)")], WORLD, size=2),
        data(1, [record("world", 2, 5.0, "all_reduce(float32[8], op=sum)")], WORLD, size=2),
    ]
    wide = page_of(tmp_path, capsys, *ranks)
    terminal(60)
    page = page_of(tmp_path, capsys, *ranks)
    assert max(map(len, page.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    assert page.split() == wide.split()


def test_the_page_names_where_ranks_call_their_groups_in_different_orders(tmp_path, capsys):
    groups = {"world": [0, 1], "a": [0, 1], "b": [0, 1]}
    page = page_of(
        tmp_path,
        capsys,
        data(0, [record("world", 1, 9.0), waiting("a", 1, 5.0)], groups, size=2),
        data(1, [record("world", 1, 9.0), waiting("b", 1, 5.0)], groups, size=2),
    )
    _, _, part = page.partition("First call in which the ranks disagree\n")
    lines = part.splitlines()[:3]
    assert lines[0].startswith("  the ranks call their groups in different orders, after barrier(), call 1 on 'world'")
    assert {line.partition(": barrier(), call 1 on ")[0] for line in lines[1:]} == {"    rank 0", "    rank 1"}
    assert page.index("Who is waiting for whom") < page.index("First call in which the ranks disagree")


def test_the_page_names_faults_in_the_order_in_which_they_came(tmp_path, capsys):
    page = page_of(
        tmp_path,
        capsys,
        data(0, [record("world", 1, 5.0, state="failed", error="DistBackendError: second")], WORLD),
        data(1, [record("world", 1, 6.0, state="failed", error="ValueError: first\nmore")], WORLD),
    )
    assert page.index("+0.000 s, rank 1 (pid 1001 on node1)") < page.index("+1.000 s, rank 0")
    assert "ValueError: first\n" in page
    assert "more\n" not in page


def test_a_fault_of_several_ranks_stands_there_once(tmp_path, capsys):
    def failed(rank):
        text = f"DistBackendError: recv on group 'world' (rank {rank} of 3): deadlock:\n  rank 0 waits for rank 1"
        return data(rank, [waiting("world", 1, 5.0), record("world", 2, 4.0 - rank, state="failed", error=text)], WORLD)

    page = page_of(tmp_path, capsys, *({**failed(rank), "world_size": 3} for rank in range(3)))
    assert page.count("deadlock") == 1
    assert "group 'world' (rank 0 of 3): deadlock\n    ranks 1, 2: the same\n" in page


def test_the_exception_of_a_rank_comes_before_the_failures_that_it_causes(tmp_path, capsys):
    failed = record("world", 2, 5.0, state="failed", error="DistBackendError: barrier: rank 1 failed")
    raised = {"error": "RuntimeError: bad batch", "time_s": NOW_S - 4.95}
    page = page_of(
        tmp_path,
        capsys,
        data(0, [record("world", 1, 6.0), failed], WORLD, size=2),
        {**data(1, [record("world", 1, 6.0)], WORLD, in_call=False, size=2), "raised": raised},
    )
    assert "What went wrong\n  +0.000 s, rank 1 (pid 1001 on node1) at /home/me/data.py:57: RuntimeError: bad b" in page
    assert "+0.050 s, rank 0 (pid 1000 on node1) at /home/me/train.py:20: DistBackendError: barrier: rank 1 f" in page
    assert (
        "rank 1 raised RuntimeError: bad batch, at data.py:57 in load; its last call was barrier(), call 1 on 'world'"
    ) in page
    assert "Stragglers" not in page


@pytest.mark.parametrize("reason", ["SIGUSR1", "asked for by flight_recorder()"])
def test_the_page_says_which_file_is_of_an_earlier_moment(tmp_path, capsys, reason):
    asked = {**data(1, [record("world", 1, 9.0)], WORLD, in_call=False, size=2), "reason": reason}
    waits = data(0, [record("world", 1, 9.0), waiting("world", 2, 5.0)], WORLD, size=2)
    page = page_of(tmp_path, capsys, waits, {**asked, "time_s": NOW_S - 4})
    assert (
        "Older files\n"
        f"  the file of rank 1 is 4.0 s older than the last one ({reason}): what this rank did later is unknown\n"
    ) in page
    assert "Older files" not in page_of(tmp_path, capsys, waits, {**asked, "time_s": NOW_S - 0.1})
    ended = {**asked, "time_s": NOW_S - 4, "reason": "SIGTERM"}
    assert "Older files" not in page_of(tmp_path, capsys, waits, ended)


def test_what_ranks_did_is_told_in_the_past(tmp_path, capsys):
    failed = record("world", 2, 5.0, "recv(float64[4])", state="failed", error="DistBackendError: a deadlock", root=1)
    page = page_of(
        tmp_path, capsys, data(0, [failed], WORLD, size=2), data(1, [waiting("world", 2, 5.0)], WORLD, size=2)
    )
    _, _, part = page.partition("Who is waiting for whom\n")
    assert "rank 0 was in recv(float64[4]), message 2 on 'world', at train.py:20, for 5.0 s" in part
    assert ", and its call failed\n" in part
    assert "rank 1 was in barrier(), call 2 on 'world', at train.py:20, for 5.0 s" in part
    assert "(failed)" not in page


def test_the_page_names_ranks_without_a_file(tmp_path, capsys):
    page = page_of(tmp_path, capsys, data(0, [waiting("world", 2, 5.0)], WORLD, size=3))
    assert "1 of 3 ranks" in page
    assert (
        "Missing files\n  the files of ranks 1, 2 (rank_1.json, rank_2.json) are missing, so what they did is" in page
    )
    assert "they finished, or were ended by SIGTERM while they ran native code, or where the script" in page
    assert (
        "rank 0 waits for ranks 1, 2: whether these ranks had reached barrier(), call 2 on 'world', at train.py:20"
        " is unknown, as their files are missing"
    ) in page
    assert "have not reached" not in page
    assert page.rstrip().endswith("rank 2 may have been late: rank 0 waited for it for 5.0 s")


def failed_as_1_ended(how, **more):
    peer = {"rank": 1, "exit": how, "how": "called destroy_process_group()"}
    return record("world", 3, 0.1, state="failed", error="DistBackendError: rank 1 has ended", peer=peer, **more)


def test_the_page_tells_how_a_rank_without_a_file_ended_if_another_saw_it(tmp_path, capsys):
    world = {"world": [0, 1]}
    page = page_of(tmp_path, capsys, data(0, [failed_as_1_ended("left-world")], world, size=2))
    assert (
        "Missing files\n  the file of rank 1 (rank_1.json) is missing; as the records of other ranks show, rank 1"
        " called destroy_process_group()\n\n"
    ) in page
    assert "Who is waiting for whom\n  rank 1 has not reached barrier(), call 3 on 'world', at train.py:30\n" in page
    assert page.endswith("  rank 1 called destroy_process_group()\n")
    assert "unknown" not in page


def test_a_rank_that_has_destroyed_only_a_group_may_have_gone_on(tmp_path, capsys):
    page = page_of(tmp_path, capsys, data(0, [failed_as_1_ended("destroyed-group")], {"world": [0, 1]}, size=2))
    assert "is missing, so what it did is unknown" in page


def leave_early():
    for _ in range(3 if dist.get_rank() == 0 else 2):
        dist.all_reduce(np.ones(4))


def record_early_end(directory):
    try:
        leave_early()
    except dist.DistBackendError:
        dist.flight_recorder(directory)


def test_the_records_tell_which_rank_ended_and_how(tmp_path):
    dist.run(record_early_end, 2, args=(tmp_path,))
    (call,) = (call for call in read_dumps(tmp_path)[0].calls if call.peer_end is not None)
    assert (call.sequence, call.peer_end.rank, call.peer_end.how) == (3, 1, "has finished")
    assert "rank 1 (rank_1.json) is missing; as the records of other ranks show, rank 1 has finished" in report_on(
        read_dumps(tmp_path)
    )


def test_waits_too_short_to_matter_are_no_stragglers(tmp_path, capsys):
    states = [data(rank, [waiting("world", 1, 0.04)], WORLD, size=3) for rank in (0, 2)]
    page = page_of(tmp_path, capsys, *states, data(1, [], WORLD, in_call=False, size=3))
    assert "rank 1 has not reached" in page
    assert "Stragglers" not in page


def test_calls_that_differ_come_before_the_failures_and_once(tmp_path, capsys):
    world, reduces = {"world": [0, 1]}, "all_reduce(float64[2], op=sum)"
    error = "DistBackendError: all_reduce on group 'world' (rank {} of 2): the ranks disagree"
    first = record("world", 1, 1.0, "broadcast(float64[3], root=0)")
    failures = [
        record("world", 2 - rank, 1.0, reduces, state="failed", error=error.format(rank), site="/home/me/train.py:9")
        for rank in range(2)
    ]
    page = page_of(
        tmp_path, capsys, data(0, [first, failures[0]], world, size=2), data(1, [failures[1]], world, size=2)
    )
    assert page.index("First call in which the ranks disagree\n  call 1 on 'world':") < page.index("What went wrong")
    assert page.count("broadcast(") == 1
    assert "; beginning with the oldest calls" not in page


def test_the_page_names_who_comes_last(tmp_path, capsys):
    states = [
        data(rank, [record("world", n, 9.0 - n + (0.25 if rank != 2 else 0.0)) for n in range(1, 5)], WORLD, size=3)
        for rank in range(3)
    ]
    page = page_of(tmp_path, capsys, *states)
    assert "rank 2 was the last to enter 4 of 4 calls, 250.0 ms after the first on average" in page


def test_the_page_names_who_is_late_now(tmp_path, capsys):
    states = [data(rank, [waiting("world", 1, 5.0 + rank)], WORLD, size=3) for rank in (0, 2)]
    page = page_of(tmp_path, capsys, *states, data(1, [], WORLD, in_call=False, size=3))
    assert page.endswith("Stragglers\n  rank 1 was late: ranks 0, 2 waited for it for 7.0 s\n")


@pytest.mark.parametrize("late_s", [None, 0.002, 0.04])
def test_the_page_has_no_stragglers_where_none_is_late(tmp_path, capsys, late_s):
    calls = [[] if late_s is None else [record("world", 1, 9.0 - late_s * rank)] for rank in range(3)]
    states = [data(rank, calls[rank], WORLD, in_call=False, size=3) for rank in range(3)]
    page = page_of(tmp_path, capsys, *states)
    assert "Stragglers" not in page


def test_the_page_begins_with_who_waits_where_nothing_failed(tmp_path, capsys):
    states = [data(rank, [waiting("world", 1, 5.0)], WORLD, size=3) for rank in (0, 2)]
    page = page_of(tmp_path, capsys, *states, data(1, [], WORLD, in_call=False, size=3))
    assert page.startswith(
        "Flight records of all 3 ranks, on host node1; no call in them failed.\n\nWho is waiting for whom\n  rank 1 has"
    )
    assert "What went wrong" not in page
    assert "First call in which" not in page


def test_a_page_of_real_ranks(tmp_path):
    def program():
        dist.barrier()
        dist.all_reduce(np.ones(2))
        dist.flight_recorder(tmp_path)

    dist.run(program, 3)
    page = report_on(read_dumps(tmp_path))
    assert "; no call in them failed." in page
    assert "no rank waits for another" in page


def test_after_a_failure_nobody_waits(tmp_path, capsys):
    failed = record("world", 1, 5.0, state="failed", error="the ranks disagree")
    page = page_of(tmp_path, capsys, *(data(rank, [failed], WORLD, size=3) for rank in range(3)))
    assert "Who is waiting for whom\n  no rank waits any more: these calls have failed\n" in page


def test_other_files_in_the_folder_are_no_records(tmp_path, capsys):
    (tmp_path / "settings.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 1
    assert "has no files of the flight recorder (rank_0.json and so on)" in capsys.readouterr().err
    assert "Flight records of the only rank" in page_of(tmp_path, capsys, data(0, [], {"world": [0]}, size=1))


def test_the_command_line(tmp_path):
    write(tmp_path, data(0, [waiting("world", 2, 5.0)], WORLD, size=3))
    command = [sys.executable, "-m", "meshdist.debug", "report", "--stacks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "Stack of rank 0\n  /home/me/train.py:3 in <module>\n" in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rank_0.json", "{}", "is not a file of the flight recorder: KeyError 'format'"),
        ("rank_0.json", "{", "is not JSON"),
        ("notes.txt", "", "has no files of the flight recorder"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_files_of_several_jobs_are_refused(tmp_path, capsys):
    write(tmp_path, data(0, [], WORLD, size=3), data(1, [], WORLD, size=4))
    assert main(["report", str(tmp_path)]) == 1
    assert "worlds of different sizes, [3, 4]" in capsys.readouterr().err


def test_the_graph_can_be_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    write(tmp_path, data(0, [waiting("world", 2, 5.0)], WORLD, size=3))
    assert main(["report", str(tmp_path), "--draw", str(tmp_path / "waits.png")]) == 0
    assert (tmp_path / "waits.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_says_what_the_colours_mean():
    pytest.importorskip("matplotlib").use("Agg")
    late = parse_state(data(2, [], WORLD, in_call=False, size=3), "a test")
    others = [parse_state(data(rank, [waiting("world", 2, 5.0)], WORLD, size=3), "a test") for rank in range(2)]
    drawn = draw_waits(who_waits(by_rank(*others, late)))
    words = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert words == ["not in the call", "waiting", "barrier(), call 2 on 'world', at train.py:20"]
    assert {text.get_text() for text in drawn.texts if text.get_text()} == {"ranks 0, 1", "rank 2\nat data.py:57"}
    cycle = [
        parse_state(data(rank, [waiting(group, 1, 5.0)], {"a": [0, 1], "b": [0, 1]}, size=2), "a test")
        for rank, group in enumerate("ab")
    ]
    assert draw_waits(who_waits(by_rank(*cycle))).get_legend().get_texts()[0].get_text() == "deadlock"


def failed(sequence, text, error, **more):
    return record("world", sequence, 5.0, text, "failed", error=f"DistBackendError: {text}: {error}", **more)


GAVE_UP = {"rank": 1, "exit": "gave-up", "how": "failed: recv"}
ENDED = {"rank": 1, "exit": "ended", "how": "has ended without destroy_process_group()"}
KINDS = {  # of ranks: their calls, what has ended them; the boxes and the words of the legend
    "calls that disagree": (
        {0: failed(1, "all_reduce(float64[1], op=sum)", "the ranks disagree"), 1: failed(1, "barrier()", "the same")},
        ["rank 0\nall_reduce(float64[1], op=sum)\nat train.py:10", "rank 1\nbarrier()\nat train.py:10"],
        ["call failed"],
    ),
    "a message of the wrong size": (
        {
            0: failed(1, "send(float64[9] to rank 1)", "rank 1 failed", root=1, peer=GAVE_UP),
            1: failed(1, "recv(float64[4] from rank 0)", "rank 0 sent float64[9]", root=0),
        },
        ["rank 0\nsend(float64[9] to rank 1)\nat train.py:10", "rank 1\nrecv(float64[4] from rank 0)\nat train.py:10"],
        ["call failed"],
    ),
    "a rank that has ended": (
        {0: failed(1, "barrier()", "rank 1 has ended", peer=ENDED)},
        ["rank 0", "rank 1\nhas ended without destroy_process_group()"],
        ["gone", "waiting", "barrier(), call 1 on 'world', at train.py:10"],
    ),
    "a rank without a file": (
        {0: record("world", 1, 5.0)},
        ["rank 0\nat data.py:57", "rank 1"],
        ["in a call without a record", "no record"],
    ),
}


@pytest.mark.parametrize(("calls", "boxes", "legend"), KINDS.values(), ids=KINDS)
def test_a_picture_of_calls_that_have_failed(tmp_path, calls, boxes, legend):
    pytest.importorskip("matplotlib").use("Agg")
    write(tmp_path, *(data(rank, [call], {"world": [0, 1]}, size=2) for rank, call in calls.items()))
    states = read_dumps(tmp_path)
    drawn = draw_waits(who_waits(states, ends_on_record(states)))
    assert [text.get_text() for text in drawn.texts if text.get_text()] == boxes
    assert [text.get_text() for text in drawn.get_legend().get_texts()] == legend


def test_a_rank_that_raised_is_told_from_one_that_is_late():
    pytest.importorskip("matplotlib").use("Agg")
    groups = {"world": [0, 1, 2]}
    raised = {**data(1, [], groups, in_call=False, size=3), "raised": {"error": "KeyError: 'key'", "time_s": NOW_S}}
    states = [data(0, [waiting("world", 1, 5.0)], groups, size=3), raised, data(2, [], groups, in_call=False, size=3)]
    drawn = draw_waits(who_waits(by_rank(*(parse_state(state, "a test") for state in states))))
    texts = {text.get_text() for text in drawn.texts if text.get_text()}
    assert texts == {"rank 0", "rank 1\nKeyError: 'key'\nat data.py:57", "rank 2\nat data.py:57"}


def test_all_that_wait_for_each_other_are_in_the_deadlock():
    groups = {"world": [0, 1, 2, 3]}
    from_any = waiting("world", 1, 5.0, "recv(float64[4] from any rank)", root=None)
    from_0 = waiting("world", 1, 5.0, "recv(float64[4] from rank 0)", root=0)
    states = by_rank(
        parse_state(data(0, [from_any], groups), "a test"),
        *(parse_state(data(rank, [from_0], groups), "a test") for rank in (1, 2, 3)),
    )
    assert ranks_alike(who_waits(states)) == [[0], [1, 2, 3]]
    assert "rank 0 waits for any rank; rank 1 waits for rank 0; ranks 2, 3 wait with them" in report_on(states)


def test_a_picture_has_no_more_room_than_its_boxes_need():
    pytest.importorskip("matplotlib").use("Agg")
    groups = {"world": [0, 1, 2]}
    states = [
        data(0, [waiting("world", 2, 5.0)], groups, size=3),
        data(1, [waiting("world", 1, 5.0, "recv(float64[4])", root=2)], groups, size=3),
        data(2, [], groups, in_call=False, size=3),
    ]
    drawn = draw_waits(who_waits(by_rank(*(parse_state(state, "a test") for state in states))))
    drawn.figure.draw_without_rendering()
    boxes = [text.get_bbox_patch().get_window_extent() for text in drawn.texts if text.get_text()]
    assert len(boxes) == 3
    for side, end in (("x", "width"), ("y", "height")):
        used = max(getattr(box, f"{side}1") for box in boxes) - min(getattr(box, f"{side}0") for box in boxes)
        assert used > 0.6 * getattr(drawn.figure.bbox, end)


def test_ranks_that_wait_alike_share_a_box():
    groups = {"world": list(range(64))}
    late = data(7, [], groups, in_call=False, size=64)
    receiving = data(30, [waiting("world", 1, 5.0, "recv(float64[4])", root=7)], groups, size=64)
    others = [data(rank, [waiting("world", 3, 5.0)], groups, size=64) for rank in range(64) if rank not in (7, 30)]
    states = by_rank(*(parse_state(state, "a test") for state in (late, receiving, *others)))
    assert ranks_alike(who_waits(states)) == [[rank for rank in range(64) if rank not in (7, 30)], [7], [30]]


def test_where_nothing_can_be_drawn_that_is_said_before_the_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(tmp_path, data(0, [waiting("world", 2, 5.0)], WORLD, size=3))
    assert main(["report", str(tmp_path), "--draw", str(tmp_path / "waits.png")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "needs matplotlib: pip install matplotlib" in said.err


def test_files_of_before_a_world_was_shrunk_are_left_out(tmp_path, capsys):
    page = page_of(
        tmp_path,
        capsys,
        data(2, [record("world", 1, 9.0, state="failed", error="DistBackendError: rank 1 has died")], WORLD, size=3),
        *({**data(rank, [record("world", 1, 5.0)], {"world": [0, 1]}, size=2), "shrunk": 1} for rank in range(2)),
    )
    assert page.startswith("Flight records of all 2 ranks since the world was shrunk, on host node1; no call in them")
    assert "has died" not in page


def test_a_shrunk_world_says_so_in_its_records():
    def main():
        if dist.get_rank() == 1:
            return None
        dist.shrink_group([1])
        return dist.flight_recorder()

    said = dist.run(main, 3)
    assert [(state["rank"], state["world_size"], state["shrunk"]) for state in (said[0], said[2])] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
