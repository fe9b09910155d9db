"""Key-value stores through which the ranks of a job find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.store.interface import Store

if TYPE_CHECKING:
    from meshdist.store.file import FileStore
    from meshdist.store.prefix import PrefixStore
    from meshdist.store.request import HashStore
    from meshdist.store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error
    # A process needs one or two of them, with the modules below them.
    _MODULES = {"FileStore": "file", "HashStore": "request", "PrefixStore": "prefix", "TCPStore": "tcp"}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value  # from now on found without this function
        return value
