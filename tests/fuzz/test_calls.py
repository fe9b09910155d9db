"""Any call, right or wrong, on any rank: it is right on all ranks, or an error on all, and nothing else is touched.

Never a hang: no example may reach the timeout of its group. MESHDIST_FUZZ_EXAMPLES sets the number of examples of each
test; where it is set they are new ones in every run.
"""

from __future__ import annotations

import os
import sys

import calls
import pytest
from attempts import SPOILS, Completion, Example, attempt
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from worlds import BACKENDS

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(3600 if "MESHDIST_FUZZ_EXAMPLES" in os.environ else 120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
fuzz = settings(
    max_examples=int(os.environ.get("MESHDIST_FUZZ_EXAMPLES", "80")),
    derandomize="MESHDIST_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "longdouble"]
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
# The large ones take the other ways of moving data.
SHAPES = [(), (0,), (1,), (3,), (2, 3), (0, 4), (3, 0), (1025,), (9000,), (40_000,), (300, 70)]
LAYOUTS = ["plain", "plain", "every second", "swapped"]


def rows(size: int) -> st.SearchStrategy:
    row = st.tuples(*[st.sampled_from([0, 1, 2, 5, 2000])] * size)
    return st.one_of(st.none(), st.tuples(*[row] * size))


@st.composite
def cases(draw: st.DrawFn, size: int) -> calls.Case:
    collective = draw(st.sampled_from(calls.COLLECTIVES))
    shape = draw(st.sampled_from(SHAPES))
    if collective == "all_to_all_single" and not shape:
        shape = (3,)
    return calls.Case(
        collective,
        draw(st.sampled_from(DTYPES)),
        shape,
        draw(st.sampled_from(OPS)),
        draw(st.integers(0, size - 1)),
        draw(rows(size)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )


@st.composite
def examples(draw: st.DrawFn, world_size: int) -> Example:
    ranks = st.permutations(range(world_size))
    members = tuple(draw(ranks)[: draw(st.integers(2, world_size))])
    size = len(members)
    return Example(
        draw(cases(size)), members, tuple(draw(st.sampled_from(LAYOUTS)) for _ in members), draw(st.booleans())
    )


@st.composite
def changes(draw: st.DrawFn, case: calls.Case, size: int) -> tuple:
    """Return what is different on one rank: the call, one of its arrays, or one of its other arguments."""
    kind = draw(st.sampled_from(["case", "give", "take", "how"]))
    if kind in ("give", "take"):
        return kind, draw(st.sampled_from(SPOILS)), draw(st.integers(0, 3))
    if kind == "how":
        name = draw(st.sampled_from(["op", "root", "input_split_sizes", "output_split_sizes"]))
        wrong = [None, "mean", 3, -1, 99, 1.5, "0", [1], [1, -1], [1.5] * size, [0] * size, [10**9] * size]
        return kind, name, draw(st.sampled_from(wrong))
    of_objects = case.collective.endswith(("object", "object_list"))
    fields = {
        "root": st.integers(0, size - 1),
        "num_arrays": st.integers(1, 3),
        "op": st.sampled_from(OPS),
        "rows": rows(size),
    }
    if not of_objects:
        fields |= {"shape": st.sampled_from(SHAPES[1:]), "dtype": st.sampled_from(DTYPES)}
    if case.collective == "message":
        del fields["root"]  # who waits for a message that nobody sends, waits; that is no disagreement
    else:
        others = [name for name in calls.COLLECTIVES if name != "message"]
        fields["collective"] = st.sampled_from(others)
    name = draw(st.sampled_from(sorted(fields)))
    value = draw(fields[name])
    if name == "collective" and value == "all_to_all_single" and not case.shape:
        return kind, (("collective", value), ("shape", (3,)))
    return kind, ((name, value),)


of_each_backend = pytest.mark.parametrize("backend", BACKENDS)


@of_each_backend
@pytest.mark.parametrize("size", [2, 3])
@given(data=st.data())
@fuzz
def test_calls_that_agree(worlds, backend, size, data):
    example = data.draw(examples(size), label="example")
    outcomes = worlds.world(backend, size).run(attempt, example)
    judge(example, outcomes)
    case = example.case
    is_right = case.collective not in calls.REDUCING or calls.is_defined(case.op, calls.dtype_of(case.dtype))
    assert {outcomes[rank].kind for rank in example.members} == {None if is_right else TypeError}, outcomes


@of_each_backend
@pytest.mark.parametrize("size", [2, 3])
@given(data=st.data())
@fuzz
def test_calls_that_do_not(worlds, backend, size, data):
    example = data.draw(examples(size), label="example")
    places = data.draw(st.lists(st.integers(0, len(example.members) - 1), min_size=1, unique=True), label="odd ranks")
    different = tuple((place, data.draw(changes(example.case, len(example.members)))) for place in places)
    example = Example(example.case, example.members, example.layouts, example.globally, different)
    note(f"{example}")
    judge(example, worlds.world(backend, size).run(attempt, example))


def judge(example: Example, outcomes: list[Completion | None]) -> None:
    """Check what became of a call on all ranks."""
    found = [outcomes[rank] for rank in example.members]
    reports = "\n".join(map(str, found))
    for outcome in found:
        assert outcome.kind is not dist.DistTimeoutError, f"a hang\n{reports}"
        assert outcome.after is not dist.DistTimeoutError, f"a hang\n{reports}"
        assert not outcome.touched, reports
        assert not outcome.wrong, reports
        assert outcome.kind in (None, ValueError, TypeError, dist.DistBackendError), reports
        if outcome.kind in (ValueError, TypeError):
            assert not outcome.changed, f"refused, but written\n{reports}"
    # A rank that only gives data returns before the others have come: its next call raises.
    changed = {value for _, change in example.changes for value in change if isinstance(value, str)}
    is_told_later = bool(example.changes and calls.ROOTED.keys() & {example.case.collective, *changed})
    refused = [outcome.kind in (ValueError, TypeError) for outcome in found]
    if not any(outcome.kind for outcome in found) or (all(refused) and example.case.collective != "message"):
        if not (is_told_later and all(outcome.after for outcome in found)):
            assert not any(outcome.after for outcome in found), f"the group is not in step any more\n{reports}"
        return
    assert all(outcome.after for outcome in found), f"broken on some ranks only\n{reports}"
    if not is_told_later and example.case.collective != "message":  # a short message is on its way when send returns
        assert all(outcome.kind for outcome in found), f"an error on some ranks only\n{reports}"
