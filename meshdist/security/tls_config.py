"""The files by which the processes of a job use TLS with its store."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from meshdist.system.platform import user_id

TLS_CERT_VARIABLE = "MESHDIST_TLS_CERT"
TLS_KEY_VARIABLE = "MESHDIST_TLS_KEY"
TLS_CA_VARIABLE = "MESHDIST_TLS_CA"


class TlsError(OSError):
    """Report a TLS failure: a refused certificate, or bytes that are not TLS."""


class TlsFiles(NamedTuple):
    """Files in PEM format.

    Attributes:
        certificate: This process's own, signed by the authority; one for all hosts or one for each.
        key: Its private key.
        authority: The certificate of an authority that signs for this job only.
    """

    certificate: str
    key: str
    authority: str


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
    _check_key(files.key)
    return files


def _check_key(path: str) -> None:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ValueError(f"{TLS_KEY_VARIABLE}={path} cannot be read: {error.strerror}") from error
    if found.st_mode & 0o077 or found.st_uid not in (user_id(), 0):
        raise ValueError(
            f"{TLS_KEY_VARIABLE}={path} must be readable by its owner alone, and be this user's (uid {user_id()}) or"
            f" root's, got {stat.filemode(found.st_mode)} of uid {found.st_uid}; use chmod 600, and a new key, as this"
            " one may be known"
        )
