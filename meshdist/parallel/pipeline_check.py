"""Check a schedule: it is complete, in order, and free of deadlock."""

from __future__ import annotations

from meshdist.parallel.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    MESSAGES,
    WORDS,
    Action,
    described,
)
from meshdist.parallel.pipeline_table import ScheduleError, Table, execution_order


def check_table(table: Table) -> None:
    """Check that each micro-batch goes through each stage once, forward and backward, and that no rank waits for ever.

    Raises:
        ScheduleError: It does not; names the rank, the step and the action, and of a deadlock the cycle.
    """
    _check_stages(table)
    has_backward = any(action.kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) for action in table.places)
    for stage in range(table.num_stages):
        for microbatch in range(table.num_microbatches):
            _check_passes(table, stage, microbatch, has_backward)
    if table.has_messages:
        _check_messages(table)
    execution_order(table)


def _check_stages(table: Table) -> None:
    missing = [stage for stage in range(table.num_stages) if stage not in table.home]
    if missing:
        raise ScheduleError(f"no rank has stage {missing[0]}, while the last stage is {table.num_stages - 1}")
    idle = [rank for rank, row in enumerate(table.rows) if not any(row)]
    if idle:
        raise ScheduleError(f"rank {idle[0]} has no actions; the rows are the ranks of the pipeline, from rank 0 on")


def _check_passes(table: Table, stage: int, microbatch: int, has_backward: bool) -> None:
    places = table.places
    forward, full, of_input, of_weight = (
        Action(stage, kind, microbatch) for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    if forward not in places:
        raise ScheduleError(_absent(table, forward))
    if not has_backward:
        return
    if full in places:
        for half in (of_input, of_weight):
            if half in places:
                raise ScheduleError(
                    f"{places[half]}: {half} repeats {full} of {places[full]}, which is the whole backward pass"
                )
        if places[full] < places[forward]:
            raise ScheduleError(_too_early(table, full, forward))
        return
    if of_input not in places:
        raise ScheduleError(_absent(table, of_input if of_weight in places else full))
    if of_weight not in places:
        raise ScheduleError(_absent(table, of_weight))
    if places[of_input] < places[forward]:
        raise ScheduleError(_too_early(table, of_input, forward))
    if places[of_weight] < places[of_input]:
        raise ScheduleError(_too_early(table, of_weight, of_input))


def _absent(table: Table, action: Action) -> str:
    return f"rank {table.home[action.stage]} never does {described(action)}"


def _too_early(table: Table, action: Action, needed: Action) -> str:
    return (
        f"{table.places[action]}: {action} comes before {needed}, at step {table.places[needed].step}, which it needs"
    )


def _check_messages(table: Table) -> None:
    expected: set[Action] = set()
    for made, send, receive, used in table.required_messages():
        expected.update((send, receive))
        for message, of in ((send, made), (receive, used)):
            if message not in table.places:
                raise ScheduleError(f"{table.places[of]}: {of} has no {message}, its {WORDS[message.kind]}")
        for late, early in ((send, made), (used, receive)):
            if table.places[late] < table.places[early]:
                raise ScheduleError(_too_early(table, late, early))
    for action, place in table.places.items():
        if action.kind in MESSAGES and action not in expected:
            raise ScheduleError(f"{place}: {action} is a message that no stage of another rank needs")
