"""Transfers: the messages between the stages of a pipeline.

Every message has a tag of its own, from its stage, direction and micro-batch, so ranks may post them in any order. With
the first message from a stage to the next, or to the one before, goes an outline of what is sent, on another tag. From
then on both sides know the shapes and dtypes. GPU arrays of a backend without tags, as NCCL, are received in the order
in which their sender's schedule sends them. A receive from another host is posted in its place of the schedule, so
that it goes on while stages compute. One from this host is made when its data is used: it is a copy in memory, and a
posted receive would only take turns with the computation, in the progress thread.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.trees import Tree
from meshdist.collectives.send_recv import irecv, isend, recv
from meshdist.groups.process_group import ProcessGroup
from meshdist.parallel.pipeline_actions import RECV_B, RECV_F, SEND_B, SEND_F, Action
from meshdist.parallel.pipeline_schedules import Schedule
from meshdist.runtime.work import Work

# The sends that are not known to be done, before they are looked at again.
_MOST_SENDS = 16


class _Outline(NamedTuple):
    """What is known of the values of one direction between two stages."""

    tree: Tree  # over empty arrays of their dtypes and devices
    shapes: list[tuple[int, ...]]


class _Coming(NamedTuple):
    """A value whose receives were posted."""

    outline: _Outline
    buffers: list[Any]
    works: list[Work]


def _empty(outline: _Outline) -> list[Any]:
    return [new_empty(shape, like) for shape, like in zip(outline.shapes, outline.tree.leaves, strict=True)]


class Transfers:
    """The sends and receives of one rank.

    Args:
        group: The ranks of the pipeline.
        schedule: With messages.
        first_tag: The lowest tag used.
    """

    def __init__(self, group: ProcessGroup, schedule: Schedule, first_tag: int) -> None:
        self._group = group
        self._schedule = schedule
        hosts = group.hosts()
        self._is_near = [host == hosts[group.rank()] for host in hosts]
        self._first_tag = first_tag
        self._sent: dict[tuple[int, str], str] = {}
        self._outlines: dict[tuple[int, str], _Outline] = {}
        self._posted: dict[Action, _Coming] = {}
        self._sends: list[Work] = []
        # Of messages without tags: by rank, the receives of what it sends to this rank, in its order; and what came
        # before it was wanted.
        self._incoming: dict[int, deque[Action]] = {}
        self._early: dict[Action, _Coming] = {}

    def begin(self, schedule: Schedule) -> None:
        """Begin a step by the schedule, or by its forward part."""
        self._step = schedule
        self._incoming.clear()

    def forget_shapes(self) -> None:
        """Send outlines again with the next messages."""
        self._sent.clear()
        self._outlines.clear()

    def send(self, action: Action, value: Any) -> None:
        """Begin to send what `action` sends.

        Raises:
            ValueError: Its shapes are not those of earlier micro-batches.
        """
        edge = action.stage, action.kind
        peer = self._schedule.rank_of(action.stage + (1 if action.kind == SEND_F else -1))
        tree = Tree(value, "y" if action.kind == SEND_F else "dx")
        known = self._sent.get(edge)
        if known is None:
            self._sent[edge] = tree.text
            self._send_outline(edge, tree, peer)
        elif known != tree.text:
            raise ValueError(
                f"{tree.text} does not fit: the receiver expects {known}, as in earlier micro-batches; all must have"
                " the same shapes and dtypes, and before a step with different ones every rank calls forget_shapes()"
            )
        tag = self._tag(edge, action.microbatch)
        self._sends += [
            isend(leaf, group=self._group, group_dst=peer, tag=tag if self._group.messages.has_tags(leaf) else 0)
            for leaf in tree.leaves
        ]
        if len(self._sends) > _MOST_SENDS:
            self._sends = [work for work in self._sends if not work.is_completed() or work.exception() is not None]

    def post(self, action: Action) -> None:
        """Begin to receive what `action` receives, if that comes from another host."""
        edge = action.stage, action.kind
        outline = self._outlines.get(edge)
        if (
            outline is None
            or self._is_near[self._source(edge)]
            or not all(map(self._group.messages.has_tags, outline.tree.leaves))
        ):
            return
        buffers = _empty(outline)
        self._posted[action] = _Coming(outline, buffers, [irecv(buffer, **self._place(action)) for buffer in buffers])

    def wait(self, action: Action) -> Any:
        """Return what `action` receives."""
        coming = self._posted.pop(action, None) or self._received(action)
        for work in coming.works:
            work.wait()
        return coming.outline.tree.rebuilt(coming.buffers)

    def _received(self, action: Action) -> _Coming:
        """Receive what `action` receives, and before it what the same rank sends before and has no tags."""
        outline = self._outline(action)
        if all(map(self._group.messages.has_tags, outline.tree.leaves)):
            return self._taken(action, outline)
        order = self._order_of(self._source((action.stage, action.kind)))
        while action not in self._early:
            first = order.popleft()
            self._early[first] = self._taken(first, self._outline(first))
        return self._early.pop(action)

    def _taken(self, action: Action, outline: _Outline) -> _Coming:
        coming, place = _Coming(outline, _empty(outline), []), self._place(action)
        for buffer in coming.buffers:
            recv(buffer, **(place if self._group.messages.has_tags(buffer) else {**place, "tag": 0}))
        return coming

    def _order_of(self, peer: int) -> deque[Action]:
        """Return the receives of what a rank has still to send to this one in this step, in its order."""
        if peer not in self._incoming:
            receives = [
                Action(action.stage + 1, RECV_F, action.microbatch)
                if action.kind == SEND_F
                else Action(action.stage - 1, RECV_B, action.microbatch)
                for action in self._step.rows[peer]
                if action is not None and action.kind in (SEND_F, SEND_B)
            ]
            rank = self._group.rank()
            self._incoming[peer] = deque(a for a in receives if self._schedule.rank_of(a.stage) == rank)
        return self._incoming[peer]

    def finish(self) -> None:
        """Wait for all sends."""
        while self._sends:
            self._sends.pop().wait()

    def _place(self, action: Action) -> dict[str, Any]:
        """Return the arguments of a receive."""
        edge = action.stage, action.kind
        tag = self._tag(edge, action.microbatch)
        return {"group": self._group, "group_src": self._source(edge), "tag": tag}

    def _send_outline(self, edge: tuple[int, str], tree: Tree, peer: int) -> None:
        empty = [new_empty((0,), leaf) for leaf in tree.leaves]
        shapes = [leaf.shape for leaf in tree.leaves]
        outline = np.frombuffer(pickle.dumps((tree.rebuilt(empty), shapes)), np.uint8)
        for part in (np.array([outline.size], np.int64), outline):
            self._sends.append(isend(part, group=self._group, group_dst=peer, tag=self._tag(edge, -1)))

    def _outline(self, action: Action) -> _Outline:
        """Return the outline of what `action` receives, which came with the sender's first message."""
        edge = action.stage, action.kind
        outline = self._outlines.get(edge)
        if outline is None:
            peer, tag = self._source(edge), self._tag(edge, -1)
            size = np.empty(1, np.int64)
            recv(size, group=self._group, group_src=peer, tag=tag)
            if not size[0]:
                raise ValueError(
                    "a dry run does not know what another stage returns; there, check and simulate the schedule:"
                    " schedule.check().simulate(costs)"
                )
            data = np.empty(int(size[0]), np.uint8)
            recv(data, group=self._group, group_src=peer, tag=tag)
            empty, shapes = pickle.loads(data.tobytes())
            outline = self._outlines[edge] = _Outline(Tree(empty), shapes)
        return outline

    def _source(self, edge: tuple[int, str]) -> int:
        stage, kind = edge
        return self._schedule.rank_of(stage - 1 if kind == RECV_F else stage + 1)

    def _tag(self, edge: tuple[int, str], microbatch: int) -> int:
        """Return the tag of a message, the same for its sender and its receiver; micro-batch -1 is the outline."""
        stage, kind = edge
        sender = {SEND_F: stage, RECV_F: stage - 1, SEND_B: stage, RECV_B: stage + 1}[kind]
        direction = 0 if kind in (SEND_F, RECV_F) else 1
        return self._first_tag + ((microbatch + 1) * self._schedule.num_stages + sender) * 2 + direction
