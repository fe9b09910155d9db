"""A worker: a process that is one rank of a notebook and runs its cells.

    python -m meshdist.notebook.cell_worker FD PARENT_PID

Requests come through the socket FD; the worker ends when it is closed. Cells print to the worker's standard output.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from io import BytesIO
from multiprocessing.connection import Connection
from types import FrameType, ModuleType
from typing import Any

import meshdist
from meshdist.debug.hang_watchdog import watchdog_of
from meshdist.debug.user_traceback import traceback_text, without_leading
from meshdist.errors import DistError
from meshdist.groups.world import World, world_in
from meshdist.launch.failures import follows_from_peer
from meshdist.launch.worker import die_with_parent, write_whole_lines
from meshdist.lifecycle import abort_world
from meshdist.mesh import show
from meshdist.notebook.cell_values import drawn_figures, rich_forms, variables_of_the_world
from meshdist.notebook.kept_world import NOT_FAILED, RankState, calls_at_rest, num_messages, place_of
from meshdist.notebook.magic_options import Axes
from meshdist.runtime.context import current_slot

# From when on a wait is examined, to tell at once of a rank that has finished the cell.
_DETECTS_FROM_S = 0.1

# What became of the groups of a world that the workers have left.
_OF_EARLIER_WORLD = (
    "belongs to an earlier world: a cell failed or changed the backend since, and the workers have formed a new world;"
    ' create this group, slice or array again, a slice as in `dp = mesh["dp"]`'
)

# Filled while a cell runs.
_PICTURES: ContextVar[list[bytes] | None] = ContextVar("pictures", default=None)


@dataclass(frozen=True)
class Cell:
    """A request to run a cell."""

    number: int  # of the cell among those of the workers
    name: str  # file name of the cell in tracebacks
    source: str
    axes: Axes  # axes of the mesh that the cell finds as `mesh`
    sent: bytes | None  # pickled variables for the cell; None for none
    get: tuple[str, ...]  # names of the variables to return


@dataclass(frozen=True)
class Joining:
    """A request to join a world, after `number` earlier ones."""

    number: int
    world_size: int
    backend: str
    timeout_s: float


@dataclass(frozen=True)
class Abandon:
    """A request to end the world after a cell has failed here, which has no answer: other ranks may wait for it."""


@dataclass(frozen=True)
class Answer:
    status: str  # "done", "raised" or "interrupted"
    text: str = ""  # the traceback of an exception
    summary: str = ""  # the exception at the end of the traceback, without notes and without who waits for whom
    is_consequence: bool = False  # the exception follows from another rank's failure
    values: bytes | None = None  # the pickled variables that were requested
    pictures: tuple[bytes, ...] = ()  # the matplotlib figures that the cell has shown or left open, as PNG files
    shown: dict[str, Any] | None = None  # the forms of the last expression, if it has others than text
    of_the_world: tuple[str, ...] = ()  # names of variables that are, or hold, groups and meshes of the world
    state: RankState = field(default_factory=RankState)  # of a rank that has run a cell


class Worker:
    """Runs cells in one namespace, on requests from a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_running = False
        self._failed_with: BaseException | None = None  # the exception of the last cell
        self._state = RankState()
        self._store: meshdist.Store | None = None
        self._mesh_axes: Axes = ()
        self._mesh: meshdist.DeviceMesh | None = None  # made for the cells, not by them
        self._shown: dict[str, Any] | None = None
        self._main = ModuleType("__main__")  # functions of cells are pickled as those of a script
        sys.modules["__main__"] = self._main
        vars(self._main).update(dist=meshdist, np=sys.modules["numpy"])

    def serve(self) -> None:
        """Answer requests until the connection is closed."""
        signal.signal(signal.SIGINT, self._interrupt)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = pickle.loads(self._connection.recv_bytes())
                if isinstance(request, Abandon):
                    self._leave_world(self._failed_with)
                    continue
                self._failed_with, self._state = None, RankState()
                answer = self._answer(request)
                if isinstance(request, Cell):
                    answer = replace(answer, of_the_world=self._of_the_world(), state=self._state)
                self._connection.send_bytes(pickle.dumps(answer))

    def _of_the_world(self) -> tuple[str, ...]:
        variables = dict(vars(self._main))
        if variables.get("mesh") is self._mesh:  # other names of this mesh, such as an only axis, are not made again
            variables.pop("mesh", None)
        return variables_of_the_world(variables)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:  # otherwise it came after the cell
            self._is_running = False
            raise KeyboardInterrupt

    def _answer(self, request: Cell | Joining | list[str]) -> Answer:
        try:
            try:
                self._is_running, self._shown = True, None
                with drawn_pictures() as pictures:
                    values = self._do(request)
            finally:
                self._is_running = False
            return Answer("done", values=values, pictures=tuple(pictures), shown=self._shown)
        except KeyboardInterrupt as error:
            self._leave_world(error)
            return Answer("interrupted", summary="KeyboardInterrupt")
        except BaseException as error:  # the notebook shows any exception
            self._failed_with = error
            if not isinstance(request, Cell):
                self._leave_world(error)
            return Answer("raised", _text(error), _summary(error), follows_from_peer(error))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _leave_world(self, error: BaseException | None = None) -> None:
        """End the world, if there is one; other ranks that wait for this one get its exception."""
        world = world_in(current_slot())
        if world is not None:
            abort_world(world, "it raised" if error else "the workers form a new world", error, _OF_EARLIER_WORLD)

    def _do(self, request: Cell | Joining | list[str]) -> bytes | None:
        if isinstance(request, list):
            sys.path[:] = request
        elif isinstance(request, Joining):
            self._join(request)
        else:
            return self._run(request)
        return None

    def _join(self, joining: Joining) -> None:
        self._leave_world()
        if self._store is None:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = meshdist.TCPStore(*place, is_master=False)
        store = meshdist.PrefixStore(f"world/{joining.number}", self._store)
        rank = int(os.environ["RANK"])
        meshdist.init_process_group(
            joining.backend, store=store, rank=rank, world_size=joining.world_size, timeout=joining.timeout_s
        )
        self._mesh_axes = ()
        vars(self._main).update(rank=rank, world_size=joining.world_size)
        vars(self._main).pop("mesh", None)

    def _run(self, cell: Cell) -> bytes | None:
        world = _begin_phase(cell.number)
        before, failed_at = num_messages(world), NOT_FAILED
        try:
            self._carry_out(cell)
        except BaseException as error:
            failed_at = place_of(error, cell.name)
            raise
        finally:
            self._state = RankState(failed_at, calls_at_rest(world_in(current_slot()), before))
        if world is not None and world_in(current_slot()) is world:
            with contextlib.suppress(DistError):  # the next call notices the loss of the store
                watchdog_of(world).detector.end_phase("cell")
        return _pickled(vars(self._main), cell.get) if cell.get else None

    def _carry_out(self, cell: Cell) -> None:
        variables = vars(self._main)
        if cell.sent is not None:
            variables.update(pickle.loads(cell.sent))
        if cell.axes and cell.axes != self._mesh_axes:
            names, sizes = zip(*cell.axes, strict=True)
            variables["mesh"] = self._mesh = meshdist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
            self._mesh_axes = cell.axes
        linecache.cache[cell.name] = len(cell.source), None, cell.source.splitlines(keepends=True), cell.name
        body = ast.parse(cell.source, cell.name)
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        try:
            exec(compile(body, cell.name, "exec"), variables)
            if isinstance(last, ast.Expr):
                self._show(eval(compile(ast.Expression(last.value), cell.name, "eval"), variables))
        except NameError as error:
            if error.name == "mesh" and not cell.axes:
                error.args = (f"{error}; %%mesh --axes creates it",)
            raise

    def _show(self, value: Any) -> None:
        """Show the last expression of a cell as Jupyter does: as a picture or HTML if it has one, else as text."""
        if value is None:
            return
        figures = drawn_figures(value)
        if figures is not None:
            # Each once: a second layout may differ from the first.
            drawn = draw_figures()
            for figure in figures:
                if not any(figure is other for other in drawn):
                    _draw(figure)
            return
        self._shown = rich_forms(value)
        if self._shown is None:
            print(repr(value))


def _begin_phase(number: int) -> World | None:
    """Have ranks raise that wait, in a cell, for one that has ended it; return the world."""
    world = world_in(current_slot())
    if world is not None:
        watchdog = watchdog_of(world)
        watchdog.detects_from_s = _DETECTS_FROM_S
        watchdog.detector.begin_phase(number)
    return world


@contextmanager
def drawn_pictures() -> Iterator[list[bytes]]:
    """Yield a list that contains, after the block, the matplotlib figures that it showed or left open, as PNG files.

    The figures are closed. After an exception, open figures are closed without being drawn.
    """
    pictures: list[bytes] = []
    token = _PICTURES.set(pictures)
    try:
        yield pictures
        draw_figures()
    finally:
        _PICTURES.reset(token)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close("all")


def draw_figures() -> list[Any]:
    """Draw all open figures into the list of the block, close and return them; without a list, leave them open."""
    pyplot, pictures = sys.modules.get("matplotlib.pyplot"), _PICTURES.get()
    if pyplot is None or pictures is None:  # no figures, or called from a thread of the cell
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    for figure in figures:
        _draw(figure)
        pyplot.close(figure)
    return figures


def _draw(figure: Any) -> None:
    """Add a picture of a figure to the list of the block, unless it is there."""
    pictures = _PICTURES.get()
    file = BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    if pictures is not None and file.getvalue() not in pictures:
        pictures.append(file.getvalue())


def _pickled(variables: dict[str, Any], names: tuple[str, ...]) -> bytes:
    import cloudpickle

    missing = [name for name in names if name not in variables]
    if missing:
        raise NameError(f"%%mesh --get: this rank has no variable {', '.join(map(repr, missing))}")
    try:
        pickled: bytes = cloudpickle.dumps({name: variables[name] for name in names})
    except Exception as error:  # pickling may run any code of the objects
        raise TypeError(f"%%mesh --get {','.join(names)}: cannot be pickled: {error}") from None
    return pickled


def _text(error: BaseException) -> str:
    """Return the traceback of an exception without the frames of this module, and others of the package if it can."""
    frames = without_leading(error.__traceback__)
    if frames is None:
        return "".join(traceback.format_exception_only(error))
    return traceback_text(error, frames)


def _summary(error: BaseException) -> str:
    """Return the exception without its notes, and without who waits for whom, whose times differ from rank to rank."""
    described = traceback.TracebackException(type(error), error, None)
    vars(described)["__notes__"] = None
    summary = list(described.format_exception_only())[-1].strip()
    if isinstance(error, DistError) and error.hang_report:
        summary = summary.replace(f"\n{error.hang_report}", "")
    return summary


def main() -> None:
    fd, parent_pid = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until there is a cell to interrupt
    die_with_parent(parent_pid)
    write_whole_lines()
    show.marks_me = False
    Worker(Connection(fd)).serve()


if __name__ == "__main__":
    # Run the module under its own name, since pickles to and from the notebook refer to it.
    from meshdist.notebook.cell_worker import main as main_of_the_module

    main_of_the_module()
