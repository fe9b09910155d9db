"""Ranks started by torchrun, whose own store listens at MASTER_ADDR:MASTER_PORT.

That store uses torch's protocol, so the ranks of a host meet in a file, in a directory that only this user can access.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

from meshdist.errors import DistStoreError
from meshdist.system.platform import user_id

AGENT_STORE_VARIABLE = "MESHDIST_AGENT_STORE"
"""Set by meshdist's launchers only: the address of the store that they host for their ranks."""

_NAMES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
# Files of runs that ended without deleting theirs. Ranks that have opened a file do not need its name any more.
_OLD_S = 24 * 3600.0


def keeps_torchs_store() -> bool:
    """Return True if torchrun's store listens at MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) and AGENT_STORE_VARIABLE not in os.environ


def meeting_file() -> str:
    """Return the file in which the ranks of this start of this run meet.

    Raises:
        ValueError: The ranks are on several hosts, which share no file.
        DistStoreError: Other users can access the directory of such files.
    """
    num_hosts = os.environ.get("GROUP_WORLD_SIZE", "")
    if num_hosts != "1":
        raise ValueError(
            f"env:// rendezvous: torchrun started the ranks on {num_hosts or 'several'} hosts (GROUP_WORLD_SIZE) and"
            f" keeps {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} for a store of torch, which meshdist"
            " cannot use; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or start the script with meshrun"
        )
    import hashlib  # with OpenSSL, which other launchers' ranks need later

    directory = _private_directory()
    _remove_old_files(directory)
    # Run id and port may equal those of the previous run; the directory of its error files does not.
    run = os.path.dirname(os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")))
    told = "\0".join([run, *(os.environ.get(name, "") for name in _NAMES)])
    return os.path.join(directory, hashlib.sha256(os.fsencode(told)).hexdigest()[:32])


def _private_directory() -> str:
    import tempfile  # not needed to import meshdist

    directory = os.path.join(tempfile.gettempdir(), f"meshdist-torchrun-{user_id()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_id() or found.st_mode & 0o077:
        raise DistStoreError(
            f"env:// rendezvous: {directory} must be a directory of this user (uid {user_id()}) alone, mode 700, got"
            f" {stat.filemode(found.st_mode)} of uid {found.st_uid}; remove it, or set TMPDIR to another directory"
        )
    return directory


def _remove_old_files(directory: str) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            # Another rank may remove the same one.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _OLD_S:
                    os.unlink(entry.path)
