"""Which connections of a process are encrypted, and how."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from meshdist.security.credentials import TLS_CERT_VARIABLE, TlsFiles, tls_files_from_environment
from meshdist.system.env_flags import ENCRYPTION, encryption_mode

if TYPE_CHECKING:
    from meshdist.security.tls import TlsContext


class Encryption:
    """Decides which connections use TLS; its contexts are made when they are needed, as that loads OpenSSL.

    Connections to other hosts use it, with a certificate that all processes of the job compute from its secret. With
    `files`, all connections do, with those. MESHDIST_ENCRYPTION is `off` for none, `all` for those over loopback too.

    Raises:
        ValueError: MESHDIST_ENCRYPTION has no such value, or is `off` although there are `files`.
    """

    def __init__(self, secret: bytes, files: TlsFiles | None = None) -> None:
        self._secret = secret
        self._files = files
        self._mode = encryption_mode()
        if files is not None and self._mode == "off":
            raise ValueError(
                f"{ENCRYPTION}=off and {TLS_CERT_VARIABLE}={files.certificate} contradict each other: set one of them"
            )

    @property
    def mode(self) -> str:
        """What both ends of a connection must have in common, as a phrase for messages."""
        if self._files is not None:
            return f"the certificates of {TLS_CERT_VARIABLE}"
        return f"{ENCRYPTION}={self._mode}" if self._secret else "no secret"

    @property
    def is_on(self) -> bool:
        """Whether connections to other hosts are encrypted."""
        return self._files is not None or (bool(self._secret) and self._mode != "off")

    def covers(self, host: str) -> bool:
        """Return whether a connection is encrypted whose other end has the address `host`."""
        return self.is_on and (self._files is not None or self._mode == "all" or not is_loopback(host))

    def prepare(self, hosts: Iterable[str]) -> None:
        """Make the contexts now if a server at `hosts` may need them: a failure later would be its end."""
        if any(self.covers(host) for host in hosts):
            self.make_contexts()

    def make_contexts(self) -> None:
        """Make both contexts; raise ValueError for files that cannot be used."""
        assert self.server
        assert self.client

    @cached_property
    def server(self) -> TlsContext:
        return self._context(is_server=True)

    @cached_property
    def client(self) -> TlsContext:
        return self._context(is_server=False)

    def _context(self, *, is_server: bool) -> TlsContext:
        from meshdist.security.tls import context_of_files, context_of_job

        if self._files is not None:
            return context_of_files(self._files, is_server=is_server)
        return context_of_job(self._secret, is_server=is_server)


def encryption_from_environment(secret: bytes) -> Encryption:
    """Return the encryption that the environment asks for.

    Raises:
        ValueError: MESHDIST_ENCRYPTION has another value, or the files of TLS cannot be used.
    """
    files = tls_files_from_environment()
    encryption = Encryption(secret, files)
    if files is not None:
        encryption.make_contexts()
    return encryption


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can have the address `host`."""
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"
