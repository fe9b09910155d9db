"""What all tests share: the worlds of the session."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import selection
from hypothesis import settings
from mpi_worlds import WORLDS as MPI_WORLDS
from worlds import BACKENDS, SIZES_OF, World, Worlds, needs_linux

# A backend runs in the usual ones, or in those of `SIZES_OF`.
SIZES, USUAL = (1, 2, 3, 4, 5), (1, 2, 3, 5)

# Each of the hundreds of interpreters that tests start would compile the package anew, and pytest all tests.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# Collecting makes a million objects that stay. Until it is done, and from then on, nobody looks for garbage among them.
gc.disable()

# For the processes of pytest-xdist and whatever they start: they fill the processors by themselves, and threads of
# OpenBLAS that wait for each other in turns of the processors spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("tests", deadline=None, max_examples=50)  # a busy machine takes its time
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    # The order is that of `pytest_collection_modifyitems`; otherwise pytest-xdist takes the number of tests alone.
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    selection.mark(items)
    yield
    if hasattr(config, "workerinput"):
        selection.sort(items)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_choices(tmp_path_factory: pytest.TempPathFactory) -> None:
    # What tests measure is not remembered for the user, nor for the next run.
    os.environ["MESHDIST_CACHE_DIR"] = str(tmp_path_factory.mktemp("choices"))


@pytest.fixture(autouse=True)
def _debug_level_stays() -> Iterator[None]:
    # A level that a test sets holds for the process, and comes before that of the environment.
    logger = logging.getLogger("meshdist")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make stdout a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return of


@pytest.fixture
def torch() -> ModuleType:
    """The package; a test that asks for it is skipped where it is not installed."""
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def _param(backend: str, size: int) -> object:
    marks = [] if backend == "threads" else [needs_linux]
    if _is_slow(backend, size):
        marks.append(pytest.mark.slow)
    return pytest.param((backend, size), id=f"{backend}-{size}", marks=marks)


def _is_slow(backend: str, size: int) -> bool:
    # On two processors, larger worlds take most of the time. A world of one shows the same on threads.
    return backend == "gloo-slots" or size > 3 or (backend, size) == ("gloo", 1)


def _params(sizes: tuple[int, ...]) -> list[object]:
    ours = [_param(backend, size) for backend in BACKENDS for size in sizes if size in SIZES_OF.get(backend, USUAL)]
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
