"""The stand-ins for CuPy and NCCL, and where a GPU is, the real ones."""

from __future__ import annotations

import sys

import pytest
import standin_cupy
import standin_nccl

import meshdist as dist

collect_ignore_glob = ["*conftest.py"]


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, as the module `cupy`. After the test nothing has raced."""
    module = standin_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    standin_cupy.MACHINE.races.clear()
    yield module
    assert standin_cupy.MACHINE.races == []


@pytest.fixture
def standin(cupy):
    """The stand-in for NCCL; backend "standin" is backend nccl on it."""
    dist.Backend.register_backend("standin", standin_nccl.engine, extended_api=True, devices="cuda")
    standin_nccl.STANDIN.clear()
    return standin_nccl.STANDIN
