"""Key-value stores through which the ranks of a job find each other."""

from meshdist.store.base import Store
from meshdist.store.file import FileStore
from meshdist.store.hash import HashStore
from meshdist.store.prefix import PrefixStore
from meshdist.store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
