"""Table: who runs which action, and what it needs done before; `with_messages` adds the sends and receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshdist.parallel.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    MESSAGES,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
)

Rows = Sequence[Sequence[Action | None]]


class ScheduleError(ValueError):
    """Report a schedule that is incomplete, out of order, or deadlocks."""


class Place(NamedTuple):
    """Where an action stands in a table."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}"


class Table:
    """The actions of a schedule by place, and the rank of each stage.

    Attributes:
        rows: The actions of each rank, None for idle steps.
        places: The place of each action.
        home: The rank of each stage.
        num_stages: One more than the last stage.
        num_microbatches: One more than the last micro-batch.
        has_messages: Whether sends and receives are in the table; else they are implied.

    Raises:
        ScheduleError: There are no actions, one is in two places, or a stage is on two ranks.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.places: dict[Action, Place] = {}
        self.home: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for step, action in enumerate(row):
                if action is not None:
                    self._add(action, Place(rank, step))
        if not self.places:
            raise ScheduleError("the schedule has no actions")
        self.num_stages = max(self.home) + 1
        self.num_microbatches = max(action.microbatch for action in self.places) + 1
        self.has_messages = any(action.kind in MESSAGES for action in self.places)

    def _add(self, action: Action, place: Place) -> None:
        if action in self.places:
            raise ScheduleError(f"{place}: {action} is in the schedule twice, first on {self.places[action]}")
        self.places[action] = place
        home = self.home.setdefault(action.stage, place.rank)
        if home != place.rank:
            raise ScheduleError(
                f"{place}: {action} is of stage {action.stage}, which rank {home} has; a stage is on one rank"
            )

    def backward_of(self, stage: int, microbatch: int) -> Action | None:
        """Return the action that computes the gradient for the stage before; None if there is none."""
        for kind in (BACKWARD, BACKWARD_INPUT):
            action = Action(stage, kind, microbatch)
            if action in self.places:
                return action
        return None

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions that must have been done before `action` can be done."""
        stage, kind, microbatch = action
        if kind == FORWARD:
            if stage > 0:
                yield from self._arrival(Action(stage - 1, FORWARD, microbatch), stage, SEND_F, RECV_F)
        elif kind in (BACKWARD, BACKWARD_INPUT):
            yield Action(stage, FORWARD, microbatch)
            following = None if stage + 1 == self.num_stages else self.backward_of(stage + 1, microbatch)
            if following is not None:
                yield from self._arrival(following, stage, SEND_B, RECV_B)
        elif kind == BACKWARD_WEIGHT:
            yield Action(stage, BACKWARD_INPUT, microbatch)
        elif kind == SEND_F:
            yield Action(stage, FORWARD, microbatch)
        elif kind == SEND_B:
            made = self.backward_of(stage, microbatch)
            if made is not None:
                yield made

    def _arrival(self, made: Action, stage: int, send: str, receive: str) -> Iterator[Action]:
        """Yield what brings the result of `made` to `stage`: that itself on one rank, or else a message."""
        if not self.has_messages or self.home[made.stage] == self.home[stage]:
            yield made
        else:
            yield Action(stage, receive, made.microbatch)
            yield Action(made.stage, send, made.microbatch)

    def required_messages(self) -> Iterator[tuple[Action, Action, Action, Action]]:
        """Yield what makes a message, its send, its receive, and what uses it, for each message of the pipeline."""
        for action in self.places:
            stage, kind, microbatch = action
            if kind == FORWARD and stage + 1 < self.num_stages and self.home[stage + 1] != self.home[stage]:
                after = Action(stage + 1, FORWARD, microbatch)
                yield action, Action(stage, SEND_F, microbatch), Action(stage + 1, RECV_F, microbatch), after
            elif kind in (BACKWARD, BACKWARD_INPUT) and stage > 0 and self.home[stage - 1] != self.home[stage]:
                before = self.backward_of(stage - 1, microbatch)
                if before is not None:
                    yield action, Action(stage, SEND_B, microbatch), Action(stage - 1, RECV_B, microbatch), before


def execution_order(table: Table) -> list[Place]:
    """Return the places of all actions in an order in which they can be done.

    Ranks go on until an action needs what is not done yet. A send never waits, and a receive is posted and waited for
    by the action that uses it, so only missing data stops a rank.

    Raises:
        ScheduleError: There is no such order; names the cycle of ranks that wait for each other.
    """
    at = [0] * len(table.rows)
    done: set[Action] = set()
    order: list[Place] = []
    waiting: dict[Action, list[int]] = {}
    running = list(range(len(table.rows) - 1, -1, -1))
    while running:
        rank = running.pop()
        row = table.rows[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            if action is not None:
                missing = next((need for need in table.needs(action) if need not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                done.add(action)
                order.append(Place(rank, at[rank]))
                running.extend(waiting.pop(action, ()))
            at[rank] += 1
    if len(order) < len(table.places):
        raise ScheduleError(_cycle(table, at, done))
    return order


def _cycle(table: Table, at: list[int], done: set[Action]) -> str:
    """Return the cycle of ranks that wait for each other, in words."""
    rank = next(rank for rank, row in enumerate(table.rows) if at[rank] < len(row))
    seen: list[int] = []
    words: dict[int, str] = {}
    while rank not in seen:
        seen.append(rank)
        place = Place(rank, at[rank])
        action = table.rows[rank][at[rank]]
        assert action is not None
        missing = next(need for need in table.needs(action) if need not in done)
        if missing not in table.places:
            return f"{place}: {action} needs {missing}, which is not in the schedule"
        of = table.places[missing]
        if of.rank == rank:
            return f"{place}: {action} needs {missing}, which comes later on this rank, at step {of.step}"
        words[rank] = f"{place} ({action}) waits for {missing} of {of}"
        rank = of.rank
    return "the schedule deadlocks: " + "; ".join(words[member] for member in seen[seen.index(rank) :])


def with_messages(table: Table) -> list[list[Action]]:
    """Return the rows with the messages between ranks: torch's order, without idle steps.

    The ranks take turns, an action each. A send comes right after what it sends, and the sender puts the receive into
    the receiver's row at the same time, so receives are posted before the data is needed, and not much before.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    execution_order(table)
    messages = {made: (send, receive) for made, send, receive, _ in table.required_messages()}
    received = {used: receive for _, _, receive, used in table.required_messages()}
    rows: list[list[Action]] = [[] for _ in table.rows]
    left = [[action for action in row if action is not None][::-1] for row in table.rows]
    done: set[Action] = set()
    while any(left):
        for rank, actions in enumerate(left):
            if not actions or not _is_ready(table, actions[-1], received, done):
                continue
            action = actions.pop()
            rows[rank].append(action)
            done.add(action)
            if action in messages:
                send, receive = messages[action]
                rows[rank].append(send)
                rows[table.home[receive.stage]].append(receive)
                done.update((send, receive))
    return rows


def _is_ready(table: Table, action: Action, received: dict[Action, Action], done: set[Action]) -> bool:
    if action in received:
        return received[action] in done
    return all(need in done for need in table.needs(action))
