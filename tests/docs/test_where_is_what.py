"""docs/where-is-what.md: every file and every name that it mentions exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshdist"
PAGE = ROOT / "docs" / "where-is-what.md"
# Mentioned, and defined elsewhere.
NOT_OURS = {"process_vm_readv", "process_vm_writev"}
ANSWERS = [
    pytest.param(question, answer, id=re.sub(r"\W+", "-", question).strip("-").lower())
    for question, answer in re.findall(r"^\*\*(.*?\?)\*\*(.*?)(?:\n\n|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
]


@cache
def names_in(path):
    """Return the classes, functions and variables of a file, and the methods and attributes of its classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{name}" for inner in node.body for name in defined(inner))
    return names


def defined(node):
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def homes_of(name):
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if name in names_in(path))


def test_thirty_questions_are_answered():
    assert len(ANSWERS) >= 30


@pytest.mark.parametrize(("question", "answer"), ANSWERS)
def test_the_files_and_names_of_an_answer_exist(question, answer):
    words = re.findall(r"`([^`]+)`", answer)
    folder, files = PACKAGE, []
    for word in words:
        if word.endswith((".py", "/")):
            # A file without a folder is in that of the file named before it.
            path = PACKAGE / word if "/" in word or (PACKAGE / word).exists() else folder / word
            assert path.exists(), f"{PAGE.name}, {question!r}: {path.relative_to(ROOT)} does not exist; name its file"
            folder = path.parent
            files += [path] if path.is_file() else []
    for word in words:
        if not re.fullmatch(r"[A-Za-z_]+(\.[A-Za-z_]+)?", word) or word.endswith(".py") or word in NOT_OURS:
            continue
        if word.startswith(("MESHDIST_", "meshdist.")):
            continue
        if word in ("send", "recv", "dataflow"):  # methods of backends, and an argument of `collective`
            continue
        assert any(word in names_in(path) for path in files), (
            f"{PAGE.name}, {question!r}: none of the files it names defines {word!r}; "
            f"that is in {homes_of(word) or 'no file of the package'}: change the answer"
        )
