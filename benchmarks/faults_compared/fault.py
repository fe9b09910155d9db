"""Fault: something that goes wrong, as a function that every rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faults_compared.library import Library
    from faults_compared.witness import Witness

TIMEOUT_S = 5.0
"""What libraries are given that have a timeout."""
PATIENCE_S = 12.0
"""How long after the fault ranks are waited for, before they count as hanging."""
UNDER_WAY_S = 0.5
"""How long the others are given to be in their calls before something befalls one."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        title: The row of the table.
        body: What every rank runs.
        ranks: How many there are.
        watched: Those whose fate is told; all if None.
        joins: Whether they have met before.
        senseless: Libraries to which it does not apply, or nothing new, and what is said instead.
        grace_s: See `PATIENCE_S`.
        launched: Each library's own launcher starts the ranks; else they are started by hand, but those of MPI.
        kills: Where the driver kills something: "launcher", once all ranks are ready; None for nothing.
        has_answer: There is a right value; what else the call writes is wrong. Else it had better not return.
        mpi_module: A module of mpi4py's that is to run the ranks of MPI.
        asks: What is told: what calls say, "processes" how long they live, or "files" which are left.
    """

    title: str
    body: Callable[[Library, Witness], None]
    ranks: int = 2
    watched: tuple[int, ...] | None = None
    joins: bool = True
    senseless: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = PATIENCE_S
    launched: bool = False
    kills: str | None = None
    asks: str = "calls"
    mpi_module: str | None = None
    has_answer: bool = False

    @property
    def name(self) -> str:
        """What it is called on command lines."""
        return self.body.__name__
