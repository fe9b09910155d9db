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

from meshdist.errors import DistError
from meshdist.launch.worker_env import LOOPBACK, job_secret, new_job
from meshdist.notebook.cell_worker import Abandon, Answer, Cell, Joining
from meshdist.notebook.kept_world import RankState, can_go_on, failed_alike
from meshdist.notebook.magic_options import Axes
from meshdist.notebook.process import WorkerProcess
from meshdist.notebook.rank_output import merged
from meshdist.store import TCPStore
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline
from meshdist.system.platform import check_processes

_TEXT = "text/plain"
_START_S = 60.0
_TICK_S = 0.1
# How long the world of ranks that have failed is kept, as the others may soon fail at the same line.
_ALIKE_S = 0.5


@dataclass
class Completion:
    """How a cell ended."""

    answers: dict[int, Answer] = field(default_factory=dict)  # of the ranks that answered
    ended: dict[int, str] = field(default_factory=dict)  # how the other workers ended
    not_begun: set[int] = field(default_factory=set)  # the workers in `ended` that had ended before they began the cell
    interrupted: bool = False
    hang_report: list[str] = field(default_factory=list)  # who waited for whom when the cell was interrupted
    abandoned: set[int] = field(default_factory=set)  # the ranks that were told to end their world

    @property
    def is_good(self) -> bool:
        """Whether all ranks have completed the cell."""
        return not self.ended and all(answer.status == "done" for answer in self.answers.values())

    @property
    def keeps_world(self) -> bool:
        """Whether the groups stay: all ranks have completed the cell, or failed at the same line after equal calls."""
        if self.is_good:
            return True
        return not (self.ended or self.interrupted or self.abandoned) and can_go_on(self._states)

    @property
    def failed(self) -> set[int]:
        """The ranks that have failed in the cell, and were not told to end their world."""
        return {rank for rank, state in self._states.items() if state.has_failed} - self.abandoned

    @property
    def failed_alike(self) -> bool:
        """Whether the ranks that have answered so far may stay in their world, if the others answer the same."""
        return not (self.ended or self.interrupted or self.abandoned) and failed_alike(self._states)

    @property
    def _states(self) -> dict[int, RankState]:
        return {rank: answer.state for rank, answer in self.answers.items()}

    def values(self) -> dict[str, list[Any]]:
        """Return the requested variables, by name, as lists by rank."""
        by_rank = [pickle.loads(self.answers[rank].values or b"") for rank in sorted(self.answers)]
        return {name: [values[name] for values in by_rank] for name in by_rank[0]}

    def of_the_world(self) -> list[str]:
        """Return the names of the variables that belong to the world of the cell, on any rank."""
        return sorted({name for answer in self.answers.values() for name in answer.of_the_world})

    def pictures(self) -> dict[bytes, list[int]]:
        """Return the PNG files that the ranks have drawn, each with its ranks."""
        ranks_by_picture: dict[bytes, list[int]] = {}
        for rank, answer in sorted(self.answers.items()):
            for picture in dict.fromkeys(answer.pictures):
                ranks_by_picture.setdefault(picture, []).append(rank)
        return ranks_by_picture

    def shown(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Return the forms of the last expressions, each with its ranks; those that are alike once.

        Where only their texts differ, as those of arrays, which say what a rank holds, the text has lines of each rank.
        """
        alike: list[tuple[dict[str, Any], list[int]]] = []
        for rank, answer in sorted(self.answers.items()):
            if answer.shown is None:
                continue
            for forms, ranks in alike:
                if _are_alike(forms, answer.shown):
                    ranks.append(rank)
                    break
            else:
                alike.append((answer.shown, [rank]))
        return [(self._with_texts(forms, ranks), ranks) for forms, ranks in alike]

    def _with_texts(self, forms: dict[str, Any], ranks: list[int]) -> dict[str, Any]:
        texts = {rank: shown[_TEXT] for rank in ranks if (shown := self.answers[rank].shown) is not None}
        if len(set(texts.values())) == 1:
            return forms
        return {**forms, _TEXT: "\n".join(merged({rank: text.splitlines() for rank, text in texts.items()}))}


def _are_alike(forms: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether two values have equal texts, or else equal pictures. HTML may contain names made up for it."""
    return forms[_TEXT] == others[_TEXT] or {**forms, _TEXT: ""} == {**others, _TEXT: ""}


class Pool:
    """Worker processes on this host that are the ranks of one world.

    A worker that ends is replaced before the next cell. After a cell that failed on any rank, all join a new world,
    unless it failed on all ranks at the same line: the variables of the workers stay, their groups do not.

    Args:
        size: Number of workers.
        backend: Of their world.
        timeout_s: How long their calls may wait.
        show: Called with rank and text of each line that a worker prints.
        grace_s: How long an interrupted worker may take before it is killed.
        on_replaced: Called with rank and exit of each worker that has ended between two cells.
        on_tick: Called several times a second while a cell runs.

    Raises:
        DistError: This system cannot start processes.
    """

    def __init__(
        self,
        size: int,
        backend: str,
        timeout_s: float,
        show: Callable[[int, str], None],
        grace_s: float = 5.0,
        on_replaced: Callable[[int, str], None] = lambda rank, how: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        check_processes("%%mesh")
        self.size = size
        self.backend = backend
        self._timeout_s = timeout_s
        self._show = show
        self._grace_s = grace_s
        self._on_replaced = on_replaced
        self._on_tick = on_tick
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
        """Those of the workers that have not ended, by rank."""
        return [worker.pid for _, worker in sorted(self._workers.items()) if not worker.connection.poll()]

    @property
    def ended(self) -> dict[int, str]:
        """How the workers ended that the next cell will replace, by rank."""
        return {rank: worker.how_it_ended() for rank, worker in self._workers.items() if worker.connection.poll()}

    @property
    def replaced(self) -> list[tuple[int, str]]:
        """Rank and exit of all workers that were replaced, in order."""
        return list(self._replaced)

    def start(self) -> None:
        """Start the workers and let them join a world, as `run` would.

        Raises:
            DistError: The workers could not start or join.
        """
        with _ctrl_c_deferred() as is_interrupted:
            self._get_ready(is_interrupted)

    def join_new_world(self, backend: str, timeout_s: float) -> None:
        """Let all workers join a new world with another backend or timeout; their variables stay.

        Raises:
            DistError: They could not join; the next cell has the old backend and timeout.
        """
        before = self.backend, self._timeout_s
        self.backend, self._timeout_s, self._is_joined = backend, timeout_s, False
        try:
            self.start()
        except BaseException:
            (self.backend, self._timeout_s), self._is_joined = before, False
            raise

    def run(
        self,
        source: str,
        axes: Axes = (),
        sent: bytes | None = None,
        get: tuple[str, ...] = (),
        *,
        name: str | None = None,
    ) -> Completion:
        """Run a cell on all workers.

        Args:
            source: Its text.
            axes: Names and sizes of the mesh that it finds as `mesh`.
            sent: Variables for it: a pickled dict.
            get: Variables to return in `Completion.values`.
            name: Of the cell in messages; None names it by a number.

        Raises:
            SyntaxError: The text is not Python; nothing was run.
            DistError: The workers could not start or join.
        """
        self._num_cells += 1
        name = name or f"<mesh cell {self._num_cells}>"
        compile(source, name, "exec")  # raise here once, not in every worker
        with _ctrl_c_deferred() as is_interrupted:
            self._get_ready(is_interrupted)
            result = self._request_all(Cell(self._num_cells, name, source, axes, sent, get), is_interrupted)
        if not result.keeps_world:
            self._is_joined = False
            self._drop(result.ended)
        return result

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._store.close()

    def _get_ready(self, is_interrupted: Callable[[], int]) -> None:
        """Start missing workers, and let all join a world if they are in none."""
        ended = self.ended  # between two cells
        if ended:
            self._drop(ended)
            self._is_joined = False
        for rank, how in sorted(ended.items()):
            self._on_replaced(rank, how)
        missing = [rank for rank in range(self.size) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = WorkerProcess(self._job, rank)
            self._workers[rank].ask(list(sys.path))
        if missing:
            self._check_start(self._collect(missing, is_interrupted, Deadline(_START_S)), "start")
        if not self._is_joined:
            self._num_worlds += 1
            joining = Joining(self._num_worlds, self.size, self.backend, self._timeout_s)
            self._check_start(self._request_all(joining, is_interrupted, Deadline(_START_S)), "join their world")
            self._is_joined = True

    def _drop(self, ended: dict[int, str]) -> None:
        for rank, how in sorted(ended.items()):
            self._replaced.append((rank, how))
            self._workers.pop(rank).close()

    def _check_start(self, result: Completion, action: str) -> None:
        if result.is_good:
            return
        self._is_joined = False
        problems = [
            *(f"rank {rank}: {how}" for rank, how in sorted(result.ended.items())),
            *(f"rank {rank}: {answer.summary}" for rank, answer in sorted(result.answers.items()) if answer.summary),
        ]
        self._drop(result.ended)
        if result.interrupted:
            raise KeyboardInterrupt
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DistError(f"the workers could not {action}: {problems[0]}{more}")

    def _request_all(
        self, request: Any, is_interrupted: Callable[[], int], deadline: Deadline | None = None
    ) -> Completion:
        for worker in self._workers.values():
            worker.ask(request)
        return self._collect(list(self._workers), is_interrupted, deadline)

    def _collect(
        self, ranks: list[int], is_interrupted: Callable[[], int], deadline: Deadline | None = None
    ) -> Completion:
        """Collect the answers of workers, and show their output meanwhile."""
        result, waiting, patience = Completion(), set(ranks), None
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
                        self._take_answer(rank, result)
                    elif not self._show_output(rank):
                        selector.unregister(key.fileobj)
                if result.failed:
                    patience = patience or Deadline(_ALIKE_S)
                    self._abandon_failed(result, is_overdue=patience.expired())
                self._on_tick()
                if is_interrupted() and not result.interrupted:
                    result.hang_report = self._hang_report(lambda: is_interrupted() > 1)
                    result.interrupted, deadline = True, Deadline(self._grace_s)
                    for rank in waiting:
                        self._workers[rank].interrupt()
                if deadline is not None and deadline.expired():
                    for rank in waiting:
                        self._workers[rank].kill()
        for rank in ranks:
            self._show_output(rank, to_the_end=True)
        return result

    def _abandon_failed(self, result: Completion, *, is_overdue: bool) -> None:
        """Let ranks that have failed end their world, which others may wait for, unless it is kept or may be."""
        may_keep = result.keeps_world if len(result.answers) == self.size else result.failed_alike and not is_overdue
        if may_keep:
            return
        for rank in result.failed:
            self._workers[rank].ask(Abandon())
            result.abandoned.add(rank)

    def _hang_report(self, is_in_haste: Callable[[], bool]) -> list[str]:
        from meshdist.debug.attach import hang_of_interrupted  # most cells do not hang

        return hang_of_interrupted(self._store, endpoint(self._job.master_addr, self._job.master_port), is_in_haste)

    def _take_answer(self, rank: int, result: Completion) -> None:
        answer = self._workers[rank].answer()
        if answer is None:
            result.ended[rank] = self._workers[rank].how_it_ended()
            if not self._workers[rank].has_begun:
                result.not_begun.add(rank)
        else:
            result.answers[rank] = answer

    def _show_output(self, rank: int, to_the_end: bool = False) -> bool:
        """Show the new output of a worker; return whether there may be more."""
        worker = self._workers[rank]
        for line in worker.printed(to_the_end):
            self._show(rank, line)
        return worker.may_print


@contextlib.contextmanager
def _ctrl_c_deferred() -> Iterator[Callable[[], int]]:
    """Defer Ctrl-C during a request; yield a function that returns how many came."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    handler = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: len(signals)
    finally:
        signal.signal(signal.SIGINT, handler)
