"""The certificate of a job: every process computes the same one, and its key, from the job's secret.

Its key pair is Ed25519 (RFC 8032) with a seed derived from the secret, so whoever can present the certificate knows
the secret. The ssl module can load a key but not make one; the arithmetic here makes the public key and signs the
certificate once in each process, in about ten milliseconds. OpenSSL does everything that a peer can observe.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

# The curve: -x^2 + y^2 = 1 + d x^2 y^2 modulo `_PRIME`; `_ORDER` is that of the base point.
_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _PRIME) % _PRIME

# A point in extended coordinates: x = X / Z, y = Y / Z, T = X Y / Z (RFC 8032, section 5.1.4).
_Point = tuple[int, int, int, int]
_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE_Y = 4 * pow(5, -1, _PRIME) % _PRIME
_BASE: _Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _PRIME)

# Tags of DER (X.690).
_BOOLEAN, _INTEGER, _BIT_STRING, _OCTET_STRING, _OID, _UTF8_STRING = 1, 2, 3, 4, 6, 12
_UTC_TIME, _GENERALIZED_TIME, _SEQUENCE, _SET, _CONTEXT_0, _CONTEXT_3 = 0x17, 0x18, 0x30, 0x31, 0xA0, 0xA3


class JobCertificate(NamedTuple):
    """Both in PEM format."""

    certificate: str
    key: str


def job_certificate(secret: bytes) -> JobCertificate:
    """Return the certificate that stands for knowledge of `secret`, and its key.

    It is its own authority, and valid at any time, since the clock of a host may be wrong.
    """
    seed = hmac.digest(secret, b"meshdist certificate", "sha256")
    key_pair = _Ed25519(seed)
    algorithm = _der(_SEQUENCE, _der(_OID, b"\x2b\x65\x70"))  # 1.3.101.112
    name = _der(
        _SEQUENCE,
        _der(_SET, _der(_SEQUENCE, _der(_OID, b"\x55\x04\x03"), _der(_UTF8_STRING, b"meshdist job"))),  # commonName
    )
    is_authority = _der(_SEQUENCE, _der(_BOOLEAN, b"\xff"))
    basic_constraints = _der(
        _SEQUENCE, _der(_OID, b"\x55\x1d\x13"), _der(_BOOLEAN, b"\xff"), _der(_OCTET_STRING, is_authority)
    )
    content = _der(
        _SEQUENCE,
        _der(_CONTEXT_0, _der(_INTEGER, b"\x02")),  # version 3
        _der(_INTEGER, b"\x01"),
        algorithm,
        name,
        _der(_SEQUENCE, _der(_UTC_TIME, b"000101000000Z"), _der(_GENERALIZED_TIME, b"99991231235959Z")),
        name,
        _der(_SEQUENCE, algorithm, _der(_BIT_STRING, b"\0", key_pair.public)),
        _der(_CONTEXT_3, _der(_SEQUENCE, basic_constraints)),
    )
    certificate = _der(_SEQUENCE, content, algorithm, _der(_BIT_STRING, b"\0", key_pair.sign(content)))
    key = _der(_SEQUENCE, _der(_INTEGER, b"\0"), algorithm, _der(_OCTET_STRING, _der(_OCTET_STRING, seed)))
    return JobCertificate(_pem("CERTIFICATE", certificate), _pem("PRIVATE KEY", key))


class _Ed25519:
    """A key pair; see RFC 8032, section 5.1."""

    def __init__(self, seed: bytes) -> None:
        digest = hashlib.sha512(seed).digest()
        self._scalar = int.from_bytes(digest[:32], "little") & (1 << 254) - 8 | 1 << 254
        self._prefix = digest[32:]
        self.public = _encode(_multiply(self._scalar, _BASE))

    def sign(self, message: bytes) -> bytes:
        nonce = _hash(self._prefix, message)
        point = _encode(_multiply(nonce, _BASE))
        return point + ((nonce + _hash(point, self.public, message) * self._scalar) % _ORDER).to_bytes(32, "little")


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _multiply(scalar: int, point: _Point) -> _Point:
    product: _Point = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            product = _add(product, point)
        point, scalar = _add(point, point), scalar >> 1
    return product


def _add(p: _Point, q: _Point) -> _Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _PRIME, (p[1] + p[0]) * (q[1] + q[0]) % _PRIME
    c, d = 2 * p[3] * q[3] * _D % _PRIME, 2 * p[2] * q[2] % _PRIME
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _PRIME, g * h % _PRIME, f * g % _PRIME, e * h % _PRIME


def _encode(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _PRIME)
    x, y = point[0] * inverse % _PRIME, point[1] * inverse % _PRIME
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _der(tag: int, *content: bytes) -> bytes:
    value = b"".join(content)
    size = len(value)
    num_bytes = (size.bit_length() + 7) // 8  # the shortest form of the length, as DER has it
    length = bytes([size]) if size < 128 else bytes([0x80 | num_bytes]) + size.to_bytes(num_bytes, "big")
    return bytes([tag]) + length + value


def _pem(label: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    lines = [text[begin : begin + 64] for begin in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])
