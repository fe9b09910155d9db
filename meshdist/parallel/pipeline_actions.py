"""Action: one thing that a rank of a pipeline does, such as `2F0`, the forward pass of micro-batch 0
through stage 2.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"
SEND_F = "SEND_F"
RECV_F = "RECV_F"
SEND_B = "SEND_B"
RECV_B = "RECV_B"

COMPUTES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
MESSAGES = (SEND_F, RECV_F, SEND_B, RECV_B)
# In tables of torch, for FSDP and for gradients that are reduced over data parallel ranks.
_OF_TORCH_ALONE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")

WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of the input",
    BACKWARD_WEIGHT: "backward of the weights",
    SEND_F: "send of activations",
    RECV_F: "receive of activations",
    SEND_B: "send of gradients",
    RECV_B: "receive of gradients",
}
_IN_SENTENCES = {
    **WORDS,
    FORWARD: "forward pass",
    BACKWARD: "backward pass",
    BACKWARD_INPUT: "backward pass of the input",
    BACKWARD_WEIGHT: "backward pass of the weights",
}

_WRITTEN = re.compile(rf"(\d{{1,6}})({'|'.join((*MESSAGES, *_OF_TORCH_ALONE, *COMPUTES))})(\d{{,6}})", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One action of a rank: `str` returns torch's notation, and `Action.parse` reads it.

    Attributes:
        stage: The stage, from 0 on.
        kind: `"F"` forward, `"B"` backward, `"I"` and `"W"` its two halves: the gradients of the input and of the
            weights; `"SEND_F"` and `"RECV_F"` for the activations that go to the next stage, `"SEND_B"` and
            `"RECV_B"` for the gradients that go to the stage before. A message is named after the stage of the rank
            that sends or receives it.
        microbatch: The micro-batch, from 0 on.

    Example:
        >>> from meshdist.parallel import Action
        >>> Action(2, "F", 0), str(Action(2, "F", 0)), Action.parse("1RECV_B3")
        (Action(stage=2, kind='F', microbatch=0), '2F0', Action(stage=1, kind='RECV_B', microbatch=3))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that `text` denotes.

        Args:
            text: Stage, kind and micro-batch, such as `2F0` or `1SEND_F3`.

        Raises:
            ValueError: It is not an action.
        """
        found = _WRITTEN.fullmatch(text.strip())
        if found is None or found[2] in _OF_TORCH_ALONE or not found[3]:
            raise ValueError(
                f"{text.strip()!r} is not an action of a pipeline; write the stage, one of {', '.join(WORDS)}, and the"
                " micro-batch, such as 2F0"
            )
        return cls(int(found[1]), found[2], int(found[3]))


def described(action: Action) -> str:
    """Return an action with its meaning: "2F0, the forward pass of micro-batch 0 through stage 2"."""
    stage, kind, microbatch = action
    return f"{action}, the {_IN_SENTENCES[kind]} of micro-batch {microbatch} through stage {stage}"


def parse_cell(text: str) -> list[Action | None]:
    """Return the actions of one cell of a table: None for an empty one, two of an `OVERLAP_F_B` of torch's.

    What torch adds for FSDP and for data parallel ranks (`0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`) is left out.
    """
    text = text.strip()
    if not text:
        return [None]
    overlapped = _OVERLAPPED.fullmatch(text)
    if overlapped is not None:
        return [Action.parse(part) for part in overlapped[1].split(";")]
    found = _WRITTEN.fullmatch(text)
    if found is not None and found[2] in _OF_TORCH_ALONE and not found[3]:
        return []
    return [Action.parse(text)]
