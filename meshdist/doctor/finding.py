"""Finding: one line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshdist.system.terminal import fold

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
"""Good; absent but optional; slower or more limited than possible; will fail."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # the subject of the check
    status: str  # "ok", "note", "warning" or "error"
    text: str  # the state of the subject
    remedy: str = ""  # what to do; empty if nothing

    def __str__(self) -> str:
        return self.folded(0)

    def folded(self, width: int) -> str:
        """Return the finding as text, in lines of at most `width` characters; 0 folds none."""
        lines = [fold(f"{self.status:<9}{self.name}: {self.text}", width, hanging=9)]
        if self.remedy:
            lines.append(fold(f"{'':9}-> {self.remedy}", width, hanging=12))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[], "Iterable[Finding]"]


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that raises is a finding itself."""
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            yield from check()
        except Exception as error:  # a check may fail in any way on an unusual machine
            yield Finding(name, WARNING, f"cannot be checked: {type(error).__name__}: {error}")
