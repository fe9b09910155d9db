"""The tables of docs/migration.md against the package: what they say is there is there, and the rest is not."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch_api

import meshdist
from meshdist._torch_names import REASONS
from meshdist.collectives.definition import GroupFunction

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
TABLES, _, ONLY_HERE = PAGE.partition("## Every name of torch.distributed")[2].partition(
    "## Names that only meshdist has"
)
HERE = re.compile(r"(same|different signature|different|not supported)(?:, as `([^`]+)`)?(?:: (.+))?")
API = torch_api.snapshot()
TAKEN_BY_TORCH = {**API["names"], **API["older"]}


class Row(NamedTuple):
    name: str
    here: str
    place: str
    text: str


def cells(text: str) -> Iterator[tuple[str, str]]:
    """Give name and text of each row of the tables in `text`."""
    for line in text.splitlines():
        if line.startswith("| `"):
            name, _, here = line.strip("| ").partition(" | ")
            yield name.strip("`"), here


def rows() -> Iterator[Row]:
    for name, here in cells(TABLES):
        match = HERE.fullmatch(here)
        assert match, f"{name}: {here!r} begins with none of same, different, different signature, not supported"
        yield Row(name, match[1], match[2] or name, match[3] or "")


ROWS = list(rows())
PRESENT = [row for row in ROWS if row.here != "not supported"]
MISSING = [row for row in ROWS if row.here == "not supported"]
OF_PACKAGE = [row for row in MISSING if "." not in row.name]
COMPARED = [row for row in PRESENT if TAKEN_BY_TORCH.get(row.name) and row.here != "different signature"]


def find(place: str) -> Any:
    """Return what `meshdist.<place>` names; AttributeError where it names nothing."""
    value: Any = meshdist
    for part in place.split("."):
        if inspect.ismodule(value) and not hasattr(value, part):
            try:
                value = importlib.import_module(f"{value.__name__}.{part}")
            except ModuleNotFoundError as error:
                raise AttributeError(f"{value.__name__} has no {part}") from error
        elif value is meshdist.ProcessGroup and part in attributes_of_a_group():
            value = None
        else:
            value = getattr(value, part) if hasattr(value, part) else inspect.getattr_static(value, part)
    return value


@functools.cache
def attributes_of_a_group() -> set[str]:
    """Return the attributes of a ProcessGroup that its class has not."""
    return set(*meshdist.run(lambda: vars(meshdist.group.WORLD), 1))


def parameters(text: str) -> tuple[list[str], list[str], list[str], int]:
    """Return names by position, those of them that are needed, names that are keywords, and how many are nameless."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if "/" in words:
        return [], [], [], len(words) - 1
    positional = words[: words.index("*")] if "*" in words else words
    keywords = words[len(positional) + 1 :]
    needed = [word for word in positional if not word.endswith("=")]
    return [word.rstrip("=") for word in positional], needed, [word.rstrip("=") for word in keywords], 0


def takes(function: Any, text: str, *, is_method: bool) -> None:
    """Fail unless `function` can be called in every way that `text` tells."""
    signature = signature_of(function, is_method=is_method)
    positional, needed, keywords, nameless = parameters(text)
    owner = [object()] if is_method and not isinstance(function, GroupFunction) else []
    ours = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ][len(owner) :]
    assert ours[: len(positional)] == positional, f"takes {ours}, torch's takes {positional}"
    signature.bind(*owner, *range(nameless), *needed)
    signature.bind(*owner, *range(nameless), *positional, **dict.fromkeys(keywords))


def signature_of(function: Any, *, is_method: bool) -> inspect.Signature:
    """Return the signature as users meet it."""
    if isinstance(function, enum.EnumMeta):
        return inspect.Signature([inspect.Parameter("value", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
    signature = inspect.signature(function)
    if is_method and isinstance(function, GroupFunction):
        return signature.replace(parameters=[p for name, p in signature.parameters.items() if name != "group"])
    return signature


def is_method(place: str, function: Any) -> bool:
    """Return whether `function` is found in a class and is given the instance as its first argument."""
    cls, _, name = place.rpartition(".")
    found = inspect.getattr_static(find(cls), name) if cls else None
    return bool(cls) and inspect.isclass(find(cls)) and (inspect.isfunction(found) or isinstance(found, GroupFunction))


def test_every_row_says_what_it_has_to():
    assert len(ROWS) > 250
    silent = [row.name for row in ROWS if row.here != "same" and not row.text]
    assert silent == []


def test_every_name_of_torch_has_one_row():
    names = [row.name for row in ROWS]
    assert sorted(set(TAKEN_BY_TORCH) - set(names)) == []
    assert sorted(set(names) - set(TAKEN_BY_TORCH)) == []
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("row", PRESENT, ids=[row.name for row in PRESENT])
def test_name_is_there(row):
    find(row.place)


@pytest.mark.parametrize("row", COMPARED, ids=[row.name for row in COMPARED])
def test_it_takes_what_torch_takes(row):
    value = find(row.place)
    for call in TAKEN_BY_TORCH[row.name]:
        takes(value, call, is_method=is_method(row.place, value))


def test_names_that_are_not_supported_are_not_there():
    wrong = []
    for row in ROWS:
        if row.here == "not supported":
            try:
                find(row.name)
            except AttributeError:
                continue
            wrong.append(row.name)
    assert wrong == []


def says_why(row):
    return re.escape(f" (torch.distributed has one): {row.text}; see docs/migration.md") + "$"


def objects_of(cls):
    """Return objects of a class of torch.distributed, also of classes derived from it."""
    made = {
        "Backend": list,  # none: they are strings
        "ProcessGroup": lambda: [meshdist.group.WORLD],
        "ReduceOp": lambda: list(meshdist.ReduceOp),
        "Store": lambda: [meshdist.HashStore(), meshdist.PrefixStore("a", meshdist.HashStore())],
        "TCPStore": lambda: [meshdist.TCPStore("127.0.0.1", 0, is_master=True)],
        "Work": lambda: [meshdist.barrier(async_op=True), meshdist.isend(np.ones(1), 0)],
    }
    return made[cls]()


def test_the_reasons_are_those_of_the_page():
    assert {row.name: row.text for row in MISSING} == REASONS


@pytest.mark.parametrize("row", MISSING, ids=[row.name for row in MISSING])
def test_names_that_are_not_supported_say_why(row):
    cls, _, name = row.name.rpartition(".")

    def main():
        with pytest.raises(AttributeError, match=says_why(row)):
            getattr(find(cls) if cls else meshdist, name)
        for owner in objects_of(cls) if cls else []:
            with pytest.raises(AttributeError, match=says_why(row)):
                getattr(owner, name)
            assert not hasattr(owner, name)
            assert getattr(owner, name, None) is None
        if cls == "Work":
            meshdist.recv(np.empty(1), 0)

    meshdist.run(main, 1)


@pytest.mark.parametrize("row", OF_PACKAGE, ids=[row.name for row in OF_PACKAGE])
def test_names_that_are_not_supported_say_why_when_imported(row):
    assert not hasattr(meshdist, row.name)
    for statement in (f"from meshdist import {row.name}", f"import meshdist.{row.name}"):
        with pytest.raises(ModuleNotFoundError, match=says_why(row)):
            exec(statement)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("import meshdist.deprecated as dist", "import its names from `meshdist`"),
        ("import meshdist.distributed as dist", "`import meshdist as dist`"),
        ("import meshdist.distributed.deprecated as dist", "`import meshdist as dist`"),
        ("import meshdist.distributed_deprecated as dist", "`import meshdist as dist`"),
        ("from meshdist.distributed_c10d import all_reduce", "import its names from `meshdist`"),
        ("import meshdist.nn.functional", "`meshdist.functional` has the collectives"),
        ("from meshdist import nn", "`meshdist.functional` has the collectives"),
        ("import meshdist.pipeline.sync", "wraps torch modules"),
        ("from meshdist.elastic.multiprocessing.errors import record", "without a decorator"),
        ("from meshdist import rpc, all_reduce", "no remote procedure calls"),
        ("from meshdist.tensor.parallel import parallelize_module", "`column_parallel` and `row_parallel`"),
        ("from meshdist.tensor import parallel", "`column_parallel` and `row_parallel`"),
        ("from meshdist.tensor.placement_types import Shard", "import its names from `meshdist.tensor`"),
        ("import meshdist.tensor.experimental", "`local_map` and `implicit_redistribution`"),
    ],
)
def test_parts_of_torch_distributed_that_are_not_here_say_why_when_imported(statement, reason):
    with pytest.raises(ModuleNotFoundError, match=rf"^cannot import name .*: .*{re.escape(reason)}"):
        exec(statement)


def test_other_modules_are_missing_as_anywhere():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'meshdist\.no_such_part'$"):
        importlib.import_module("meshdist.no_such_part")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'meshdist\.debug\.rpc'$"):
        importlib.import_module("meshdist.debug.rpc")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'rpc'$"):
        importlib.import_module("rpc")


def test_every_public_name_is_in_a_table():
    documented = {row.place.partition(".")[0] for row in PRESENT} | {name for name, _ in cells(ONLY_HERE)}
    assert sorted(set(meshdist.__all__) - documented) == []


def test_names_that_are_only_here_are_here():
    only = [name for name, _ in cells(ONLY_HERE)]
    assert [name for name in only if not hasattr(meshdist, name)] == []
    assert sorted(set(only) & set(TAKEN_BY_TORCH)) == []


def test_snapshot_is_what_torch_has(torch):
    if torch.__version__.partition("+")[0] != torch_api.VERSION:
        pytest.skip(f"the snapshot is of torch {torch_api.VERSION}, installed is {torch.__version__}")
    assert torch_api.installed() == API
