"""Pool: the workers of a notebook, which run one cell after the other."""

from __future__ import annotations

import contextlib
import pickle
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.launch.env import LOOPBACK, job_secret, new_job
from meshdist.notebook.options import Axes
from meshdist.notebook.process import WorkerProcess
from meshdist.notebook.worker import Answer, Cell, Joining
from meshdist.store import TCPStore
from meshdist.systems import check_processes

_START_S = 60.0
_TICK_S = 0.1


@dataclass
class Outcome:
    """What became of a cell.

    Attributes:
        answers: Of the ranks that gave one.
        ended: How the others ended.
        not_begun: Those of them that had ended before they took the cell up.
        interrupted: Somebody interrupted it.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    not_begun: set[int] = field(default_factory=set)
    interrupted: bool = False

    @property
    def is_good(self) -> bool:
        """Whether all ranks have run the cell to its end."""
        return not self.ended and all(answer.status == "done" for answer in self.answers.values())

    def values(self) -> dict[str, list[Any]]:
        """Return the variables that were asked for, by name, as lists by rank."""
        by_rank = [pickle.loads(self.answers[rank].values or b"") for rank in sorted(self.answers)]
        return {name: [values[name] for values in by_rank] for name in by_rank[0]}

    def pictures(self) -> dict[bytes, list[int]]:
        """Return the pictures that the ranks have drawn, as PNG files, and which ranks have drawn each."""
        ranks_by_picture: dict[bytes, list[int]] = {}
        for rank, answer in sorted(self.answers.items()):
            for picture in dict.fromkeys(answer.pictures):
                ranks_by_picture.setdefault(picture, []).append(rank)
        return ranks_by_picture


class Pool:
    """Worker processes on this host that are the ranks of one world.

    A worker that ends is replaced before the next cell. After a cell that went wrong on any rank, all join a new world:
    the variables of the workers stay, their groups do not.

    Args:
        size: How many workers.
        backend: Of their world.
        timeout_s: How long a call of theirs may wait.
        show: Is given each line that a worker prints, and its rank.
        grace_s: How long an interrupted worker may take before it is killed.
        tell_replaced: Is given the rank of each worker that had ended between two cells, and how it had.

    Raises:
        DistError: On this system, ranks cannot be processes.
    """

    def __init__(
        self,
        size: int,
        backend: str,
        timeout_s: float,
        show: Callable[[int, str], None],
        grace_s: float = 5.0,
        tell_replaced: Callable[[int, str], None] = lambda rank, how: None,
    ) -> None:
        check_processes("%%mesh")
        self.size = size
        self.backend = backend
        self._timeout_s = timeout_s
        self._show = show
        self._grace_s = grace_s
        self._tell_replaced = tell_replaced
        self._replaced: list[tuple[int, str]] = []
        self._num_cells = 0
        self._num_worlds = 0
        self._is_joined = False
        secret = job_secret()
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, secret=secret.encode())
        self._job = new_job(size, secret, LOOPBACK, self._store.port)
        self._workers: dict[int, WorkerProcess] = {}

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [self._workers[rank].pid for rank in sorted(self._workers)]

    @property
    def ended(self) -> dict[int, str]:
        """How the workers ended that the next cell will replace, by rank."""
        return {rank: worker.how_it_ended() for rank, worker in self._workers.items() if worker.connection.poll()}

    @property
    def replaced(self) -> list[tuple[int, str]]:
        """The ranks of all workers that ended before, in this order, and how each ended."""
        return list(self._replaced)

    def start(self) -> None:
        """Have all workers there, and in a world, as `run` would.

        Raises:
            DistError: The workers could not be started, or could not meet.
        """
        with _ctrl_c_noted() as is_interrupted:
            self._get_ready(is_interrupted)

    def meet_anew(self, backend: str, timeout_s: float) -> None:
        """Have all workers meet in a new world, of another backend or timeout; their variables stay.

        Raises:
            DistError: They could not meet; the next cell has backend and timeout of those before.
        """
        before = self.backend, self._timeout_s
        self.backend, self._timeout_s, self._is_joined = backend, timeout_s, False
        try:
            self.start()
        except BaseException:
            (self.backend, self._timeout_s), self._is_joined = before, False
            raise

    def run(self, source: str, axes: Axes = (), sent: bytes | None = None, get: tuple[str, ...] = ()) -> Outcome:
        """Run a cell on all workers and return what became of it.

        Args:
            source: Its text.
            axes: Names and sizes of the mesh that it finds as `mesh`.
            sent: Variables for it: a pickled dict.
            get: Variables that `Outcome.values` is to have.

        Raises:
            SyntaxError: The text is no Python; nothing was run.
            DistError: The workers could not be started, or could not meet.
        """
        self._num_cells += 1
        name = f"<mesh cell {self._num_cells}>"
        compile(source, name, "exec")  # said once, and not by every worker
        with _ctrl_c_noted() as is_interrupted:
            self._get_ready(is_interrupted)
            outcome = self._ask_all(Cell(name, source, axes, sent, get), is_interrupted)
        if not outcome.is_good:
            self._is_joined = False
            self._drop(outcome.ended)
        return outcome

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._store.close()

    def _get_ready(self, is_interrupted: Callable[[], bool]) -> None:
        """Have all workers there, and in a world."""
        ended = self.ended  # between two cells
        if ended:
            self._drop(ended)
            self._is_joined = False
        for rank, how in sorted(ended.items()):
            self._tell_replaced(rank, how)
        missing = [rank for rank in range(self.size) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = WorkerProcess(self._job, rank)
            self._workers[rank].ask(list(sys.path))
        if missing:
            self._check_start(self._collect(missing, is_interrupted, Deadline(_START_S)), "start")
        if not self._is_joined:
            self._num_worlds += 1
            joining = Joining(self._num_worlds, self.size, self.backend, self._timeout_s)
            self._check_start(self._ask_all(joining, is_interrupted, Deadline(_START_S)), "join their world")
            self._is_joined = True

    def _drop(self, ended: dict[int, str]) -> None:
        for rank, how in sorted(ended.items()):
            self._replaced.append((rank, how))
            self._workers.pop(rank).close()

    def _check_start(self, outcome: Outcome, what: str) -> None:
        if outcome.is_good:
            return
        self._is_joined = False
        problems = [
            *(f"rank {rank}: {how}" for rank, how in sorted(outcome.ended.items())),
            *(f"rank {rank}: {answer.summary}" for rank, answer in sorted(outcome.answers.items()) if answer.summary),
        ]
        self._drop(outcome.ended)
        if outcome.interrupted:
            raise KeyboardInterrupt
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DistError(f"the workers could not {what}: {problems[0]}{more}")

    def _ask_all(self, question: Any, is_interrupted: Callable[[], bool], deadline: Deadline | None = None) -> Outcome:
        for worker in self._workers.values():
            worker.ask(question)
        return self._collect(list(self._workers), is_interrupted, deadline)

    def _collect(
        self, ranks: list[int], is_interrupted: Callable[[], bool], deadline: Deadline | None = None
    ) -> Outcome:
        """Wait for the answers of workers, and show meanwhile what they print."""
        outcome, waiting = Outcome(), set(ranks)
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._workers[rank].connection, selectors.EVENT_READ, (rank, True))
                selector.register(self._workers[rank].output, selectors.EVENT_READ, (rank, False))
            while waiting:
                for key, _ in selector.select(_TICK_S):
                    rank, is_answer = key.data
                    if is_answer:
                        selector.unregister(key.fileobj)
                        waiting.discard(rank)
                        self._take_answer(rank, outcome)
                    elif not self._show_output(rank):
                        selector.unregister(key.fileobj)
                if is_interrupted() and not outcome.interrupted:
                    outcome.interrupted, deadline = True, Deadline(self._grace_s)
                    for rank in waiting:
                        self._workers[rank].interrupt()
                if deadline is not None and deadline.expired():
                    for rank in waiting:
                        self._workers[rank].kill()
        for rank in ranks:
            self._show_output(rank, to_the_end=True)
        return outcome

    def _take_answer(self, rank: int, outcome: Outcome) -> None:
        answer = self._workers[rank].answer()
        if answer is None:
            outcome.ended[rank] = self._workers[rank].how_it_ended()
            if not self._workers[rank].has_begun:
                outcome.not_begun.add(rank)
        else:
            outcome.answers[rank] = answer

    def _show_output(self, rank: int, to_the_end: bool = False) -> bool:
        """Show what a worker has printed; return whether there may be more."""
        worker = self._workers[rank]
        for line in worker.printed(to_the_end):
            self._show(rank, line)
        return worker.may_print


@contextlib.contextmanager
def _ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Note a Ctrl-C instead of raising it in the middle of a conversation; give what says whether one came."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handler = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, handler)
