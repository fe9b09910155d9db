"""Topologies and measurements as TOML files; docs/topology.md describes the format."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshdist.topology.curve import Curve
from meshdist.topology.part import Link, Links, Part, host_parts, network_part

MOST_BYTES = 64 << 20  # of a file; 65,536 ranks as individual parts take a quarter
MOST_PARTS = 1 << 18  # hosts, sockets, GPUs and switches, after expansion of counts
MOST_RANKS = 1 << 20

_MOST_DOTS = 32
_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_DOTTED = re.compile(rf"(?:[\w\"'-]+[ \t]*\.[ \t]*){{{_MOST_DOTS}}}")


def read_bounded(path: str | os.PathLike[str]) -> str:
    """Return the text of a TOML file."""
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a topology file has at most {MOST_BYTES >> 20} MiB, and this has more")
    text = data.decode()
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > _MOST_DOTS and _DOTTED.search(_STRING.sub("_", line)):
            raise ValueError(f"line {number} has a key of more than {_MOST_DOTS} words with dots between them")
    return text


def check_number(of: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"a topology has at most {most} {of}, and this asks for {number}")


LINKS = ("memory", "socket_link", "gpu_link", "network")
HOST_KEYS = ("name", "count", "ranks", "sockets", "gpus", *LINKS)
PART_KEYS = ("name", "kind", "parent", "link", "memory", "ranks", "cores")
CURVE_KEYS = ("collective", "members", "nbytes", "seconds", "note")
LINK_KEYS = ("latency_s", "latency_us", "bandwidth", "bandwidth_gb_s")


class TomlError(ValueError):
    """Report an error in a topology file: the file, the table, the expected and the actual value."""


def read_topology(path: str | os.PathLike[str]) -> list[Part]:
    table = _read(path)
    try:
        _check_keys("the file", table, (*LINKS, "host", "part", "measured"))
        if ("host" in table) == ("part" in table):
            raise ValueError("expected [[host]] tables, or [[part]] tables, and not both")
        links = Links(*(_link(name, table[name]) if name in table else default for name, default in _defaults(Links())))
        return _hosts(_tables(table, "host"), links) if "host" in table else list(_parts(_tables(table, "part")))
    except (ValueError, TypeError) as error:
        raise TomlError(f"{os.fspath(path)}: {error}") from None


def read_curves(path: str | os.PathLike[str]) -> tuple[list[Curve], str]:
    """Return the curves and the note in a file of `CostModel.save`; nothing without `[[measured]]`."""
    table = _read(path)
    try:
        tables = enumerate(_tables(table, "measured"), 1)
        curves = [_curve(f"[[measured]] {number}", given) for number, given in tables]
        notes = [_text("[[measured]]", given, "note") for given in _tables(table, "measured") if "note" in given]
        return curves, notes[0] if notes else ""
    except (ValueError, TypeError) as error:
        raise TomlError(f"{os.fspath(path)}: {error}") from None


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        try:
            import tomli as toml
        except ImportError as error:
            raise ImportError(
                f"{os.fspath(path)}: Python 3.10 reads TOML with the package tomli: pip install tomli, or use 3.11"
            ) from error
    try:
        table: Mapping[str, Any] = toml.loads(read_bounded(path))
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TomlError(f"{os.fspath(path)}: this is not valid TOML: {error}") from None
    except RecursionError:
        raise TomlError(f"{os.fspath(path)}: its tables and lists are nested too deep") from None
    except ValueError as error:
        raise TomlError(f"{os.fspath(path)}: {error}") from None
    return table


def _defaults(links: Links) -> Iterable[tuple[str, Link]]:
    return zip(LINKS, links, strict=True)


def _tables(table: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"'{key}' must be tables, each under a line [[{key}]]")
    check_number(f"[[{key}]] tables", len(found), MOST_PARTS)
    return found


def _check_keys(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; choose from {', '.join(known)}")


def _integer(where: str, table: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {key} must be an integer of at least {least}, got {value!r}")
    return value


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        came = "got nothing" if value is None else f"got {value!r}"
        raise ValueError(f"{where}: {key} must be a text in quotes, {came}")
    return value


def _numbers(where: str, table: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, kind) for each in value):
        raise ValueError(f"{where}: {key} must be a list of numbers, got {value!r}")
    return tuple(value)


def _link(where: str, table: Any) -> Link:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected {{ latency_us = ..., bandwidth_gb_s = ... }}, got {table!r}")
    _check_keys(where, table, LINK_KEYS)
    values = []
    for name, other, factor in (("latency_s", "latency_us", 1e-6), ("bandwidth", "bandwidth_gb_s", 1e9)):
        if (name in table) == (other in table):
            raise ValueError(f"{where}: expected {other} (or {name}), once, got {table}")
        value = table.get(name, table.get(other))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where}: {name if name in table else other} must be a number, got {value!r}")
        if value < 0:
            raise ValueError(f"{where}: {name if name in table else other} must be 0 or positive, got {value!r}")
        values.append(float(value) if name in table else value * factor)
    try:
        return Link(*values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _hosts(tables: Sequence[Mapping[str, Any]], common: Links) -> list[Part]:
    counts = [_integer(f"[[host]] {number}", table, "count", 1, 1) for number, table in enumerate(tables, 1)]
    check_number("parts", sum(map(_num_parts, tables, counts)), MOST_PARTS)
    parts = network_part(sum(counts))
    next_rank = 0
    for number, (table, count) in enumerate(zip(tables, counts, strict=True), 1):
        where = f"[[host]] {number}"
        _check_keys(where, table, HOST_KEYS)
        name = _text(where, table, "name")
        sockets, gpus = (_integer(where, table, key, 0, 0) for key in ("sockets", "gpus"))
        links = Links(
            *(_link(f"{where}: {key}", table[key]) if key in table else default for key, default in _defaults(common))
        )
        for index in range(count):
            ranks = _ranks(where, table, count, next_rank)
            next_rank += len(ranks)
            own = f"{name}{index}" if count > 1 else name
            parts += host_parts(own, ranks, sockets, gpus, links, linked=sum(counts) > 1)
    return parts


def _num_parts(table: Mapping[str, Any], count: int) -> int:
    inside = [table.get(key, 0) for key in ("sockets", "gpus")]  # wrong types are reported later, with their table
    return count * (1 + sum(number for number in inside if isinstance(number, int) and number > 0))


def _ranks(where: str, table: Mapping[str, Any], count: int, next_rank: int) -> Sequence[int]:
    given = table.get("ranks")
    if not isinstance(given, list):
        num_ranks = _integer(where, table, "ranks", 0, 1)
        check_number("ranks", next_rank + num_ranks, MOST_RANKS)
        return range(next_rank, next_rank + num_ranks)
    if count > 1:
        raise ValueError(
            f"{where}: ranks is a list, which is for one host, but count is {count}; give the number of ranks of each"
        )
    return _numbers(where, table, "ranks", int)


def _parts(tables: Sequence[Mapping[str, Any]]) -> Iterable[Part]:
    for number, table in enumerate(tables, 1):
        where = f"[[part]] {number}"
        _check_keys(where, table, PART_KEYS)
        memory = {"memory": _link(f"{where}: memory", table["memory"])} if "memory" in table else {}
        yield Part(
            _text(where, table, "name"),
            _text(where, table, "kind"),
            _text(where, table, "parent") if "parent" in table else None,
            _link(f"{where}: link", table["link"]) if "link" in table else None,
            ranks=_numbers(where, table, "ranks", int),
            cores=_integer(where, table, "cores", 0, 0),
            **memory,
        )


def _curve(where: str, table: Mapping[str, Any]) -> Curve:
    _check_keys(where, table, CURVE_KEYS)
    return Curve(
        _text(where, table, "collective"),
        _numbers(where, table, "members", int),
        _numbers(where, table, "nbytes", int),
        _numbers(where, table, "seconds", (int, float)),
    )


def topology_text(parts: Iterable[Part]) -> str:
    blocks = []
    for part in parts:
        lines = ["[[part]]", f"name = {_quoted(part.name)}", f"kind = {_quoted(part.kind)}"]
        if part.parent is not None and part.link is not None:
            lines += [f"parent = {_quoted(part.parent)}", f"link = {_link_text(part.link)}"]
        lines.append(f"memory = {_link_text(part.memory)}")
        if part.ranks:
            lines.append(f"ranks = {list(part.ranks)}")
        if part.cores:
            lines.append(f"cores = {part.cores}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def curves_text(curves: Iterable[Curve], note: str) -> str:
    last = f"note = {_quoted(note)}\n" if note else ""
    return "".join(
        f"\n[[measured]]\ncollective = {_quoted(curve.collective)}\nmembers = {list(curve.members)}\n"
        f"nbytes = {list(curve.nbytes)}\nseconds = {list(curve.seconds)}\n{last}"
        for curve in curves
    )


def _link_text(link: Link) -> str:
    return f"{{ latency_s = {float(link.latency_s)!r}, bandwidth = {float(link.bandwidth)!r} }}"


def _quoted(text: str) -> str:
    return json.dumps(text)  # TOML basic strings have the escapes of JSON
