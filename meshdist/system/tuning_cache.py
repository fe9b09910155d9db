"""The choices of tuned plans that are remembered for this machine, in a file of the user's cache directory."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from typing import Any

from meshdist import core
from meshdist.system.platform import available_cores
from meshdist.system.versions import versions

DIRECTORY = "MESHDIST_CACHE_DIR"
"""Where the choices are remembered, instead of the user's cache directory."""

# The meaning and the speed of the ways, and what was measured: choices of a different version are ignored.
_VERSION = 8
_PARTS = ("choices", "candidates")
_log = logging.getLogger("meshdist")
_told: set[str] = set()


class TuningCache:
    """The remembered choices for groups of `num_ranks` ranks on this machine: its processor, cores and kernel.

    One job alone may have been disturbed without noticing: what it has measured is a candidate, until the next job that
    measures it chooses the same.

    A file that is missing, damaged, or of another machine has no choices; one that cannot be written is left. Both are
    said once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = str(num_ranks)

    def choice(self, kind: str, *, or_candidate: bool = False) -> str | None:
        """Return the chosen way for a kind of call; None if it is not remembered."""
        choices, candidates = self._known
        way = choices.get(kind, candidates.get(kind) if or_candidate else None)
        return way if isinstance(way, str) else None

    def update(self, measured: Mapping[str, str], *, is_final: bool = False) -> None:
        """Add what was measured to the file: as choices if the last job chose the same, or if it `is_final`."""
        path = path_of(self._machine)
        # Another job may have added choices since this one read them; of two that write now, the later one counts.
        content = self._read()
        choices, candidates = (kinds.setdefault(self._ranks, {}) for kinds in content)
        if path is None or choices == {**choices, **measured}:
            return
        for kind, way in measured.items():
            if is_final or candidates.get(kind) == way:
                choices[kind] = way
                candidates.pop(kind, None)
            else:
                candidates[kind] = way
        of_all = dict(zip(_PARTS, content, strict=True))
        text = json.dumps({"version": _VERSION, "machine": self._machine, **of_all}, indent=1)
        try:
            import tempfile  # few jobs write

            directory = os.path.dirname(path)
            os.makedirs(directory, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
                file.write(text + "\n")
            os.replace(file.name, path)
        except OSError as error:
            _tell(f"the measured choices of plans cannot be remembered: {error}")

    @cached_property
    def _machine(self) -> str:
        known = versions()
        with_core = "without the compiled core" if core.module is None else "with the compiled core"
        return f"{known['CPU']}, {available_cores()} cores, {known['kernel']}, {with_core}"

    @cached_property
    def _known(self) -> tuple[dict[str, Any], dict[str, Any]]:
        choices, candidates = (kinds.get(self._ranks, {}) for kinds in self._read())
        return choices, candidates

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the choices, and the candidates, by the number of ranks and the kind of call."""
        path = path_of(self._machine)
        if path is None:
            return {}, {}
        try:
            with open(path) as file:
                found = json.load(file)
            if (found["version"], found["machine"]) != (_VERSION, self._machine):
                return {}, {}
            choices, candidates = ({ranks: dict(kinds) for ranks, kinds in found[part].items()} for part in _PARTS)
            return choices, candidates
        except (FileNotFoundError, NotADirectoryError):
            return {}, {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            _tell(f"{path} is ignored; it should hold measured choices of plans: {type(error).__name__}: {error}")
            return {}, {}


def path_of(machine: str) -> str | None:
    """Return the file for a machine; None if the user has no directory for it."""
    name = f"tuning-{sha256(machine.encode()).hexdigest()[:12]}.json"
    if os.environ.get(DIRECTORY):
        return os.path.join(os.environ[DIRECTORY], name)
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(f"~/{caches}")
    return None if base.startswith("~") else os.path.join(base, "meshdist", name)  # "~": the process has no home


def _tell(words: str) -> None:
    if words not in _told:
        _told.add(words)
        _log.warning("%s", words)
