"""A folder of checkpoints: what is in it, who may write into it, and how a new one appears, whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from meshdist.checkpoint.manifest import MANIFEST, UNREADABLE
from meshdist.checkpoint.rank_agreement import CheckpointError
from meshdist.store.file_members import Member

CLAIM = ".saving"
# How often the claim is renewed, and from when on one that was not is void: its job was killed on another host.
RENEW_S, VOID_S = 10.0, 120.0
_STEP = re.compile(r"step-(\d+)")
# Hidden folders of saves, and of checkpoints that are being removed.
_REMAINS = re.compile(r"\.step-\d+-[0-9a-f]{8}")


def step_folder(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step}"


def named_steps(directory: Path) -> dict[int, Path]:
    """Return what has the name of a checkpoint in a folder, by step, ascending, whether it is one or not."""
    try:
        found = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    except FileNotFoundError:
        return {}
    return {step: found[step] for step in sorted(found)}


def steps_of(directory: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by step, ascending."""
    return {step: path for step, path in named_steps(directory).items() if (path / MANIFEST).exists()}


class Claim:
    """The right to write into a folder: a file that only one process can create, on network file systems as well.

    It is void if its process has ended, which only its own host knows, or was not renewed for two minutes.

    Args:
        directory: The folder.

    Raises:
        CheckpointError: Another process is saving into the folder.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CLAIM
        self._ended = threading.Event()
        mine = Member.here()
        token, _, host, pid, started = mine.pack()
        self._text = json.dumps(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "member": [part.decode() for part in (token, b"", host, pid, started)],
            }
        ).encode()
        while (now_s := self._tried()) is not None:
            self._drop_if_void(now_s)
        self._renewing = threading.Thread(target=self._renew, name="meshdist-checkpoint-claim", daemon=True)
        self._renewing.start()

    def _tried(self) -> float | None:
        """Try to make the claim; if another one has it, return the time by the clock of the file server."""
        # Complete from the start: others never see a claim that says nothing.
        draft = self.path.with_name(f"{CLAIM}-{secrets.token_hex(8)}")
        try:
            draft.write_bytes(self._text)
            now_s = draft.stat().st_mtime
            os.link(draft, self.path)
        except FileExistsError:
            return now_s
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                raise
            return None if self._created_without_links() else now_s
        finally:
            draft.unlink(missing_ok=True)
        return None

    def _created_without_links(self) -> bool:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with open(fd, "wb") as file:
                file.write(self._text)
        except BaseException:
            self.path.unlink()
            raise
        return True

    def _drop_if_void(self, now_s: float) -> None:
        try:
            claimed = _Claimed.read(self.path)
        except FileNotFoundError:
            return
        if not claimed.is_void(now_s):
            directory = self.path.parent
            raise CheckpointError(
                f"process {claimed.pid} on {claimed.host} is saving into {directory}; give each job a folder of its"
                f" own, or if that job has ended remove {self.path}"
            )
        void = self.path.with_name(f"{CLAIM}-void-{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):  # another one dropped it
            self.path.rename(void)
            if void.read_bytes() != claimed.text:  # another one has dropped it and claimed the folder since
                os.link(void, self.path)
            void.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            with suppress(FileNotFoundError):  # which `check` tells
                os.utime(self.path)

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the claim for void and the folder for its own."""
        try:
            is_mine = self.path.read_bytes() == self._text
        except FileNotFoundError:
            is_mine = False
        if not is_mine:
            raise CheckpointError(f"another job took over {self.path.parent} while this one was saving")

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._renewing.join()
        with suppress(FileNotFoundError, CheckpointError):
            self.check()
            self.path.unlink()


class _Claimed(NamedTuple):
    """A claim, or the draft of one, as another process reads it."""

    text: bytes
    changed_s: float
    host: str
    pid: int | str
    member: Member | None

    @classmethod
    def read(cls, path: Path) -> _Claimed:
        text, changed_s = path.read_bytes(), path.stat().st_mtime
        try:
            found = json.loads(text)
            member = Member.parse([part.encode() for part in found["member"]])
            return cls(text, changed_s, found["host"], found["pid"], member)
        except UNREADABLE:
            return cls(text, changed_s, "an unknown host", "?", None)

    def is_void(self, now_s: float) -> bool:
        return now_s - self.changed_s >= VOID_S or (self.member is not None and self.member.is_dead())


def remove_remains(claim: Claim) -> None:
    """Remove from the claimed folder what saves that were killed have left; nobody else is saving."""
    directory = claim.path.parent
    for path in directory.iterdir():
        if _REMAINS.fullmatch(path.name) and (path.is_dir() or path.is_symlink()):
            _remove(path)
    now_s = claim.path.stat().st_mtime  # just made, by the clock of the file server; that of this host may differ
    for path in directory.glob(f"{CLAIM}-*"):
        with suppress(FileNotFoundError):  # that of a process that asks for the claim right now
            if _Claimed.read(path).is_void(now_s):
                path.unlink()


def new_folder(directory: Path, final: Path) -> Path:
    """Make the hidden folder that a checkpoint is written into."""
    made = directory / f".{final.name}-{secrets.token_hex(4)}"
    made.mkdir()
    return made


def publish(folder: Path, final: Path) -> None:
    """Give a complete folder its name, at once and for good; it replaces one that has the name."""
    sync_folder(folder)
    if final.exists():
        _exchange(folder, final)
        sync_folder(final.parent)
        shutil.rmtree(folder)
    else:
        folder.rename(final)
    sync_folder(final.parent)


def _exchange(first: Path, second: Path) -> None:
    # glibc's renameat2 with RENAME_EXCHANGE; AT_FDCWD for both folders.
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        raise OSError(errno.ENOSYS, "this system cannot exchange two folders; remove the old one first", str(second))
    if call(-100, os.fsencode(first), -100, os.fsencode(second), 2) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}; remove the old one first", str(second))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    if sys.platform == "win32":
        return  # Windows opens no folders
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, for good."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def prune(directory: Path, keep: int, saved: Path) -> None:
    """Remove all but `saved` and the newest others, the oldest first; each disappears at once.

    Of a symbolic link, the link is removed, and not the checkpoint that it refers to.
    """
    others = [path for path in steps_of(directory).values() if path != saved]
    for path in others[: max(0, len(others) - keep + 1)]:
        hidden = directory / f".{path.name}-{secrets.token_hex(4)}"
        path.rename(hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Remove a folder; of a symbolic link, the link, and not what it refers to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
