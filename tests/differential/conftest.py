"""Worlds of torch.distributed, beside those of meshdist that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from torch_worlds import TorchWorlds

NO_TORCH = "torch is not installed; pip install torch==2.13.0"


@pytest.fixture(scope="session")
def torch_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchWorlds]:
    """Worlds of torch.distributed over Gloo; a test that asks for them is skipped where there is no torch."""
    if find_spec("torch") is None:
        pytest.skip(NO_TORCH)
    worlds = TorchWorlds(tmp_path_factory.mktemp("torch"))
    yield worlds
    worlds.close()
