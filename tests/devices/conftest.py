"""The stand-ins for CuPy and NCCL, and where a GPU is, the real ones."""

from __future__ import annotations

import sys

import pytest
import standin_cupy
import standin_nccl

import meshdist as dist
from meshdist.backends.nccl.library import CupyLibrary, no_nccl
from meshdist.system.platform import num_gpus


@pytest.fixture(scope="session")
def gpus():
    """Skip a test that needs more GPUs than there are: call it with how many."""

    def need(number):
        lacks = no_nccl()
        if lacks is not None:
            pytest.skip(f"no CUDA device to test on: {lacks}")
        if num_gpus() < number:
            pytest.skip(f"needs {number} GPUs, and there are {num_gpus()}")

    return need


@pytest.fixture
def nccl_version(gpus):
    """The version of the real NCCL."""
    gpus(1)
    return CupyLibrary().version()


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in for CuPy, as the module `cupy`. After the test nothing has raced."""
    module = standin_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    standin_cupy.MACHINE.races.clear()
    standin_cupy.MACHINE.fault = 0
    yield module
    assert standin_cupy.MACHINE.races == []


@pytest.fixture
def standin(cupy):
    """The stand-in for NCCL; backend "standin" is backend nccl on it."""
    dist.Backend.register_backend("standin", standin_nccl.engine, extended_api=True, devices="cuda")
    standin_nccl.STANDIN.clear()
    yield standin_nccl.STANDIN
    assert standin_nccl.STANDIN.problems == []
