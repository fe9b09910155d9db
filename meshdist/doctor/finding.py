"""Finding: one line of the doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
"""As it should be; absent and not needed by all; slower or narrower than it could be; will fail."""


@dataclass(frozen=True)
class Finding:
    """What one look has found.

    Attributes:
        name: What was looked at.
        status: "ok", "note", "warning" or "error".
        text: What it is like.
        cure: What to do; empty where nothing has to be done.

    Example:
        >>> print(Finding("open files", "warning", "at most 64", "ulimit -n 4096"))
        warning  open files: at most 64
                 -> ulimit -n 4096
    """

    name: str
    status: str
    text: str
    cure: str = ""

    def __str__(self) -> str:
        cure = f"\n{'':9}-> {self.cure}" if self.cure else ""
        return f"{self.status:<9}{self.name}: {self.text}{cure}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


Check = Callable[[], "Iterable[Finding]"]


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Give what some checks find; one that fails is a finding itself, and keeps none of the others from theirs."""
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            yield from check()
        except Exception as error:  # whatever an odd machine has in store for us
            yield Finding(name, WARNING, f"could not be looked at: {type(error).__name__}: {error}")
