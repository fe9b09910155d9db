"""The parser of the command lines: wrong words are answered in one line, with the option or command that was meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, NoReturn

from meshdist._spelling import option_meant

USAGE_STATUS = 2


class OptionParser(argparse.ArgumentParser):
    """Reports wrong options in one line, and prints once for all ranks of a job.

    Args:
        prints: Whether this process prints the help and the errors: the first rank of a job, or a process that is no
            rank. The other ranks end with status 0, since a launcher ends all ranks as soon as one fails.
    """

    def __init__(self, *args: Any, prints: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prints = prints
        self._commands: dict[str, OptionParser] = {}

    def add_commands(self, **commands: str) -> list[OptionParser]:
        """Add commands, with their help, one of which must be given; return their parsers."""
        adding = self.add_subparsers(dest="command", required=True)
        self._commands = {name: adding.add_parser(name, help=text) for name, text in commands.items()}
        for command in self._commands.values():
            command._prints = self._prints
        return list(self._commands.values())

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the options; for wrong ones, print an error and exit with status 2."""
        words = list(sys.argv[1:] if args is None else args)
        self._check_names(words)
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        more = "" if message.endswith("?") else "; see --help"
        self.exit(USAGE_STATUS if self._prints else 0, f"{self.prog}: {message}{more}\n")

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if self._prints:
            super()._print_message(message, file)

    def _check_names(self, words: Sequence[str]) -> None:
        """Refuse unknown options, and unknown commands, before anything that is missing."""
        parser = self
        if self._commands:
            given = next((word for word in words if not word.startswith("-")), None)
            names = ", ".join(self._commands)
            if given is None and not {"-h", "--help"} & set(words):
                self.error(f"expected a command: {names}")
            if given is not None and given not in self._commands:
                self.error(f"no command {given!r}; the commands are {names}{did_you_mean(given, self._commands)}")
            parser = self if given is None else self._commands[given]
        known = {*self._option_string_actions, *parser._option_string_actions}
        for word in words:
            name = word.partition("=")[0]
            if word == "--":
                break
            if word.startswith("--") and not any(option.startswith(name) for option in known):
                parser.error(f"{name} is not an option{did_you_mean(name, known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return what to append to a message about an unknown option, command or value; empty if no other is like it."""
    meant = option_meant(word, sorted(known))
    return "" if meant is None else f"; did you mean {meant}?"
