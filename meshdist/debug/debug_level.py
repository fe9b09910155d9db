"""The debug level: how much is logged about the calls of a rank.

It is the level of the `meshdist` logger, so the two cannot disagree: DETAIL is DEBUG, INFO is INFO, and OFF is WARNING.
The environment decides where the logger's level is not set.
"""

from __future__ import annotations

import logging
import os
from enum import IntEnum

from meshdist.runtime.context import current_slot
from meshdist.runtime.log import LOGGER_NAME, hide_records, show_records, show_warnings

VARIABLES = ("MESHDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG")


class DebugLevel(IntEnum):
    """How much is logged.

    OFF logs warnings. INFO also logs set-up, groups, connections and their end, and calls that wait for more than a
    second. DETAIL logs every call: its group, its bytes, and its line. DETAIL also finds three mistakes that raise an
    error: arrays of equal sizes but different shapes in any collective of one array or list (at other levels, only in
    reductions and broadcasts), calls on overlapping groups in different orders, and operations on arrays over a mesh
    that differ between the ranks; these checks need all ranks at DETAIL. Under meshrun and in notebooks, the tracebacks
    of meshdist's errors include its own frames only at DETAIL.

    Example:
        >>> from meshdist import DebugLevel
        >>> DebugLevel.INFO < DebugLevel.DETAIL
        True
    """

    OFF = 0
    INFO = 1
    DETAIL = 2

    def __str__(self) -> str:
        return f"DebugLevel.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def get_debug_level() -> DebugLevel:
    """Return the debug level of this process.

    Raises:
        ValueError: The level was never set, and the environment names an unknown one.
    """
    level = logging.getLogger(LOGGER_NAME).level
    if level == logging.NOTSET:
        return _level_of_environment()
    return DebugLevel.DETAIL if level <= logging.DEBUG else DebugLevel(int(level <= logging.INFO))


def shows_all_frames() -> bool:
    """Return whether tracebacks and stacks have the frames of this package below the user's code: at DETAIL."""
    try:
        return get_debug_level() is DebugLevel.DETAIL
    except ValueError:  # the environment names no level, which may be the error to show
        return False


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process, and of the groups of this rank, from the next call on.

    Args:
        level: A DebugLevel.

    Raises:
        TypeError: `level` is not a DebugLevel.
    """
    if not isinstance(level, DebugLevel):
        raise TypeError(f"set_debug_level: level must be one of {_choices('DebugLevel.')}, got {level!r}")
    if level is DebugLevel.OFF:
        hide_records()
    else:
        show_records(logging.DEBUG if level is DebugLevel.DETAIL else logging.INFO)
    from meshdist.groups.world import world_in  # the level is read where there is no world, as tracebacks are shortened

    world = world_in(current_slot())
    if world is not None:
        world.hook_registry.log_calls(level is DebugLevel.DETAIL)


def set_debug_level_from_env() -> None:
    """Set the debug level from MESHDIST_DEBUG, or else TORCH_DISTRIBUTED_DEBUG; OFF where neither is set.

    Raises:
        ValueError: The value is not a level; the message lists them.
    """
    set_debug_level(_level_of_environment())


def begin_debugging() -> DebugLevel:
    """Apply the environment's debug level, unless a level was set; return the level."""
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
                from meshdist.system.option_parser import did_you_mean  # which an error alone needs

                hint = did_you_mean(value.upper(), DebugLevel.__members__)
                raise ValueError(f"{variable} must be one of {_choices()}, got {value!r}{hint}")
            return DebugLevel[value.upper()]
    return DebugLevel.OFF


def _choices(prefix: str = "") -> str:
    return ", ".join(f"{prefix}{name}" for name in DebugLevel.__members__)
