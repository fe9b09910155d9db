"""How a rank ended: the record that is sent, records of later versions, and the text."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from until import until

import meshdist as dist
from meshdist.backends.backend_options import BackendOptions
from meshdist.errors import CallMade, DistBackendError, DistError, DistNetworkError
from meshdist.runtime.departure import (
    FORMAT,
    MOST_BYTES,
    Departure,
    LeftOut,
    PeerExit,
    any_of,
    describe,
    failure_of,
    gave_up,
    giving_up,
    in_words,
    nobody_left,
    peer_gone,
)
from meshdist.runtime.flight_recorder import located

ORDERLY = {PeerExit.DESTROYED_GROUP, PeerExit.LEFT_WORLD, PeerExit.ENDED, PeerExit.FINISHED}
CALL = CallMade("call", 18, "train.py:42")
WHERE = "barrier on group 'world' (rank 0 of 2)"


@pytest.mark.parametrize("how", PeerExit)
def test_every_end_survives_the_way_and_has_words(how):
    departure = Departure(
        how, number=3, detail="why", first="rank 2", call=CALL._replace(peers_last=17), hang_report="  who"
    )
    assert Departure.decode(departure.encode()) == departure
    assert Departure.decode(Departure(how).encode()) == Departure(how)
    assert describe(departure)
    assert "%s" not in describe(departure)
    assert how.is_orderly == (how in ORDERLY)


texts = st.text(st.characters(exclude_categories=()), max_size=80)
calls = st.builds(CallMade, texts, st.integers(), texts, st.none() | st.integers())


@given(
    st.builds(Departure, st.sampled_from(PeerExit), st.none() | st.integers(), texts, texts, st.none() | calls, texts)
)
def test_any_departure_survives_the_way(departure):
    assert Departure.decode(departure.encode()) == departure


@given(texts, texts, st.sampled_from("aü\n\0\U0001f600\ud800"), st.integers(300, MOST_BYTES))
def test_texts_are_cut_to_what_there_is_room_for(detail, first, long, most_bytes):
    departure = Departure(
        PeerExit.GAVE_UP, detail=detail + long * MOST_BYTES, first=first * 9, hang_report=long * MOST_BYTES
    )
    data = departure.encode(most_bytes)
    assert len(data) <= most_bytes
    assert Departure.decode(data).exit is PeerExit.GAVE_UP


def test_the_story_is_cut_before_the_reason():
    departure = Departure(PeerExit.GAVE_UP, detail="it raised ValueError: boom", call=CALL, hang_report="x" * 5000)
    said = Departure.decode(departure.encode(1500))
    assert (said.detail, said.call) == (departure.detail, CALL)
    assert 1000 < len(said.hang_report) < 1500


def test_the_ends_of_a_later_version_are_unknown_and_in_no_order():
    later = json.dumps({"v": FORMAT + 1, "exit": "migrated", "detail": "to node7", "colour": "red"}).encode()
    departure = Departure.decode(later)
    assert departure == Departure(PeerExit.UNKNOWN, detail="migrated to node7")
    assert describe(departure) == "has ended in a way that only a later meshdist knows: migrated to node7"
    assert not departure.exit.is_orderly


def test_unknown_fields_are_ignored():
    data = json.dumps({"v": FORMAT + 1, "exit": "left-world", "colour": "red", "call": ["call", 1, "a:2", None, "", 5]})
    assert Departure.decode(data.encode()) == Departure(PeerExit.LEFT_WORLD, call=CallMade("call", 1, "a:2"))


@given(st.binary(max_size=60) | st.sampled_from([b"{}", b"[1]", b"null", b'{"exit": "died", "call": 3}', b"has died"]))
def test_what_is_no_record_is_unknown(data):
    assert Departure.decode(data).exit is PeerExit.UNKNOWN


@pytest.mark.parametrize(
    ("departure", "words"),
    [
        (Departure(PeerExit.DESTROYED_GROUP), "has destroyed the group"),
        (Departure(PeerExit.LEFT_WORLD), "called destroy_process_group()"),
        (Departure(PeerExit.ENDED), "has ended without destroy_process_group()"),
        (Departure(PeerExit.FINISHED), "has finished"),
        (Departure.of_status(3), "exited with status 3"),
        (Departure.of_status(0), "exited with status 0, without destroy_process_group()"),
        (Departure.of_status(-15), "was killed by SIGTERM"),
        (Departure.of_status(None), "has died"),
        (Departure(PeerExit.CUT_OFF), "has died, or was cut off from the store"),
        (Departure(PeerExit.ENDED_WITH_STORE), "has ended, and the store is gone as well"),
        (Departure(PeerExit.UNREACHABLE, detail="100% lost"), "cannot be reached: 100% lost"),
        (Departure(PeerExit.LOST, detail="timed out"), "cannot be reached any more: timed out"),
        (
            Departure(PeerExit.SILENT, detail="8 s"),
            "does not answer: nothing has come from its host for 8 s; is it down, or the network to it cut?",
        ),
        (Departure(PeerExit.RESET), "has died, or its connection was reset"),
        (Departure(PeerExit.RAISED, detail="ValueError: %s"), "raised ValueError: %s"),
        (Departure(PeerExit.INTERRUPTED, detail="KeyboardInterrupt"), "was interrupted by KeyboardInterrupt"),
        (Departure(PeerExit.NOT_BEGUN, detail="no"), "did not begin: no"),
        (Departure(PeerExit.GAVE_UP, detail="no"), "failed: no"),
        (Departure(PeerExit.GAVE_UP, detail="no", call=CALL), "failed: no; this is call 18, at train.py:42"),
        (Departure(PeerExit.GAVE_UP, detail="no", first="rank 2"), "failed because rank 2 failed: no"),
    ],
)
def test_the_words(departure, words):
    assert describe(departure) == words


@pytest.mark.parametrize(
    ("how", "left_out", "words"),
    [
        (PeerExit.LEFT_WORLD, LeftOut.CALL, "rank 1 called destroy_process_group() without making this call"),
        (
            PeerExit.ENDED,
            LeftOut.SEND,
            "rank 1 has ended without destroy_process_group() and without sending the awaited message",
        ),
        (PeerExit.DESTROYED_GROUP, LeftOut.NOTHING, "rank 1 has destroyed the group"),
        (PeerExit.DIED, LeftOut.RECEIVE, "rank 1 has died"),
    ],
)
def test_what_a_peer_has_left_out_is_said_where_its_end_was_in_order(how, left_out, words):
    error = peer_gone("rank 1", Departure(how), left_out)
    assert str(error) == words
    assert error.peer_failed
    failure = failure_of(error)
    assert (failure.who, failure.departure.exit, failure.left_out) == ("rank 1", how, left_out)


def test_the_parts_of_a_message_are_said_in_order():
    error = DistError("it broke", hang_report="  who is waiting for whom:")
    error.locate(WHERE)
    error.locate(WHERE, CALL._replace(peers_last=17))
    error.add(" in two")
    assert str(error) == (
        f"{WHERE}: it broke in two; its last was call 17, this is call 18, at train.py:42\n  who is waiting for whom:"
    )
    error.locate("outer")
    assert error.headline == f"outer: {WHERE}: it broke in two"


@pytest.mark.parametrize("twin", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_of_an_error_has_its_parts(twin):
    error = peer_gone("rank 1", Departure(PeerExit.GAVE_UP, detail="no", hang_report="  who"), LeftOut.CALL)
    error.locate(WHERE, CALL)
    other = twin(error)
    assert (type(other), str(other), other.peer_failed) == (DistBackendError, str(error), True)
    assert (other.error_prefix, other.call, other.hang_report, other.peer) == (
        error.error_prefix,
        CALL,
        "  who",
        error.peer,
    )


def test_who_gives_up_because_of_a_death_says_so_with_its_own_call():
    error = peer_gone("rank 1", Departure(PeerExit.DIED), LeftOut.CALL)
    error.locate(WHERE, CALL)
    departure = gave_up(error)
    assert departure == Departure(PeerExit.GAVE_UP, detail=f"{WHERE}: rank 1 has died", call=CALL)
    assert peer_gone("rank 0", departure).is_numbered, "with the number of that call"


def test_what_was_raised_is_said_behind_the_reason_and_a_peers_end_is_passed_on():
    assert str(giving_up("it raised", ValueError("boom\nmore"))) == "it raised ValueError: boom"
    error = peer_gone("rank 1", Departure(PeerExit.GAVE_UP, detail="no"), LeftOut.CALL)
    error.locate(WHERE, CALL)
    assert in_words(error) == f"DistBackendError: {WHERE}: rank 1 failed: no"
    assert describe(gave_up(giving_up("it raised", error))) == "failed because rank 1 failed: no"
    error = peer_gone("rank 1", Departure(PeerExit.DIED), LeftOut.CALL)
    error.locate(WHERE, CALL)
    assert describe(gave_up(giving_up("it raised", error))) == f"failed: it raised DistBackendError: {error}"


def test_very_many_that_are_gone_are_counted():
    gone = {f"rank {rank}": Departure(PeerExit.DIED) for rank in range(20)}
    assert str(nobody_left(gone)).endswith("rank 7 has died; and so on, 20 ranks in all")


def test_a_peer_that_cannot_be_reached_is_a_network_error():
    for ended in (PeerExit.LOST, PeerExit.RESET, PeerExit.UNREACHABLE):
        error = peer_gone("rank 1", Departure(ended, detail="Connection reset by peer"))
        assert isinstance(error, DistNetworkError)
        assert isinstance(error, DistBackendError)
        assert error.peer_failed
    assert not isinstance(peer_gone("rank 1", Departure(PeerExit.DIED)), DistNetworkError)


def test_which_ends_are_orderly():
    assert PeerExit.LEFT_WORLD.is_orderly
    assert not PeerExit.SIGNALLED.is_orderly


def test_the_words_of_an_end():
    killed = Departure.of_status(-9)
    assert killed.exit is PeerExit.SIGNALLED
    assert describe(killed) == "was killed by SIGKILL"
    assert Departure.decode(killed.encode()) == killed
    assert describe(Departure(PeerExit.LEFT_WORLD)) == "called destroy_process_group()"
    assert describe(Departure(PeerExit.EXITED, 3)) == "exited with status 3"
    passed_on = Departure(PeerExit.GAVE_UP, detail="it raised ValueError: boom", first="rank 1 (pid 7 on n)")
    assert describe(passed_on) == "failed because rank 1 (pid 7 on n) failed: it raised ValueError: boom"
    assert describe(gave_up(DistError("it raised ValueError: boom"))) == "failed: it raised ValueError: boom"


def test_errors_in_words():
    assert in_words(ValueError("boom")) == "ValueError: boom"
    assert in_words(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_errors_of_calls_whose_peers_are_gone():
    left = Departure(PeerExit.LEFT_WORLD)
    error = peer_gone("rank 1", left, LeftOut.SEND)
    assert str(error) == "rank 1 called destroy_process_group() without sending the awaited message"
    error = nobody_left({"rank 1": Departure(PeerExit.DIED), "rank 2": left})
    assert str(error) == "all others are gone: rank 1 has died; rank 2 called destroy_process_group()"
    assert any_of([1, 2], "rank {}".format) == "any rank"
    assert any_of([1], "rank {}".format) == "rank 1, the only other rank,"


def test_a_rank_that_gives_up_and_leaves_between_two_looks_has_given_up(monkeypatch):
    looked = threading.Event()
    gone = BackendOptions.gone

    def gone_meanwhile(options, rank):
        """Return how the rank has left, once it has: it was still there when the room was looked at."""
        looked.set()
        until(lambda: gone(options, rank) is not None, "the rank called destroy_process_group()")
        return gone(options, rank)

    def main():
        group = dist.group.WORLD
        group.barrier()
        if group.rank() == 1:
            assert looked.wait(20)
            group.abort("no luck")
            return None
        monkeypatch.setattr(BackendOptions, "gone", gone_meanwhile)
        with pytest.raises(dist.DistBackendError) as caught:
            group.recv(np.zeros(3), 1)
        return str(caught.value)

    assert "rank 1 failed: no luck" in dist.run(main, 2, timeout=20)[0]


def failure_before_rank_0_has_come():
    group, word = dist.new_group(), np.zeros(1)
    match dist.get_rank():
        case 0:
            dist.recv(word, 2)
        case 1:
            group.abort("no luck")
            dist.send(word, 2)
        case 2:
            dist.recv(word, 1)
            with pytest.raises(dist.DistBackendError, match="rank 1 .*failed: no luck"):
                group.all_reduce(word)
            dist.send(word, 0)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "gloo-tcp", "threads"])
def test_the_first_collective_of_a_group_raises_before_all_ranks_have_called_it(worlds, backend):
    worlds.world(backend, 3).run(failure_before_rank_0_has_come)


# ---- How the errors of later calls, and of other ranks, name the first failure


def test_a_later_call_names_the_failure_in_a_sentence():
    def main():
        group = dist.new_group(group_desc="pair")
        said = []
        if dist.get_rank() == 1:
            with pytest.raises(dist.DistBackendError, match="deadlock"):
                dist.barrier()
        else:
            for call in (lambda: group.recv(np.ones(1), 1), lambda: group.recv(np.ones(1), 1), group.barrier):
                with pytest.raises(dist.DistError) as raised:
                    call()
                said.append(str(raised.value))
        return said

    first, same, other = dist.run(main, 2, timeout=60)[0]
    group = "on group 'pair' (rank 0 of 2)"
    head = first.partition("\n")[0].partition(": ")[2]
    assert head == "deadlock: the ranks wait for each other, and none can proceed"
    assert "\n  rank 1 waits for rank 0 in barrier" in first
    words, made = "the group cannot be used after an earlier failure:", "; that was message 1, at test_departures.py:"
    assert same.startswith(f"recv {group}: {words} {head}{made}")
    assert other.startswith(f"barrier {group}: {words} recv {group}: {head}{made}")
    assert same.rpartition(made)[2] == other.rpartition(made)[2] != ""


def test_the_first_error_that_is_raised_has_the_report_of_an_async_call():
    def main():
        group = dist.new_group()
        work = group.all_reduce(np.ones(2 + dist.get_rank()), async_op=True)
        until(lambda: group.is_broken, "the async call has failed")
        said = []
        for _ in range(2):
            with pytest.raises(dist.DistError) as raised:
                group.barrier()
            said.append(str(raised.value))
        with pytest.raises(dist.DistError, match="the ranks disagree"):
            work.wait()
        return said

    for said in dist.run(main, 2):
        assert [words.count("\n") for words in said] == [2, 0]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("send on group 'a' (rank 0 of 2)", "send on group 'a' (rank 0 of 2): rank 1 failed: no room"),
        (
            "recv on group 'a' (rank 0 of 2)",
            "recv on group 'a' (rank 0 of 2): rank 1 failed: send on group 'a' (rank 1 of 2): no room",
        ),
    ],
)
def test_a_peer_that_failed_in_the_same_call_does_not_name_it_again(prefix, words):
    departure = gave_up(dist.DistBackendError("no room", error_prefix="send on group 'a' (rank 1 of 2)"))
    _, error = located(peer_gone("rank 1", departure), prefix, None)
    assert str(error) == words
