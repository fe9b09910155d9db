"""The `meshdist` logger: records carry their rank, and reach stderr if logging is not set up."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from meshdist.runtime.context import current_slot

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # no subscript at run time before Python 3.11

LOGGER_NAME = "meshdist"


class RankLog(_Adapter):
    """The `meshdist` logger, with the global rank in each record as `record.rank`.

    Records about one call have the label of its group as `record.group`, and the number of the call in the group as
    `record.sequence`; in other records these are None. If `rank` is None, it is that of the current world, if any.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__(logging.getLogger(LOGGER_NAME), {})
        self._rank = rank

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        rank = self._rank if self._rank is not None else _rank_of_context()
        extra = {"rank": rank, "group": None, "sequence": None, **(kwargs.get("extra") or {})}
        return msg, {**kwargs, "extra": extra}


class RankFilter(logging.Filter):
    """Adds the rank to the records of the layers below, which do not know it; passes every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "rank"):
            record.rank, record.group, record.sequence = _rank_of_context(), None, None
        return True


def _rank_of_context() -> int | None:
    world = current_slot().world
    return None if world is None else world.rank


_RANK_FILTER = RankFilter()


class StderrHandler(logging.Handler):
    """Writes records to stderr as long as logging has not been set up."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            rank = getattr(record, "rank", None)
            source = LOGGER_NAME if rank is None else f"{LOGGER_NAME} rank {rank}"
            # One write with the line end, so that lines of several ranks do not mix.
            sys.stderr.write(f"{source}: {self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # logging handlers report their own failures in this way
            self.handleError(record)


def shows_calls() -> bool:
    """Return whether the debug level is DETAIL."""
    return logging.NOTSET < logging.getLogger(LOGGER_NAME).level <= logging.DEBUG


def show_records(level: int) -> None:
    """Show records of `level` or above, on stderr if the logger has no handler."""
    logging.getLogger(LOGGER_NAME).setLevel(level)
    show_warnings()


def show_warnings() -> None:
    """Show warnings with their rank if logging is not set up; Python's last-resort handler omits the rank."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.addFilter(_RANK_FILTER)
    if not logger.hasHandlers():
        logger.addHandler(StderrHandler())


def hide_records() -> None:
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.WARNING)
    for handler in [handler for handler in logger.handlers if isinstance(handler, StderrHandler)]:
        logger.removeHandler(handler)
