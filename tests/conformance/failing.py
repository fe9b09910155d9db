"""Checks of what raises."""

import pytest


def fails(error, call, *words):
    """Check that `call` raises, and what it says."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
