"""The job's secret from a file, for hosts that share a file system or are handed secrets as files."""

from __future__ import annotations

import os
import stat
import sys

from meshdist.systems import CLOSE_ON_EXEC, user_id

SECRET_FILE_VARIABLE = "MESHDIST_SECRET_FILE"

_MOST_BYTES = 4096


def read_secret_file(path: str) -> bytes:
    """Return the secret in the file `path`, without white space around it.

    Raises:
        ValueError: It cannot be read, is empty or too long, or others than its owner could read or change it.
    """
    # Not blocking: a pipe of that name would wait for its writer.
    try:
        fd = os.open(path, os.O_RDONLY | CLOSE_ON_EXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ValueError(f"{SECRET_FILE_VARIABLE}={path} cannot be read: {error.strerror}") from error
    try:
        # Of the file that was opened: the name may lead to another one by now.
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{SECRET_FILE_VARIABLE}={path} must be a file, got {stat.filemode(found.st_mode)}")
        if sys.platform != "win32" and (found.st_mode & 0o077 or found.st_uid not in (user_id(), 0)):
            raise ValueError(
                f"{SECRET_FILE_VARIABLE}={path} must be readable by its owner alone, and be this user's (uid "
                f"{user_id()}) or root's, got {stat.filemode(found.st_mode)} of uid {found.st_uid}; use chmod 600, "
                "and a new secret, as this one may be known"
            )
        secret = os.read(fd, _MOST_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not secret or len(secret) > _MOST_BYTES or not secret.isascii() or b"\0" in secret:
        raise ValueError(
            f"{SECRET_FILE_VARIABLE}={path} must hold 1 to {_MOST_BYTES} ASCII characters, got {found.st_size} bytes; "
            "make one with (umask 077; openssl rand -hex 32 > FILE)"
        )
    return secret
