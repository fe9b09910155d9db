"""Stores in a dry run: tables in this process, in place of a server or a file."""

from __future__ import annotations

from meshdist.current import current_slot
from meshdist.deadline import Deadline
from meshdist.errors import DistStoreError
from meshdist.store.table import BLOCKING, Op, Table
from meshdist.store.wire import Status


class DryStore:
    """What the stores of one name are in a dry run; it has what a TCPStore asks of its client.

    Args:
        name: What messages call the store.
        table: The keys and values.

    Example:
        >>> store = DryStore("TCPStore [localhost]:1234", Table())
        >>> store.reply(Op.ADD, [b"count", b"2"])
        [b'2']
    """

    def __init__(self, name: str, table: Table) -> None:
        self.name = name
        self._table = table

    def connect(self, deadline: Deadline) -> None:
        """Do nothing: there is nobody to connect to."""

    def request(self, op: Op, args: list[bytes], timeout_s: float) -> tuple[Status, list[bytes]]:
        """Carry out `op` at once; see `reply`."""
        return Status.OK, [] if op in (Op.JOIN, Op.BEQUEATH) else self.reply(op, args)

    def reply(self, op: Op, args: list[bytes]) -> list[bytes]:
        """Carry out `op` and return its reply.

        Raises:
            DistStoreError: It waits for keys that are not there: nobody else is going to set them.
            ValueError: The operation does not fit the value.
        """
        if op in BLOCKING and (missing := self._table.missing(args)):
            keys = ", ".join(repr(key.decode()) for key in missing)
            raise DistStoreError(
                f"{self.name}: {keys} cannot come, as this is a dry run, in which no other rank sets keys; set them"
                " before they are asked for"
            )
        return self._table.apply(op, args)[0]

    def close(self) -> None:
        """Do nothing: the keys stay until the dry run ends."""


def dry_store(name: str) -> DryStore | None:
    """Return what stands for the store of this name in a dry run; None outside of one."""
    dry = current_slot().dry
    return None if dry is None else DryStore(name, dry.tables.setdefault(name, Table()))
