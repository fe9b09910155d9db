"""What the processes of a job prove their membership with: its secret, and the files of TLS."""

from __future__ import annotations

import os
import stat
import sys
from typing import NamedTuple

from meshdist.errors import DistNetworkError
from meshdist.system.env_flags import ENCRYPTION, INSECURE, switch
from meshdist.system.platform import CLOSE_ON_EXEC, user_id

SECRET_VARIABLE = "MESHDIST_SECRET"
SECRET_FILE_VARIABLE = "MESHDIST_SECRET_FILE"
TLS_CERT_VARIABLE = "MESHDIST_TLS_CERT"
TLS_KEY_VARIABLE = "MESHDIST_TLS_KEY"
TLS_CA_VARIABLE = "MESHDIST_TLS_CA"
SET_ALIKE = f"set {ENCRYPTION} and {TLS_CERT_VARIABLE} to the same values on all processes of the job"
"""What to do where only one side of a connection is encrypted."""

_MOST_BYTES = 4096


def secret_from_environment() -> bytes:
    """Return the job's secret from MESHDIST_SECRET or the file MESHDIST_SECRET_FILE, empty if neither is set.

    Raises:
        ValueError: The file cannot be used, or differs from MESHDIST_SECRET.
    """
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    path = os.environ.get(SECRET_FILE_VARIABLE)
    if not path:
        return secret
    in_file = read_secret_file(path)
    if secret not in (b"", in_file):
        raise ValueError(f"{SECRET_VARIABLE} and the file {SECRET_FILE_VARIABLE}={path} differ: set only one of them")
    return in_file


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
        if sys.platform != "win32":
            _check_private(SECRET_FILE_VARIABLE, path, found, "secret")
        secret = os.read(fd, _MOST_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not secret or len(secret) > _MOST_BYTES or not secret.isascii() or b"\0" in secret:
        raise ValueError(
            f"{SECRET_FILE_VARIABLE}={path} must hold 1 to {_MOST_BYTES} ASCII characters, got {found.st_size} bytes; "
            "make one with (umask 077; openssl rand -hex 32 > FILE)"
        )
    return secret


class TlsError(OSError):
    """Report a TLS failure: a refused certificate, or bytes that are not TLS."""


class AlertError(TlsError):
    """Report an alert; until the handshake is over, anybody may have sent it."""


class OtherSecretAlert(AlertError):
    """Report an alert which says that this side has the certificate of a different secret."""


class OtherSecretError(TlsError):
    """Report that the other side has the certificate of a different secret."""


class TlsFiles(NamedTuple):
    """Files in PEM format."""

    certificate: str  # this process's own, signed by the authority; one for all hosts or one for each
    key: str  # its private key
    authority: str  # the certificate of an authority that signs for this job only


def tls_files_from_environment() -> TlsFiles | None:
    """Return the files that MESHDIST_TLS_CERT, _KEY and _CA name; None if none of them is set.

    Raises:
        ValueError: Only some are set; or users other than the owner could read or change the key.
    """
    names = (TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TLS_CA_VARIABLE)
    paths = [os.environ.get(name, "") for name in names]
    if not any(paths):
        return None
    missing = [name for name, path in zip(names, paths, strict=True) if not path]
    if missing:
        raise ValueError(
            f"TLS for the store needs {', '.join(names)}, each the path of a PEM file, but {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not set: set all of them on all processes of the job, or none"
        )
    files = TlsFiles(*paths)
    try:
        found = os.stat(files.key)
    except OSError as error:
        raise ValueError(f"{TLS_KEY_VARIABLE}={files.key} cannot be read: {error.strerror}") from error
    _check_private(TLS_KEY_VARIABLE, files.key, found, "key")
    return files


def _check_private(variable: str, path: str, found: os.stat_result, content: str) -> None:
    if found.st_mode & 0o077 or found.st_uid not in (user_id(), 0):
        raise ValueError(
            f"{variable}={path} must be readable by its owner alone, and be this user's (uid {user_id()}) or root's,"
            f" got {stat.filemode(found.st_mode)} of uid {found.st_uid}; use chmod 600, and a new {content}, as this"
            " one may be known"
        )


def require_secret(place: str, secret: bytes) -> None:
    """Raise DistNetworkError if there is no secret for a port on a network, unless MESHDIST_INSECURE=1 allows it."""
    if not secret and not is_insecure_allowed():
        raise DistNetworkError(
            f"{place} can be reached from other hosts, and this job has no secret that keeps others out: set"
            f" {SECRET_VARIABLE} to the same random string on all hosts, or {SECRET_FILE_VARIABLE} to a file with it"
            f" that only you can read; or set {INSECURE}=1 on a network that you trust"
        )


def is_insecure_allowed() -> bool:
    """Return True if the user trusts the network, so that a job without a secret may use it."""
    return switch(INSECURE) is True
