"""A store in a file, for processes that share a file system."""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress
from typing import Any

from meshdist.errors import DistStoreError
from meshdist.security.credentials import SECRET_VARIABLE
from meshdist.store.file_log import RequestLog
from meshdist.store.file_members import Member, Members
from meshdist.store.interface import DEFAULT_STORE_TIMEOUT_S, missing_error
from meshdist.store.request import RequestStore, dry_store
from meshdist.store.table import BLOCKING, Op, Table
from meshdist.system.deadline import Deadline, Timeout, seconds

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
_LEAVE_TIMEOUT_S = 5.0
_OTHER_JOB = (
    f"it belongs to another job, which has another {SECRET_VARIABLE}, or was left over by one; start all processes of a"
    " job with one secret, delete the file or choose another path"
)


class OtherJobsFileError(DistStoreError):
    """Report a file whose users have a different secret than this process."""


class FileStore(RequestStore):
    """A store in a file, for processes that share a file system, such as NFS.

    Every change is a record at the end of the file, written under a lock of the open file; each user replays the
    records that it has not seen. Only the owner can read and write the file, and it grows with every change.

    With a `world_size`, the file belongs to one run: a file left over from an earlier run, or in use by another, is
    rejected, and the last of the `world_size` users to leave deletes it. Without a `world_size`, the file is kept, and
    any number of users may open it.

    Args:
        file_name: The file, which is created if it does not exist; its directory must exist.
        world_size: How many stores (usually one a rank) will use the file, or -1 for any number.
        timeout: How long calls wait by default: a timedelta or seconds.

    Raises:
        DistStoreError: The directory is missing, or the file is not usable for this run; the message names it.

    Example:
        >>> import os, tempfile
        >>> from meshdist import FileStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "store")
        ...     with FileStore(path) as mine, FileStore(path) as yours:
        ...         mine.set("key", "value")
        ...         yours.get("key")
        b'value'
    """

    _closer: weakref.finalize[Any, Any]

    def __init__(
        self, file_name: str | os.PathLike[str], world_size: int = -1, *, timeout: Timeout = DEFAULT_STORE_TIMEOUT_S
    ) -> None:
        if not isinstance(world_size, int) or world_size == 0 or world_size < -1:
            raise ValueError(f"world_size must be the number of users or -1, got {world_size!r}")
        self._timeout_s = seconds(timeout)
        self._path = os.path.abspath(os.fspath(file_name))
        self._dry = dry_store(f"FileStore {self._path}")
        if self._dry is not None:
            self._closer = weakref.finalize(self, self._dry.close)
            return
        self._replica = _Replica(RequestLog(self._path), world_size)
        self._closer = weakref.finalize(self, self._replica.leave)
        try:
            self._replica.join(Deadline(self._timeout_s))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._path

    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> list[bytes]:
        if self._dry is not None:
            return self._dry.reply(op, args)
        deadline = Deadline(timeout_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            reply, missing = self._replica.request(op, args, deadline)
            if not missing:
                return reply
            if deadline.expired():
                raise missing_error(f"FileStore {self.path}", [key.decode() for key in missing], timeout_s)
            time.sleep(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Leave the file; may be called more than once."""
        self._closer()

    def withdraw(self) -> None:
        """Leave the file as if this user had never joined: its place is free again."""
        if self._dry is None:
            self._replica.withdrawn = True
        self._closer()

    def __repr__(self) -> str:
        return f"FileStore({self.path!r})"


class _Replica:
    """This user's state of the file: the table and the members after the records read so far."""

    def __init__(self, log: RequestLog, world_size: int) -> None:
        self.log = log
        self.withdrawn = False
        self._world_size = world_size
        self._me: Member | None = None
        self._forget()

    def _forget(self) -> None:
        self._table = Table()
        self._members = Members()
        self._is_one_runs: bool | None = None  # whether the first user had a world_size
        self.log.rewind()

    def request(self, op: Op, args: list[bytes], deadline: Deadline) -> tuple[list[bytes], list[bytes]]:
        """Return the reply, and the missing keys of a blocking operation."""
        with self.log.locked(deadline):
            self._catch_up()
            if op in BLOCKING and (missing := self._table.missing(args)):
                return [], missing
            reply, changed = self._table.apply(op, args)
            if changed:
                self._record(op, args)
            return reply, []

    def _catch_up(self) -> None:
        for op, args in self.log.read_new():
            if self._is_one_runs is None:
                self._is_one_runs = op is Op.JOIN
            try:
                self._replay(op, args)
            except (ValueError, TypeError, IndexError) as error:
                raise self.log.error(f"no store has written its {op.name} record ({error}); delete the file") from None

    def _replay(self, op: Op, args: list[bytes]) -> None:
        if op is Op.JOIN:
            self._members.joined(Member.parse(args))
        elif op is Op.LEAVE:
            self._members.left(args[0], withdrawn=len(args) > 1)
        else:
            self._table.apply(op, args)

    def _record(self, op: Op, args: list[bytes]) -> None:
        try:
            self.log.append(op, args)
        except DistStoreError:
            self._forget()  # the table has a change that the file lacks: replay the file at the next call
            raise

    def join(self, deadline: Deadline) -> None:
        """Start to use the file; wait for the users of an earlier run that are leaving it."""
        pause_s = _FIRST_PAUSE_S
        while not self._try_join(deadline):
            if deadline.expired():
                raise self.log.error(f"the users of an earlier run did not leave it within {deadline.timeout_s:g} s")
            time.sleep(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try_join(self, deadline: Deadline) -> bool:
        with self.log.locked(deadline):
            is_deleted = self.log.is_deleted
            if not is_deleted:
                self._catch_up()
                if self._world_size == -1:
                    return True
                me = Member.here()
                if self._members.are_of_another_job(me):
                    raise OtherJobsFileError(str(self.log.error(_OTHER_JOB)))
                refusal = self._members.refusal(me, self._world_size)
                if refusal is not None:
                    raise self.log.error(refusal)
                if not self._members.are_leaving(self._world_size):
                    self._record(Op.JOIN, me.pack())
                    self._is_one_runs = self._is_one_runs is not False
                    self._members.joined(me)
                    self._me = me
                    return True
        if is_deleted:
            self.log.reopen()
            self._forget()
        return False

    def leave(self) -> None:
        """Stop using the file, and delete it if no other user is left."""
        me = self._me
        if me is not None and me.pid == os.getpid():
            # Errors are harmless: the next run detects a file that is broken or left over.
            with suppress(DistStoreError), self.log.locked(Deadline(_LEAVE_TIMEOUT_S)):
                self._catch_up()
                self._record(Op.LEAVE, [me.token, b"withdrawn"] if self.withdrawn else [me.token])
                self._members.left(me.token, withdrawn=self.withdrawn)
                if self._is_over():
                    self.log.delete()
        self.log.close()

    def _is_over(self) -> bool:
        """Return True if the file is no longer needed: all have left, or all have withdrawn from a file of this run."""
        if self.withdrawn:
            return self._is_one_runs is True and self._members.is_empty()
        return self._members.have_all_left(self._world_size)
