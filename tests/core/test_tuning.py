"""Plans that measure themselves: which way they choose, that all ranks choose alike, and what is remembered."""

import json
import math
import os
from contextlib import contextmanager
from functools import partial
from time import monotonic_ns
from unittest import mock

import numpy as np
import pytest
from worlds import needs_linux

import meshdist as dist
from meshdist import core
from meshdist.backends.gloo.shm import cache_distance, move_selection, tuned_plan, tuning
from meshdist.backends.gloo.shm.tuning import Mode, Trials, Tuning
from meshdist.system import tuning_cache
from meshdist.system.env_flags import TUNING, tuning_mode
from meshdist.system.tuning_cache import TuningCache

pytestmark = pytest.mark.timeout(60)
COUNT = 300_000  # of float32: more than a slot holds


# ---- The choice


def ways_tried(trials, times):
    """Return the way of each call until one is chosen, if each run of a way takes the next time given, or the last."""
    left, tried = {way: list(own) for way, own in times.items()}, [trials.next]
    if trials.is_first:
        trials.add(10**9, None)
    while trials.goes_on:
        tried += [trials.next] * 2
        trials.add(left[trials.next].pop(0) if left[trials.next][1:] else left[trials.next][0], None)
    return tried


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"guess": [100], "other": [90], "slow": [500]}, "other"),
        ({"guess": [100], "other": [97], "slow": [500]}, "guess"),  # too little to leave it
        ({"guess": [100], "other": [250, 80], "slow": [500]}, "other"),  # delayed once
        ({"guess": [900, 400, 90], "other": [100], "slow": [250, 260]}, "guess"),  # delayed twice
        ({"guess": [100], "other": [115, 112, 112, 111, 70], "slow": [500]}, "other"),  # delayed most times
        ({"guess": [500], "other": [100], "slow": [250, 260]}, "other"),  # the worst guess
    ],
)
def test_the_fastest_way_is_chosen(times, chosen):
    trials = Trials("call", 1 << 20, list(times), measures=True)
    tried = ways_tried(trials, times)
    assert trials.next == chosen
    fastest = min(min(own) for own in times.values())
    assert [way for way in tried[20:] if min(times[way]) > 1.5 * fastest] == []


def test_few_long_calls_are_enough():
    times = {"guess": [10**9], "other": [0.9 * 10**9], "slow": [5 * 10**9]}
    assert len(ways_tried(Trials("call", 1 << 30, list(times), measures=True), times)) <= 20


def test_where_ranks_share_cores_another_way_has_to_be_much_faster():
    times = {"guess": [100], "other": [85], "slow": [500]}
    trials = Trials("call", 1 << 20, list(times), measures=True, has_cores=False)
    ways_tried(trials, times)
    assert trials.next == "guess"


def tried_by_a_benchmark(times, *, has_cores):
    trials = Tuning(Mode.FORCE, None, has_cores=has_cores).trials("call", 1 << 20, list(times))
    return ways_tried(trials, times), trials.next


def test_a_benchmark_that_tunes_measures_more_and_trusts_it_more():
    times = {"guess": [100_000], "other": [85_000], "slow": [500_000]}
    tried, chosen = tried_by_a_benchmark(times, has_cores=False)
    passing = ways_tried(Trials("call", 1 << 20, list(times), measures=True, has_cores=False), times)
    assert chosen == "other"
    assert len(tried) > 2 * len(passing)
    assert tried_by_a_benchmark({"guess": [100_000], "other": [90_000]}, has_cores=False)[1] == "guess"


def num_calls_until_tried_again(trials):
    for number in range(1, 10**6):
        trials.passed()
        if trials.goes_on:
            return number
    raise AssertionError("the ways are not tried again")


def test_serious_ways_are_tried_again_the_later_the_longer_the_choice_is_right():
    times = {"guess": [100], "other": [150], "slow": [500]}
    trials = Trials("call", 1 << 20, list(times), measures=True)
    ways_tried(trials, times)
    first = num_calls_until_tried_again(trials)
    assert trials.ways[trials.chosen] == "guess", "until another one is faster"
    assert set(ways_tried(trials, times)) == {"guess", "other"}
    assert trials.next == "guess"
    confirmed, first = first, num_calls_until_tried_again(trials)
    assert confirmed < first / 5, "what was chosen in the first trials is confirmed soon"
    assert set(ways_tried(trials, times)) == {"guess", "other"}
    second = num_calls_until_tried_again(trials)
    assert second == 2 * first
    ways_tried(trials, {"guess": [100], "other": [60]})
    assert trials.next == "other", "what changed on the machine is noticed"
    assert num_calls_until_tried_again(trials) < first / 5, "another choice than the default is confirmed soon"
    times = {"guess": [60], "other": [61]}
    ways_tried(trials, times)
    assert trials.next == "other", "the default comes back only if it is faster"


def test_a_default_that_was_slow_for_a_moment_is_tried_again():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=True)
    ways_tried(trials, {"guess": [500], "other": [100]})
    assert trials.next == "other"
    num_calls_until_tried_again(trials)
    ways_tried(trials, {"guess": [50], "other": [100]})
    assert trials.next == "guess"


@pytest.mark.parametrize("fastest", ["guess", "other"])
def test_what_is_remembered_is_held_against_the_default_soon(fastest):
    trials = Trials("call", 1 << 20, ["guess", "other", "slow"], measures=True)
    trials.add(100, 1)
    first = num_calls_until_tried_again(trials)
    times = {"guess": [100], "other": [100], "slow": [500]} | {fastest: [60]}
    tried = ways_tried(trials, times)
    assert trials.next == fastest
    assert set(tried) == {"guess", "other"}
    assert first + len(tried) <= 30, "the default is tried in some of the first calls"
    assert num_calls_until_tried_again(trials) >= tuning._LEAST_CALLS


def test_a_default_that_is_remembered_is_not_held_against_others_soon():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=True)
    trials.add(100, 0)
    assert num_calls_until_tried_again(trials) == tuning._LEAST_CALLS


def test_a_run_is_two_calls_in_a_row():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=True)
    assert trials.ended((0, 5), (10, 5))  # the first call, which is compared at once and not measured
    trials.take_run()
    trials.add(10, None)
    assert not trials.ended((11, 5), (19, 9)), "the first call of a way is not measured"
    assert not trials.ended((20, 5), (24, 6))
    assert trials.ended((25, 6), (29, 8))
    assert trials.take_run() == (2, [20, 24, 25, 29], 3)
    trials.add(4, None)
    assert not trials.ended((30, 8), (34, 8)), "the first call of the next way"


@pytest.mark.parametrize(("most_bytes", "num_calls"), [(1 << 20, 8), (16 << 20, 3)])
def test_where_ranks_share_cores_the_calls_of_a_run_are_measured_together(most_bytes, num_calls):
    trials = Trials("call", most_bytes, ["guess", "other"], measures=True, has_cores=False)
    assert trials.ended((0, 5), (10, 5))
    trials.take_run()
    trials.add(10, None)
    for begin in (11, *range(20, 10 * num_calls + 10, 10)):
        assert not trials.ended((begin, 0), (begin + 2, 0))
    assert trials.ended((150, 0), (155, 0))
    assert trials.take_run() == (num_calls, [20, 155], 0)


def test_calls_in_which_a_rank_lost_its_core_are_repeated():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=True)
    trials.add(100, None, was_disturbed=True)  # the first call is not measured
    for _ in range(4):
        trials.add(900, None, was_disturbed=True)
    while trials.chosen is None:
        trials.add({"guess": 100, "other": 300}[trials.next], None)
    assert (trials.next, trials.was_disturbed) == ("guess", False)


@pytest.mark.parametrize(("mode", "remembered"), [(Mode.ON, None), (Mode.FORCE, "other")])
def test_what_is_measured_on_a_busy_machine_is_remembered_if_asked_for(tmp_path, monkeypatch, mode, remembered):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    choices = Tuning(mode, TuningCache(2))
    trials = choices.trials("call", 1 << 20, ["guess", "other"])
    while trials.chosen is None:
        trials.add({"guess": 300, "other": 100}[trials.next], None, was_disturbed=True)
    assert trials.next == "other"
    choices.save()
    assert TuningCache(2).choice(trials.key) == remembered


@pytest.mark.parametrize(("was_disturbed", "remembered"), [(False, "guess"), (True, None)])
def test_the_last_choice_is_remembered_while_ways_are_tried_again(tmp_path, monkeypatch, was_disturbed, remembered):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    choices = Tuning(Mode.ON, TuningCache(2), has_cores=True)
    trials = choices.trials("call", 1 << 20, ["guess", "other"])
    while trials.goes_on:
        trials.add({"guess": 100, "other": 150}[trials.next], None, was_disturbed=was_disturbed)
    num_calls_until_tried_again(trials)
    trials.add(100, None)
    assert trials.next == "other"
    choices.save()
    assert TuningCache(2).choice(trials.key, or_candidate=True) == remembered


@pytest.mark.parametrize(
    ("choices", "remembered"),
    [({"call 1048576": "other"}, 3), ({"call 1048576": "other", "call 1048576 far": "guess"}, 0), ({}, None)],
)
def test_a_choice_for_processors_at_the_other_distance_is_better_than_none(tmp_path, monkeypatch, choices, remembered):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    TuningCache(2).update(choices, is_final=True)
    tuning = Tuning(Mode.ON, TuningCache(2))
    tuning.moved(is_far=True)
    assert tuning.remembered(tuning.trials("call", 1 << 20, ["guess", "other"])) == remembered


def test_a_choice_for_the_other_distance_is_held_against_all_ways():
    def chosen(times):
        trials = Trials("call", 1 << 20, list(times), measures=True, has_cores=False)
        trials.add(100, 3 + 1)
        assert trials.goes_on
        assert set(ways_tried(trials, times)) == set(times)
        return trials.next

    assert chosen({"guess": [100], "other": [110], "third": [120]}) == "other"
    assert chosen({"guess": [100], "other": [110], "third": [50]}) == "third"


def test_what_is_remembered_is_taken_after_the_first_call():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=True)
    trials.add(100, 1)
    assert trials.next == "other"
    assert not trials.is_measured


def test_without_measuring_the_guess_stays():
    trials = Trials("call", 1 << 20, ["guess", "other"], measures=False)
    trials.add(100, None)
    assert trials.next == "guess"


# ---- In a group


@pytest.fixture
def pair(worlds):
    return worlds.world("gloo", 2)


def wrong_results(group, turn):
    """Make a call of each kind; return those with wrong results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    last = size - 1
    blocks = [np.arange(COUNT, dtype=np.float32) % 1000 + peer + turn for peer in range(size)]
    mine, whole, total = blocks[rank], np.concatenate(blocks), sum(blocks)
    outputs = {name: np.empty_like(whole) for name in ("all_gather_into_tensor", "all_to_all_single", "gather")}
    pieces = [np.split(array, size) for array in outputs.values()]
    kept, taken, lists = np.empty_like(mine), np.empty_like(mine), [np.empty_like(mine) for _ in range(size)]
    group.all_gather_into_tensor(outputs["all_gather_into_tensor"], mine)
    group.all_to_all_single(outputs["all_to_all_single"], np.tile(mine, size))
    group.gather(mine, pieces[2] if rank == last else None, dst=last)
    group.reduce_scatter_tensor(kept, np.tile(mine, size))
    group.scatter(taken, blocks if rank == last else None, src=last)
    group.all_to_all(lists, [mine] * size)
    found = {
        "all_reduce": (group.all_reduce(mine.copy()), total),
        "reduce": (group.reduce(mine.copy(), dst=last), total if rank == last else None),
        "broadcast": (group.broadcast(mine.copy(), src=0), blocks[0]),
        "all_gather_into_tensor": (outputs["all_gather_into_tensor"], whole),
        "all_to_all_single": (outputs["all_to_all_single"], whole),
        "gather": (outputs["gather"], whole if rank == last else None),
        "reduce_scatter_tensor": (kept, total),
        "scatter": (taken, mine),
        "all_to_all": (np.concatenate(lists), whole),
    }
    return [name for name, (got, due) in found.items() if due is not None and (got != due).any()]


# Where ways are measured, some have been after so many; all are after 3000, also if all runs that may be are repeated.
UNMEASURED_CALLS = 15


def far_from(nanoseconds):
    """Ranks are far apart from so many nanoseconds on."""
    return mock.patch.object(cache_distance, "_FAR_NS", nanoseconds)


@far_from(math.inf)
def tuned(mode=None, calls=3000):
    before = os.environ.get(TUNING)
    os.environ[TUNING] = mode or "force"
    try:
        with dist.new_group() as group:
            backend = group.usable_backend("test")
            for turn in range(calls):
                assert wrong_results(group, turn) == []
                if calls > UNMEASURED_CALLS and all(choice.chosen is not None for choice in backend.choices()):
                    break  # on all ranks at the same call
            choices = backend.choices()
            return {c.kind.split()[0]: (c.ways, c.chosen, len(c.seconds)) for c in choices if len(c.ways) > 1}
    finally:
        os.environ.pop(TUNING) if before is None else os.environ.update({TUNING: before})


@needs_linux
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_choose_alike(worlds, size):
    first, *others = worlds.world("gloo", size).run(tuned)
    assert others == [first] * (size - 1)
    assert len(first) == 9
    for ways, chosen, measured in first.values():
        assert chosen is not None
        assert measured == len(ways)


@needs_linux
def test_without_tuning_the_guess_is_kept(pair):
    for kinds in pair.run(tuned, "off", UNMEASURED_CALLS):
        assert {(chosen, measured) for _, chosen, measured in kinds.values()} == {(0, 0)}


def ranks_differ():
    return tuned("off" if dist.get_rank() == 1 else "on", UNMEASURED_CALLS)


@needs_linux
def test_ranks_that_ask_for_different_modes_do_the_least(pair):
    for kinds in pair.run(ranks_differ):
        assert {(chosen, measured) for _, chosen, measured in kinds.values()} == {(0, 0)}


def has_cores(cores):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    try:
        with dist.new_group() as group:
            group.barrier()
            return group.usable_backend("test")._shm.tuning.has_cores
    finally:
        os.sched_setaffinity(0, before)


@needs_linux
def test_ranks_that_are_bound_to_a_core_each_have_cores(pair):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    assert pair.run(has_cores, cores[:2]) == [True, True]
    assert pair.run(has_cores, cores[:1] * 2) == [False, False]


def slowed_down():
    """Return the default for a broadcast, which takes a second by the clock of the trials, and what is chosen."""
    num_slow = 0

    def slow(make, *args):
        plan = make(*args)
        for name in ("run", "run_strided", "first_step", "steps"):
            setattr(plan, name, partial(run_slowly, getattr(plan, name)))
        return plan

    def run_slowly(run, *args):
        nonlocal num_slow
        num_slow += 1
        return run(*args)

    def ways_with_a_slow_default(*args):
        (name, make), *others = quick(*args).items()
        return {name: partial(slow, make), **dict(others)}

    def clock():
        return monotonic_ns() + 1_000_000_000 * num_slow

    quick = move_selection.ways_to_move
    with (
        mock.patch.object(move_selection, "ways_to_move", ways_with_a_slow_default),
        mock.patch.object(tuned_plan, "monotonic_ns", clock),
    ):
        kinds = tuned()
    ways, chosen, _ = kinds["broadcast"]
    return ways[0], ways[chosen]


@needs_linux
def test_a_slow_way_is_avoided(pair):
    (guess, chosen), *others = pair.run(slowed_down)
    assert chosen != guess
    assert others == [(guess, chosen)]


@contextmanager
def measuring(least_calls=tuning._LEAST_CALLS):
    """A group that measures everything, and begins again after so many calls."""
    os.environ[TUNING] = "force"
    known = tuning._LEAST_CALLS, tuning._CALLS_TO_CONFIRM, tuning._THOROUGH
    tuning._LEAST_CALLS = tuning._CALLS_TO_CONFIRM = least_calls
    tuning._THOROUGH = tuning._PASSING  # few calls are enough
    try:
        with far_from(math.inf), dist.new_group() as group:
            yield group
    finally:
        tuning._LEAST_CALLS, tuning._CALLS_TO_CONFIRM, tuning._THOROUGH = known
        del os.environ[TUNING]


def async_and_sync():
    with measuring() as group:
        # One rank prepares its plans long before it runs them; the other prepares each when it runs it.
        arrays = [np.full(COUNT, dist.get_rank() + k, np.float32) for k in range(90)]
        if dist.get_rank() == 0:
            works = [group.all_reduce(array, async_op=True) for array in arrays]
            for work in works:
                work.wait()
        else:
            for array in arrays:
                group.all_reduce(array)
        wrong = sum((array != 2 * k + 1).sum() for k, array in enumerate(arrays))
        [choice] = [c for c in group.usable_backend("test").choices() if len(c.ways) > 1]
        return int(wrong), choice.ways[choice.chosen]


@needs_linux
def test_async_calls_and_sync_calls_take_part_alike(pair):
    (wrong, chosen), (also_wrong, also_chosen) = pair.run(async_and_sync)
    assert wrong == also_wrong == 0
    assert chosen == also_chosen


def wrong_lists(group, turn, long):
    """Exchange lists of arrays, of which some are long, by one rank's async call; return the wrong ones."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def length(giver, taker):
        return long[(giver + 2 * taker) % len(long)] + giver

    sent = [np.arange(length(rank, peer)) + 10 * rank + peer + turn for peer in range(size)]
    if turn % 7 == 3:  # the core cannot copy these
        sent = [np.repeat(array, 2)[::2] for array in sent]
    received = [np.full(length(peer, rank), -1) for peer in range(size)]
    if turn % 5 == rank:
        group.all_to_all(received, sent, async_op=True).wait()
    else:
        group.all_to_all(received, sent)
    due = [np.arange(length(peer, rank)) + 10 * peer + rank + turn for peer in range(size)]
    return [peer for peer in range(size) if not np.array_equal(received[peer], due[peer])]


def exchanged_lists(least_calls):
    with measuring(least_calls) as group:
        for long in ((9000, 200_000), (40_000, 0, 70_000), (20_000,), (3, 200_000, 5, 0)):
            for turn in range(60):
                assert wrong_lists(group, turn, long) == []
        for turn in range(60):  # lists of several sizes in turns
            assert wrong_lists(group, turn, ((30_000, 40_000), (9, 60_000), (0, 3))[turn % 3]) == []
        return [choice.chosen for choice in group.usable_backend("test").choices()]


@needs_linux
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("least_calls", [tuning._LEAST_CALLS, 3])
def test_lists_of_unequal_arrays_go_in_every_way(worlds, size, least_calls):
    first, *others = worlds.world("gloo", size).run(exchanged_lists, least_calls)
    assert others == [first] * (size - 1)
    assert first[0] is not None


def trials_that_begin_again():
    """Make calls of each kind, of ordinary, strided and shared arrays, sync and async, while trials begin again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with measuring(least_calls=3) as group:
        shared = dist.empty(COUNT, np.float32, group=group)
        strided = np.empty((COUNT, 2), np.float32)[:, 0]
        for turn in range(60):
            assert wrong_results(group, turn) == []
            # Which kind of array a rank passes is its own affair; all count the call alike.
            array = (shared, strided, np.empty(COUNT, np.float32))[(turn * (rank + 1)) % 3]
            array[:] = rank + turn
            if (turn + rank) % 2:
                group.broadcast(array, src=turn % size)
            else:
                group.broadcast(array, src=turn % size, async_op=True).wait()
            assert (array == turn % size + turn).all()
        return [choice.chosen for choice in group.usable_backend("test").choices()]


@needs_linux
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_begin_again_at_the_same_call(worlds, size):
    first, *others = worlds.world("gloo", size).run(trials_that_begin_again)
    assert others == [first] * (size - 1)


# ---- What is remembered


def remembered_choices(directory, mode, calls=900):
    os.environ[tuning_cache.DIRECTORY] = directory
    return tuned(mode, calls)


def remembered_on_one_core(directory, num_runnable):
    """Return whether choices were remembered that ranks have measured which share a core with so many threads."""
    before, known = os.sched_getaffinity(0), tuned_plan.num_runnable
    os.sched_setaffinity(0, {min(before)})
    tuned_plan.num_runnable = lambda: num_runnable
    try:
        remembered_choices(directory, "on")
    finally:
        tuned_plan.num_runnable = known
        os.sched_setaffinity(0, before)
    return bool(os.listdir(directory))


@needs_linux
def test_what_ranks_measure_that_share_cores_with_others_is_not_remembered(pair, tmp_path):
    assert pair.run(remembered_on_one_core, str(tmp_path), 5) == [False, False]
    assert any(pair.run(remembered_on_one_core, str(tmp_path), 2))


@needs_linux
def test_the_next_group_begins_with_what_was_measured(pair, tmp_path):
    pair.run(remembered_choices, str(tmp_path), "force")
    [path] = tmp_path.iterdir()
    content = json.loads(path.read_text())
    ways = content["choices"]["2"]
    # As another machine would have chosen.
    ways["broadcast float32 2097152"] = "written by the sender"
    ways["all_reduce sum float32 2097152"] = "a way of a different version"
    path.write_text(json.dumps(content))
    for kinds in pair.run(remembered_choices, str(tmp_path), "on", 8):
        ways, chosen, measured = kinds["broadcast"]
        assert (ways[chosen], measured) == ("written by the sender", 0)
    for kinds in pair.run(remembered_choices, str(tmp_path), "on"):
        assert kinds["broadcast"][2] in (0, 2), "it is held against the default alone"
        assert kinds["all_reduce"][2] > 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "machine": 3, "choices": []}'])
def test_a_damaged_file_is_ignored_and_told_once(tmp_path, monkeypatch, caplog, content):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    TuningCache(2).update({"call": "way"}, is_final=True)
    [path] = tmp_path.iterdir()
    assert TuningCache(2).choice("call") == "way"
    assert TuningCache(3).choice("call") is None
    path.write_text(content)
    for _ in range(2):
        assert TuningCache(2).choice("call") is None
    assert len(caplog.records) <= 1
    TuningCache(2).update({"call": "other way"}, is_final=True)
    assert TuningCache(2).choice("call") == "other way"


def test_what_one_job_alone_has_measured_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    for way, remembered in (("way", None), ("other way", None), ("other way", "other way"), ("way", "other way")):
        TuningCache(2).update({"call": way})
        assert TuningCache(2).choice("call") == remembered
        assert TuningCache(2).choice("call", or_candidate=True) == (remembered or way)


def test_a_file_of_another_machine_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(tmp_path))
    TuningCache(2).update({"call": "way"}, is_final=True)
    [path] = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"machine": "', '"machine": "another '))
    assert TuningCache(2).choice("call") is None


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(tuning_cache.DIRECTORY, str(blocked / "below"))
    for _ in range(2):
        TuningCache(2).update({"call": "way"})
    assert [record.message[:55] for record in caplog.records] == [
        "the measured choices of plans cannot be remembered: [Er"
    ]


def test_a_misspelt_mode_is_answered_with_the_one_that_was_meant(monkeypatch):
    monkeypatch.setenv(TUNING, "cachde")
    with pytest.raises(ValueError, match="got 'cachde'; did you mean cached\\?"):
        tuning_mode()


def test_a_wrong_mode_is_refused(monkeypatch):
    monkeypatch.setenv(TUNING, "always")
    with pytest.raises(ValueError, match="MESHDIST_TUNING must be one of off, cached, on, force, got 'always'"):
        tuning_mode()


def mixed_calls(seed, least_calls):
    """Call in turns what goes in several ways: async or not, with strides or not, as each rank likes."""
    alike, mine = np.random.default_rng(seed), np.random.default_rng([seed, dist.get_rank()])
    rank, size, works = dist.get_rank(), dist.get_world_size(), []
    with measuring(least_calls) as group:
        for turn in range(400):
            count = int(alike.choice([4096, 5000, 70_000]))
            taken = np.full((size, 2 * count), -1.0, np.float32)[:, :: int(mine.choice([1, 2]))][:, :count]
            given = np.repeat(np.arange(size) + 10 * rank + turn, count).reshape(size, count).astype(np.float32)
            if alike.random() < 0.2:
                call, due = partial(group.broadcast, given if rank == 1 else taken, 1), np.arange(size) + 10 + turn
            else:
                call, due = partial(group.all_to_all_single, taken, given), 10 * np.arange(size) + rank + turn
            work = call(async_op=True) if mine.random() < 0.3 else call()
            works.append((work if hasattr(work, "wait") else None, given if call.args[0] is given else taken, due))
            while len(works) > mine.integers(3):
                work, array, due = works.pop(0)
                if work is not None:
                    work.wait()
                assert np.array_equal(array, np.broadcast_to(due[:, None], array.shape)), turn
        return [(choice.kind, choice.most_bytes, choice.chosen) for choice in group.usable_backend("test").choices()]


@needs_linux
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("least_calls", [tuning._LEAST_CALLS, 40, 3])
def test_however_each_rank_calls_all_count_the_same_calls(worlds, size, least_calls):
    first, *others = worlds.world("gloo", size).run(mixed_calls, 3, least_calls)
    assert others == [first] * (size - 1)


def moved_apart():
    """Call until a way is chosen; then again once the ranks have no common cache, and once they have one."""
    x = np.ones(200_000, np.float32)
    with measuring() as group:
        backend = group.usable_backend("test")

        def chosen_after(calls, is_far):
            for _ in range(calls):
                group.broadcast(x, 0)
            assert backend._shm.tuning.is_far == is_far
            [choice] = [choice for choice in backend.choices() if len(choice.ways) > 1 and choice.is_far == is_far]
            return choice.chosen, len(choice.seconds)

        near = chosen_after(400, False)
        with far_from(-1):
            far = chosen_after(700, True)
        return near, far, chosen_after(450, False)


def test_a_run_is_not_continued_where_it_was_left():
    choices = Tuning(Mode.ON, None)
    near = choices.trials("call", 8 << 20, ["guess", "other"])
    near.add(10, None)
    near.ended((0, 0), (1, 0))  # the first of a way
    assert not near.ended((10, 0), (14, 0))
    choices.moved(is_far=True)
    assert choices.trials("call", 8 << 20, ["guess", "other"]) is not near
    choices.moved(is_far=False)
    assert choices.trials("call", 8 << 20, ["guess", "other"]) is near
    assert not near.ended((900, 0), (904, 0)), "the first again"
    assert [near.ended((begin, 0), (begin + 4, 0)) for begin in (910, 920, 930)] == [False, False, True]
    assert near.take_run() == (3, [910, 934], 0)


@needs_linux
@pytest.mark.skipif(core.module is None, reason="without the core, the distance is not measured")
@pytest.mark.parametrize("size", [2, 3])
def test_there_is_a_choice_for_each_distance(worlds, size):
    first, *others = worlds.world("gloo", size).run(moved_apart)
    assert others == [first] * (size - 1)
    near, far, near_again = first
    assert None not in (near[0], far[0])
    assert far[1] > 1, "all ways are measured anew"
    assert near_again == near, "and no ways are where they have been"
