"""Settings of the tests of parsers, and what those get: bytes and documents that were right, with something wrong."""

import copy
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LIMIT_S = 36_000 if "MESHDIST_FUZZ_EXAMPLES" in os.environ else 60
fuzz = settings(
    max_examples=int(os.environ.get("MESHDIST_FUZZ_EXAMPLES", "100")),
    derandomize="MESHDIST_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    print_blob=True,
)


@st.composite
def changed(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return bytes that were right, with some replaced, cut off or added."""
    data = bytearray(whole)
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=4)):
        data[place] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=20))


def outcome(parse, errors=ValueError):
    """Return what was read, or None and what is said to be wrong; any other error is the test's."""
    try:
        return parse(), ""
    except errors as error:
        return None, str(error)


NUMBERS = [0, 1, -1, 2, 7, 2**31, 2**62, 2**63, 2**64, 10**30, 10**400, 0.5, 1e300, True, None]
WORDS = ["", "x", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "float64", "object", "V8", "int4", "F32", "x" * 300]
WORDS += ["dict", "value", "array", "per_rank", "x.rank99999", "x.rank9999999999", "__metadata__"]
OTHERS = [[], {}, [[]], [0, 2**62], [2**40, 2**40], [[0, 1]], ["dict", []], ["value", ["bytes", "?"]], [1] * 70, [-1]]
ABSURD = st.one_of(
    st.sampled_from(NUMBERS + WORDS + OTHERS).map(copy.deepcopy),
    st.integers(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 9), max_size=3),
)


@st.composite
def altered(draw: st.DrawFn, document):
    """Return plain data that was right, with up to three parts replaced, left out or added."""
    made = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        place, key = made, 0
        while isinstance(place[key], (dict, list)) and place[key] and draw(st.integers(0, 5)):
            inner = place[key]
            keys = sorted(inner, key=repr) if isinstance(inner, dict) else range(len(inner))
            place, key = inner, draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if how == "remove" and place is not made:
            del place[key]
        elif how == "add" and isinstance(place[key], dict):
            place[key][draw(st.sampled_from(WORDS))] = draw(ABSURD)
        elif how == "add" and isinstance(place[key], list):
            place[key].append(draw(ABSURD))
        else:
            place[key] = draw(ABSURD)
    return made[0]


# Where Python's parser of JSON gives up.
DEEP = b"[" * 100_000
