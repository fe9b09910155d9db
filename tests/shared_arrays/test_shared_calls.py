"""Collectives on shared arrays: they do what they do on ordinary ones, whatever the ranks pass."""

from __future__ import annotations

import os
import sys

import calls
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_programs import ORDINARY, SHARED, STRIDED, VIEW, Example, random_sums, wrong_outputs

pytestmark = [
    pytest.mark.timeout(3600 if "MESHDIST_FUZZ_EXAMPLES" in os.environ else 120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
fuzz = settings(
    max_examples=int(os.environ.get("MESHDIST_FUZZ_EXAMPLES", "60")),
    derandomize="MESHDIST_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Most are long enough to go through shared arrays; the elements of some divide by no number of ranks.
SHAPES = [(1,), (9000,), (70_003,), (301, 300), (150_001,)]
DTYPES = ["uint8", "int16", "float32", "float64", "complex64"]
OF_BLOCKS = [name for name in calls.OF_ARRAYS if "multigpu" not in name and name != "message"]


@st.composite
def examples(draw: st.DrawFn, size: int) -> Example:
    # All alike in half of the cases: on random kinds, hardly any call goes all through shared arrays.
    def kinds() -> tuple[str, ...]:
        if draw(st.booleans()):
            return (draw(st.sampled_from([SHARED, VIEW])),) * size
        return tuple(draw(st.sampled_from([SHARED, VIEW, STRIDED, ORDINARY])) for _ in range(size))

    dtype, op = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(["sum", "max", "avg", "product"]))
    row = st.tuples(*[st.sampled_from([0, 1, 5000, 20_000])] * size)
    case = calls.Case(
        draw(st.sampled_from(OF_BLOCKS)),
        dtype,
        draw(st.sampled_from(SHAPES)),
        op if calls.is_defined(op, calls.dtype_of(dtype)) else "sum",
        draw(st.integers(0, size - 1)),
        draw(st.one_of(st.none(), st.tuples(*[row] * size))),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    if case.collective == "all_to_all_single" and case.rows is not None:
        case = calls.Case(**{**case.__dict__, "shape": (1, 3)})
    return Example(case, kinds(), kinds(), draw(st.booleans()))


@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_whatever_the_ranks_pass(worlds, backend, size):
    world = worlds.world(backend, size)

    @fuzz
    @given(examples(size))
    def check(example: Example) -> None:
        assert world.run(wrong_outputs, example) == [[]] * size

    check()


@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
@pytest.mark.parametrize("kinds", [(SHARED, ORDINARY, SHARED, SHARED), (SHARED, VIEW, SHARED, SHARED)])
@pytest.mark.parametrize("collective", OF_BLOCKS)
def test_four_ranks(worlds, backend, kinds, collective):
    for number, exceeds_caches in enumerate((False, True)):
        case = calls.Case(collective, "int32", (100_003 + number,), root=1)
        example = Example(case, kinds, kinds, exceeds_caches)
        assert worlds.world(backend, 4).run(wrong_outputs, example) == [[]] * 4


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("collective", OF_BLOCKS)
@pytest.mark.slow
def test_some_shared_on_one_of_two_hosts(worlds, collective, op):
    """What the ranks of a host do of a call is compared as that call, whichever of its ways a rank has taken."""
    kinds = (SHARED, ORDINARY, SHARED, SHARED)
    case = calls.Case(collective, "float64", (300_007,), op, root=1)
    assert worlds.world("gloo-hosts", 4).run(wrong_outputs, Example(case, kinds, kinds)) == [[]] * 4


@pytest.mark.parametrize("backend", ["gloo", "gloo-slots"])
@pytest.mark.parametrize("count", [5000, 100_003, 1_200_001])
def test_sums_of_floats_do_not_depend_on_where_they_lie(worlds, backend, count):
    assert worlds.world(backend, 4).run(random_sums, count, 7) == [[]] * 4
