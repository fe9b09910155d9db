"""Slurm's nodelists, written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshdist.cluster import expand_nodelist


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("node[1-3,7],gpu-05", ["node1", "node2", "node3", "node7", "gpu-05"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[5]", ["n5"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib,a.b-c_d", ["n1-ib", "n2-ib", "a.b-c_d"]),
        ("[1-2]", ["1", "2"]),
        ("b,a", ["b", "a"]),
    ],
)
def test_written_out_in_order(text, nodes):
    assert expand_nodelist(text) == nodes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a host name at its end"),
        ("a,", "expected a host name at its end"),
        (",a", "did not expect ',' at character 1"),
        ("a,,b", "did not expect ',' at character 3"),
        ("n[1-3", r"did not expect '\[' at character 2"),
        ("n1]", r"did not expect '\]' at character 3"),
        ("n[[1]]", r"did not expect '\[' at character 2"),
        ("n[]", "got ''"),
        ("n[1-]", "got '1-'"),
        ("n[a-c]", "got 'a-c'"),
        ("n[1,,2]", "got ''"),
        ("n[3-1]", "the range 3-1 ends before it begins"),
        ("n[1-99999999999]", "is too long"),
        ("a[1-2000]b[1-2000]", "more than 1000000 hosts"),
    ],
)
def test_what_is_no_nodelist_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        expand_nodelist(text)


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1, max_size=9))
def test_plain_names_stay(names):
    assert expand_nodelist(",".join(names)) == names


@given(st.text(alphabet="n0123[]-,", max_size=12))
def test_any_text_is_expanded_or_refused(text):
    try:
        nodes = expand_nodelist(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(nodes)
        assert not set("[],") & set("".join(nodes))
