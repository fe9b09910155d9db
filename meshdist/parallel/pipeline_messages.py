"""Add the sends and receives to a schedule that has only computations."""

from __future__ import annotations

from meshdist.parallel.pipeline_actions import Action
from meshdist.parallel.pipeline_table import Table, execution_order


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
