"""Key-value stores through which the ranks of a job find each other."""

from meshdist.store.file import FileStore
from meshdist.store.interface import Store
from meshdist.store.prefix import PrefixStore
from meshdist.store.request import HashStore
from meshdist.store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]


def __dir__() -> list[str]:
    return sorted(__all__)
