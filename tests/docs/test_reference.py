"""The API reference, as its docstrings are: it names what users can use, and nothing that is not described."""

import builtins
import importlib
import inspect
import re
from pathlib import Path

import pytest

import meshdist

API = Path(__file__).parents[2] / "docs" / "api"
ENTRIES = sorted(
    {
        found
        for page in API.glob("*.md")
        for found in re.findall(r"^\.\. auto(function|class|exception):: ([\w.]+)", page.read_text(), re.MULTILINE)
    }
)


def thing(name):
    module, _, last = (name if name.startswith("meshdist.") else f"meshdist.{name}").rpartition(".")
    if module.startswith("meshdist.autograd"):
        pytest.importorskip("autograd")
    return getattr(importlib.import_module(module), last)


def section(text, heading):
    """Return the names that a section of a docstring describes."""
    found = re.search(rf"^{heading}:\n((?: +.*\n?|\n)*)", text, re.MULTILINE)
    return re.findall(r"^    (\w+(?:, \w+)*)(?: \(.*?\))?: ", found.group(1), re.MULTILINE) if found else []


def documented(value):
    """Return the docstrings of a function, or of a class and its public methods."""
    members = [member for name, member in inspect.getmembers(value) if name[0] != "_"] if inspect.isclass(value) else []
    return [inspect.getdoc(one) or "" for one in (value, *members) if callable(one) or isinstance(one, property)]


def test_every_exception_that_an_entry_raises_is_described():
    described = {name.rpartition(".")[2] for kind, name in ENTRIES if kind == "exception"}
    raised = set()
    for kind, name in ENTRIES:
        if kind != "exception":
            raised |= {error for text in documented(thing(name)) for error in section(text, "Raises")}
    assert "UnknownAxisError" in raised
    assert sorted(raised - described - set(dir(builtins))) == []


def test_an_exception_of_the_whole_package_is_a_name_of_it():
    for kind, name in ENTRIES:
        if kind == "exception" and "." not in name:
            assert issubclass(getattr(meshdist, name), Exception)


def test_the_attributes_of_an_error_and_of_a_group_are_those_for_users():
    listed = section(inspect.getdoc(meshdist.DistError), "Attributes")
    assert listed == ["peer_failed", "error_prefix", "what", "call", "advice", "hang_report"]
    listed = section(inspect.getdoc(meshdist.ProcessGroup), "Attributes")
    assert "ranks" in listed
    (shown,) = meshdist.run(lambda: dir(meshdist.group.WORLD), 1)
    assert sorted(set(listed) - set(shown)) == []
    assert list(inspect.signature(meshdist.ProcessGroup.close).parameters) == ["self"]


def test_no_property_begins_with_a_type():
    # What comes before a colon in its first line is shown as its type.
    wrong = []
    for kind, name in ENTRIES:
        if kind == "class":
            for member, value in inspect.getmembers(thing(name), lambda value: isinstance(value, property)):
                if member[0] != "_" and ": " in (inspect.getdoc(value) or "").partition("\n")[0]:
                    wrong.append(f"{name}.{member}")
    assert wrong == []


@pytest.mark.parametrize("name", ["send", "recv", "isend", "irecv", "sendrecv", "probe"])
def test_messages_have_an_example(name):
    assert "Example:\n    >>> " in inspect.getdoc(getattr(meshdist, name))


def test_help_of_the_package_explains_the_names_of_types():
    for name in ("AnyArray", "ArrayTree", "OutputOrWork", "GroupLike", "Op"):
        assert f"`{name}`" in meshdist.__doc__
        assert f"py:type:: {name}\n" in (API / "types.md").read_text()


def test_arrays_have_a_name_in_signatures():
    for name in ("all_reduce", "send", "all_gather"):
        parameters = inspect.signature(getattr(meshdist, name)).parameters
        assert parameters["tensor"].annotation == "AnyArray"
