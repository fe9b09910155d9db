"""What processes that look for each other say in a datagram, sealed with the job's secret."""

from __future__ import annotations

import json
from typing import NamedTuple

_MAGIC = b"meshdist notice 1\n"
_SEAL_BYTES = 32
_MOST_HEARD = 256
_TOKEN_CHARACTERS = 16
_MOST_CHARACTERS = 4096


class Notice(NamedTuple):
    """One process's word to the others.

    Attributes:
        token: Names the sender, 16 hexadecimal digits.
        group_name: The job that it belongs to, among those that share address and secret.
        host: Equal for processes of one host.
        port: Where it hosts the store; 0 if it does not.
        heard: The tokens that it has heard of late. One's own token in there shows that this notice is an answer, no
            recording of an earlier one.

    Example:
        >>> notice = Notice("0123456789abcdef", "job", "a host", 0, ())
        >>> unseal(seal(notice, b"secret"), b"secret") == notice
        True
        >>> unseal(seal(notice, b"secret"), b"other") is None
        True
    """

    token: str
    group_name: str
    host: str
    port: int
    heard: tuple[str, ...]


def seal(notice: Notice, secret: bytes) -> bytes:
    """Return `notice` as a datagram that only who knows `secret` can have made."""
    body = json.dumps(notice._replace(heard=notice.heard[-_MOST_HEARD:])).encode()
    return _MAGIC + _seal_of(body, secret) + body


def unseal(data: bytes, secret: bytes) -> Notice | None:
    """Return the notice in a datagram; None if it is a stranger's, of a job with another secret, or damaged."""
    import hmac

    start = len(_MAGIC) + _SEAL_BYTES
    body = data[start:]
    if not data.startswith(_MAGIC) or not hmac.compare_digest(data[len(_MAGIC) : start], _seal_of(body, secret)):
        return None
    # Without a secret anyone can seal, so what is inside is looked at as closely as a stranger's.
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _checked(fields)


def _checked(fields: object) -> Notice | None:
    if not isinstance(fields, list) or len(fields) != len(Notice._fields):
        return None
    token, group_name, host, port, heard = fields
    if not (isinstance(port, int) and 0 <= port <= 65535 and isinstance(heard, list) and len(heard) <= _MOST_HEARD):
        return None
    if not all(isinstance(text, str) and len(text) <= _MOST_CHARACTERS for text in (group_name, host)):
        return None
    if not all(isinstance(text, str) and len(text) == _TOKEN_CHARACTERS for text in (token, *heard)):
        return None
    return Notice(token, group_name, host, int(port), tuple(heard))


def _seal_of(body: bytes, secret: bytes) -> bytes:
    import hmac  # 3 ms that only a process that sends notices has to pay

    return hmac.digest(secret, _MAGIC + body, "sha256")
