"""The exceptions: one base, the flag that says who is to blame, and pickling, since they cross processes."""

import pickle

import pytest

import meshdist
from meshdist.errors import CallMade, DistBackendError, DistError, DistNetworkError, DistStoreError, DistTimeoutError

pytestmark = pytest.mark.timeout(30)
CHILDREN = [DistBackendError, DistNetworkError, DistStoreError, DistTimeoutError]


@pytest.mark.parametrize("kind", CHILDREN)
def test_one_base_and_public(kind):
    assert issubclass(kind, DistError)
    assert issubclass(kind, RuntimeError)
    assert getattr(meshdist, kind.__name__) is kind
    with pytest.raises(meshdist.DistError, match="what happened"):
        raise kind("what happened")


@pytest.mark.parametrize("kind", [DistError, *CHILDREN])
@pytest.mark.parametrize("peer_failed", [True, False])
def test_they_pickle(kind, peer_failed):
    error = pickle.loads(pickle.dumps(kind("what happened", peer_failed=peer_failed)))
    assert (type(error), str(error), error.peer_failed) == (kind, "what happened", peer_failed)


def test_the_cause_is_here_unless_said():
    assert DistBackendError("a rank died").peer_failed is False


def test_the_call_that_failed_in_words():
    made = CallMade("call", 18, "train.py:42", peers_last=17)
    assert str(made) == "its last was call 17, this is call 18, at train.py:42"


def test_advice_follows_the_line_of_the_call():
    error = DistBackendError("rank 0 sent float32[5]", hang_report="  who waits")
    error.advice = "call probe first"
    error.locate("recv on group 'world'", CallMade("message", 1, "train.py:42"))
    expected = "recv on group 'world': rank 0 sent float32[5]; this is message 1, at train.py:42; call probe first\n"
    assert str(error) == f"{expected}  who waits"
