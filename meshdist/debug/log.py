"""The records of the `meshdist` logger: each knows its rank, and at a debug level each is seen."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from meshdist.current import current_slot

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # no subscript at run time before Python 3.11

LOGGER_NAME = "meshdist"


class RankLog(_Adapter):
    """The `meshdist` logger, which says in each record, as `record.rank`, which global rank speaks.

    Records about one call have its group, as messages call it, as `record.group`, and the number of the call in the
    group as `record.sequence`; in all others these are None.

    Args:
        rank: The rank; that of the current world where None, and None in the record where there is no world.

    Example:
        >>> with_rank = logging.Formatter("%(rank)s: %(message)s")
        >>> RankLog(3).process("ready", {})
        ('ready', {'extra': {'rank': 3, 'group': None, 'sequence': None}})
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(logging.getLogger(LOGGER_NAME), {})
        self._rank = rank

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to a record."""
        world = current_slot().world
        rank = self._rank if self._rank is not None or world is None else world.rank
        extra = {"rank": rank, "group": None, "sequence": None, **(kwargs.get("extra") or {})}
        return msg, {**kwargs, "extra": extra}


class StderrHandler(logging.Handler):
    """Shows records where nobody else does: on stderr, as long as logging has not been set up."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the root logger has a handler by now."""
        if logging.getLogger().handlers:
            return
        try:
            rank = getattr(record, "rank", None)
            speaker = LOGGER_NAME if rank is None else f"{LOGGER_NAME} rank {rank}"
            # In one piece, with its end: what several ranks write at once must not run together.
            sys.stderr.write(f"{speaker}: {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # what logging does with whatever goes wrong while it writes
            self.handleError(record)


def show_records(level: int) -> None:
    """Let the logger through what is of `level` or above, to stderr where it has no handler."""
    logging.getLogger(LOGGER_NAME).setLevel(level)
    show_warnings()


def show_warnings() -> None:
    """Have warnings say who speaks where nobody has set up logging; Python's own last resort does not."""
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.hasHandlers():
        logger.addHandler(StderrHandler())


def hide_records() -> None:
    """Let the logger through nothing but warnings."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.WARNING)
    for handler in [handler for handler in logger.handlers if isinstance(handler, StderrHandler)]:
        logger.removeHandler(handler)
