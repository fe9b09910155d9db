"""One rank: makes the calls of a program and compares what comes of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import meshdist as dist
from soaking import kinds
from soaking.program import Program, Step, make, pick
from soaking.values import LAYOUTS, Placed

_LONGEST_NAP_S = 0.002


class WrongValueError(AssertionError):
    """A call did not do what NumPy does; the message says which, and how to make it again."""


@dataclass
class Begun:
    """A call whose results are not compared yet."""

    what: str
    side: kinds.Side
    made: kinds.Made
    give: list[Placed]
    take: list[Placed]
    result: Any = None

    def finish(self) -> None:
        """Wait, and compare.

        Raises:
            WrongValueError: Something is not as it should be.
        """
        for work in self.result if isinstance(self.result, list) else [self.result]:
            if isinstance(work, dist.Work):
                work.wait()
        for name, arrays, wanted in (("input", self.give, self.made.give), ("output", self.take, self.made.want)):
            for place, (array, want) in enumerate(zip(arrays, wanted, strict=True)):
                if fault := array.fault(want):
                    raise WrongValueError(f"{self.what}: {name} {place} ({array.layout}): {fault}")
        if self.made.result is not None and self.result != self.made.result:
            raise WrongValueError(f"{self.what}: it returned {self.result!r:.500}, expected {self.made.result!r:.500}")


@dataclass
class Player:
    """Plays programs of one seed on this rank.

    Attributes:
        seed: Of the programs.
        start: Makes the world, once more where it was destroyed.
        around: Called before every call, with its step and this rank's side of it, and returns which to take.
        num_calls: How many calls were made, by kind.
        num_async: How many of them were async.
        num_bytes: What the arrays of all these calls held.
    """

    seed: int
    start: Callable[[], None]
    around: Callable[[Step, kinds.Side], kinds.Side] = lambda step, side: side
    num_calls: Counter[str] = field(default_factory=Counter)
    num_async: int = 0
    num_bytes: int = 0

    def play(self, number: int, num_steps: int = 40) -> None:
        """Make all calls of a program.

        Raises:
            WrongValueError: A call did not do what NumPy does.
            DistError: A call failed.
        """
        program = make(self.seed, number, dist.get_world_size(), num_steps)
        rank = dist.get_rank()
        local = np.random.default_rng([self.seed, number, rank])
        if program.begins_anew:
            dist.destroy_process_group()
            self.start()
        groups = self._groups(program, local)
        pending: list[Begun] = []
        for step in program.steps:
            group, members = groups[step.where]
            if rank in members:
                side = kinds.Side(step, members, members.index(rank), (self.seed, number, step.number))
                self._take_step(number, side, group, local, pending)
            if local.random() < 0.1:
                time.sleep(float(local.random()) * _LONGEST_NAP_S)
            while pending and local.random() < 0.3:
                pending.pop(int(local.integers(len(pending)))).finish()
        for begun in pending:
            begun.finish()
        own = len(program.groups)
        for group, members in groups[len(groups) - own :]:
            if rank in members:
                dist.destroy_process_group(group)

    def _groups(self, program: Program, local: np.random.Generator) -> list[tuple[Any, tuple[int, ...]]]:
        """Return, for each communicator, the group of this rank and its members."""
        rank = dist.get_rank()
        lines = program.communicators(dist.get_world_size())
        mine = [next((line for line in them if rank in line), ()) for them in lines]
        mesh = dist.init_device_mesh("cpu", program.mesh, mesh_dim_names=("rows", "columns"))
        made: list[Any] = [None, *(mesh.get_group(axis) for axis in range(len(program.mesh)))]
        for members in program.groups:
            # Who is not in a group may make it as well, or not.
            is_called = rank in members or local.random() < 0.5
            made.append(dist.new_group(list(members), sort_ranks=False) if is_called else None)
        return list(zip(made, mine, strict=True))

    def _take_step(
        self, number: int, side: kinds.Side, group: Any, local: np.random.Generator, pending: list[Begun]
    ) -> None:
        step = side.step
        give: list[Placed] = []
        take: list[Placed] = []
        for turn in range(step.rounds):
            now = self.around(step, kinds.Side(step, side.members, side.rank, (*side.key, turn)))
            made = kinds.make(now)
            # After a call with arrays of a wrong shape, which may have returned, the right ones are others.
            shapes = [array.view.shape for array in (*give, *take)]
            if not turn or shapes != [np.shape(values) for values in (*made.give, *made.take)]:
                give, take = self._placed(made.give, local), self._placed(made.take, local)
            for arrays, contents in ((give, made.give), (take, made.take)):
                for array, values in zip(arrays, contents, strict=True):
                    array.fill(values)
            what = (
                f"seed {self.seed}, program {number}, step {step.number}, turn {turn}, rank {dist.get_rank()} "
                f"(--seed {self.seed} --first {number} makes it again): {step} among ranks {side.members}"
            )
            begun = Begun(what, now, made, give, take)
            begun.result = made.call([array.view for array in give], [array.view for array in take], group, **made.how)
            self._count(step, give + take)
            if step.async_op and turn == step.rounds - 1:
                pending.append(begun)
            else:
                begun.finish()

    def _count(self, step: Step, arrays: list[Placed]) -> None:
        self.num_calls[step.kind] += 1
        self.num_async += step.async_op
        self.num_bytes += sum(array.view.nbytes for array in arrays)

    @staticmethod
    def _placed(contents: Any, local: np.random.Generator) -> list[Placed]:
        # Half of the time alike: calls go through shared arrays only where all arrays are such.
        layouts = [pick(local, LAYOUTS) for _ in contents]
        if local.random() < 0.6:
            layouts = [pick(local, ["plain", "shared", "shared", "shared, inside"])] * len(contents)
        return [Placed(array.shape, array.dtype, layout) for array, layout in zip(contents, layouts, strict=True)]
