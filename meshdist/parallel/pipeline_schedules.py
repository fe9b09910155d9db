"""Schedule: which rank of a pipeline does what, in which order."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from meshdist.parallel.pipeline_actions import COMPUTES, Action, parse_cell
from meshdist.parallel.pipeline_check import check_table
from meshdist.parallel.pipeline_simulation import PipelineCosts, simulate
from meshdist.parallel.pipeline_table import ScheduleError, Table, with_messages
from meshdist.parallel.pipeline_timeline import PipelineTimeline
from meshdist.system.plurals import counted


class Schedule:
    """A table of the actions of a pipeline: a row for each rank, a column for each step, None or empty where idle.

    `gpipe`, `one_f_one_b`, `interleaved` and others create one; or write it by hand. Sends and receives may be in the
    table; otherwise they are added when it runs. The notation is that of torch.distributed.pipelining.

    Args:
        rows: For each rank, its actions: `Action`, their text such as `"2F0"`, or None; or a line of text with spaces.
        name: Its name in drawings and messages.

    Attributes:
        name: Its name.
        rows: The actions of each rank, as tuples of `Action` and None.

    Raises:
        TypeError: `rows` is one text for all ranks.
        ValueError: A text is not an action.
        ScheduleError: It has no actions, an action twice, or a stage on two ranks.

    Example:
        >>> from meshdist.parallel import Schedule
        >>> schedule = Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]).check()
        >>> schedule.num_stages, schedule.num_microbatches, schedule.stages_of(1)
        (2, 2, (1,))
        >>> print(schedule.with_messages())
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """

    def __init__(self, rows: Iterable[str | Iterable[Action | str | None]], name: str = "by hand") -> None:
        if isinstance(rows, str):
            raise TypeError("Schedule: rows must have a row for each rank, such as ['0F0 0B0', '1F0 1B0'], got a text")
        self.name = name
        self.rows: tuple[tuple[Action | None, ...], ...] = tuple(
            tuple(_actions(rank, row.split() if isinstance(row, str) else row)) for rank, row in enumerate(rows)
        )
        self._table = Table(self.rows)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return self._table.num_stages

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches."""
        return self._table.num_microbatches

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives are in the table."""
        return self._table.has_messages

    @property
    def has_backward(self) -> bool:
        """Whether micro-batches go backward as well, or only forward."""
        return any(action.kind in COMPUTES[1:] for action in self._table.places)

    @cached_property
    def digest(self) -> str:
        """A checksum of the table, equal for equal tables."""
        return hashlib.sha256(self.to_csv().encode()).hexdigest()

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage.

        Raises:
            ValueError: There is no such stage.
        """
        home = self._table.home.get(stage)
        if home is None:
            raise ValueError(f"the schedule has stages 0 to {self.num_stages - 1}, and no stage {stage}")
        return home

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        return tuple(sorted(stage for stage, home in self._table.home.items() if home == rank))

    def check(self) -> Schedule:
        """Prove the schedule complete and free of deadlock, and return it.

        Each micro-batch goes through each stage once, forward and, if any does, backward: the forward pass before the
        backward pass, and in it the half of the input before that of the weights. As in `PipelineRunner`, sends never
        wait, and the action that uses the data of a receive waits for it.

        Raises:
            ScheduleError: It fails the check; the message names rank, step and action, and for a deadlock the cycle of
                ranks.
        """
        check_table(self._table)
        return self

    def with_messages(self) -> Schedule:
        """Return the schedule with sends and receives, and without idle steps; itself if it has them.

        Raises:
            ScheduleError: It deadlocks.
        """
        return self if self.has_messages else Schedule(with_messages(self._table), self.name)

    def forward_only(self) -> Schedule:
        """Return the forward passes of the schedule and their messages."""
        kept = [[a for a in row if a is not None and a.kind in ("F", "SEND_F", "RECV_F")] for row in self.rows]
        return Schedule(kept, self.name)

    def simulate(self, costs: PipelineCosts | None = None) -> PipelineTimeline:
        """Return the times of all computations, with makespan, bubble, peak of live activations, and a picture.

        Args:
            costs: How long the actions take. None: 1 for a forward pass and for each half of a backward pass.

        Raises:
            ScheduleError: It deadlocks.
            ValueError: A stage has no cost.
        """
        times = simulate(self._table, PipelineCosts() if costs is None else costs)
        return PipelineTimeline(self.name, times.rows, times.peaks)

    def show(self, form: str | None = None, ax: Any = None, width: int | None = None) -> Any:
        """Draw `simulate()`; arguments, result and errors are those of `PipelineTimeline.show`."""
        return self.simulate().show(form, ax, width)

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """Return the table as CSV, a line for each rank, and write it to `path` if given.

        Raises:
            OSError: The file cannot be written.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            ["" if action is None else str(action) for action in row] for row in self.rows
        )
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    @classmethod
    def from_csv(cls, path: str | PathLike[str], name: str | None = None) -> Schedule:
        """Read a table that was written by hand, by `to_csv`, or by torch.

        Of torch's tables, `UNSHARD`, `RESHARD` and `REDUCE_GRAD` are left out, and the two actions of an `OVERLAP_F_B`
        follow each other.

        Args:
            path: The file, with a line for each rank.
            name: The schedule's name. None: that of the file.

        Raises:
            OSError: The file cannot be read.
            ValueError: A cell is not an action; the message names the rank and the step.
            ScheduleError: The schedule has no actions, an action twice, or a stage on two ranks.
        """
        with open(path, newline="", encoding="utf-8") as file:
            return cls(csv.reader(file), Path(path).stem if name is None else name)

    @classmethod
    def from_text(cls, text: str, name: str = "by hand") -> Schedule:
        """Return the schedule of CSV text, or of what `print` shows of one without idle steps.

        Raises:
            ValueError: A word is not an action.
            ScheduleError: The schedule has no actions, an action twice, or a stage on two ranks.
        """
        lines = [line.partition(":")[2] if line.startswith("rank ") else line for line in text.strip().splitlines()]
        return cls([line.split(",") if "," in line else line.split() for line in lines], name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {counted(self.num_ranks, 'rank')}, {counted(self.num_stages, 'stage')},"
            f" {self.num_microbatches} micro-batches>"
        )

    def __str__(self) -> str:
        words = [["" if action is None else str(action) for action in row] for row in self.rows]
        steps = range(max(map(len, words)))
        widths = [max(len(row[step]) for row in words if step < len(row)) for step in steps]
        if self.has_messages:  # there are no common steps
            widths = [0] * len(widths)
        margin = len(f"rank {self.num_ranks - 1}: ")
        return "\n".join(
            f"rank {rank}:".ljust(margin) + " ".join(map(str.ljust, row, widths)).rstrip()
            for rank, row in enumerate(words)
        )

    def _repr_html_(self) -> str | None:
        try:
            return self.simulate()._repr_html_()
        except ScheduleError:  # a notebook shows its repr
            return None


def _actions(rank: int, row: Iterable[Action | str | None]) -> Iterator[Action | None]:
    for step, cell in enumerate(row):
        if cell is None or isinstance(cell, Action):
            yield cell
            continue
        try:
            yield from parse_cell(cell)
        except ValueError as error:
            raise ValueError(f"rank {rank}, step {step}: {error}") from None
