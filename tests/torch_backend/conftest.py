"""Worlds of torch.distributed over Gloo and over backend meshdist."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from both_backends import BothBackends


@pytest.fixture(scope="session")
def both_backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothBackends]:
    """Worlds of both backends; a test that asks for them is skipped where there is no torch."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed; pip install 'meshdist[torch]'")
    worlds = BothBackends(tmp_path_factory.mktemp("torch"))
    yield worlds
    worlds.close()
