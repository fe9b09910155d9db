"""What all tests share: the worlds of the session."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from mpi_worlds import WORLDS as MPI_WORLDS
from worlds import BACKENDS, SIZES_OF, World, Worlds, needs_linux

SIZES = (1, 2, 3, 4, 5)
# For the doctests of these files, of which there are none, pytest would import each as the module "conftest".
collect_ignore_glob = ["*conftest.py"]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def _param(backend: str, size: int) -> object:
    marks = () if backend == "threads" else (needs_linux,)
    return pytest.param((backend, size), id=f"{backend}-{size}", marks=marks)


def _params(sizes: tuple[int, ...]) -> list[object]:
    ours = [_param(backend, size) for backend in BACKENDS for size in sizes if size in SIZES_OF.get(backend, SIZES)]
    return ours + [_param(backend, size) for backend, size in MPI_WORLDS if size in sizes]


@pytest.fixture(params=_params(SIZES))
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of each backend, each way that gloo moves data, and each size."""
    return worlds.world(*request.param)


@pytest.fixture(params=_params(SIZES[1:]))
def world_of_several(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of each kind that has somebody to send to."""
    return worlds.world(*request.param)


@pytest.fixture(params=_params((3,)))
def world_of_3(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of three ranks, of each backend and each way that gloo moves data."""
    return worlds.world(*request.param)


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the test itself may listen on it
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
