"""The debug level: how much is logged of what a rank does.

It is the level of the `meshdist` logger, so there is nothing that could disagree with it: DETAIL is DEBUG, INFO is
INFO, and OFF is WARNING. A logger whose level nobody has set takes what the environment says.
"""

from __future__ import annotations

import logging
import os
from enum import IntEnum

from meshdist.current import current_slot
from meshdist.debug.log import LOGGER_NAME, hide_records, show_records, show_warnings

VARIABLES = ("MESHDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


class DebugLevel(IntEnum):
    """How much is logged.

    OFF logs warnings. INFO logs set-up, groups, their connections and their end as well, and calls that wait for more
    than a second. DETAIL logs every call: its group, its bytes, and the line that makes it. At DETAIL, collectives of
    arrays with as many elements and other shapes disagree as well, and so do ranks that call groups which share ranks
    in different orders; for both, all ranks have to be at it.

    Example:
        >>> DebugLevel.INFO < DebugLevel.DETAIL
        True
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    Raises:
        ValueError: It was never set, and the environment has a value that is no level.
    """
    level = logging.getLogger(LOGGER_NAME).level
    if level == logging.NOTSET:
        return _level_of_environment()
    return DebugLevel.DETAIL if level <= logging.DEBUG else DebugLevel(int(level <= logging.INFO))


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process, and of the groups of this rank, from the next call on.

    Args:
        level: A DebugLevel.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"set_debug_level: level must be one of {_choices('DebugLevel.')}, got {level!r}")
    if level is DebugLevel.OFF:
        hide_records()
    else:
        show_records(logging.DEBUG if level is DebugLevel.DETAIL else logging.INFO)
    world = current_slot().world
    if world is not None:
        world.listeners.log_calls(level is DebugLevel.DETAIL)


def set_debug_level_from_env() -> None:
    """Set the debug level that MESHDIST_DEBUG says, or else TORCH_DISTRIBUTED_DEBUG; OFF where neither is set.

    Raises:
        ValueError: The value is no level; the message lists them.
    """
    set_debug_level(_level_of_environment())


def begin_debugging() -> DebugLevel:
    """Do what the environment says, unless a level was set; return the level."""
    level = get_debug_level()
    if level is not DebugLevel.OFF:
        set_debug_level(level)
    else:
        show_warnings()
    return level


def _level_of_environment() -> DebugLevel:
    for variable in VARIABLES:
        value = os.environ.get(variable)
        if value:
            if value.upper() not in DebugLevel.__members__:
                raise ValueError(f"{variable} must be one of {_choices()}, got {value!r}")
            return DebugLevel[value.upper()]
    return DebugLevel.OFF


def _choices(prefix: str = "") -> str:
    return ", ".join(f"{prefix}{name}" for name in DebugLevel.__members__)
