"""The pages of docs/: their programs print what they say, and their pictures are there."""

import os
import re
import socket
from pathlib import Path

import pytest
from interpreters import Interpreter

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[ah]*/*.md")])
    if page.name != "migration.md"
]  # which has its own test
PROGRAMS = [
    pytest.param(*found, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, found in enumerate(re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.fixture(scope="module")
def interpreter():
    # There are more ranks than cores already.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # A submodule of meshdist that is imported here would be there for programs that forget to import it.
    with Interpreter(("autograd.numpy", "meshdist"), environment) as interpreter:
        yield interpreter


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_program_prints_what_the_page_says(interpreter, program, output):
    done = interpreter.run(program, timeout_s=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output.replace("HOST", socket.gethostname())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_program_comes_with_its_output_and_every_link_leads_somewhere(page):
    text = page.read_text()
    assert text.count("```python") == len(re.findall(r"```python\n.*?```\s+```text\n", text, re.DOTALL))
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


# Words that begin a sentence, and no name does.
BEGINNING = (
    r"(?:The|An?|This|These|It|If|All|In|For|With|At|On|By|No|Each|Both|When|Use|Then|There|Write|[A-Z][a-z]+ing)\b"
)


def test_no_sentence_begins_after_a_semicolon():
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks" / "sources").glob("*.py"), ROOT / "README.md"]
    found = [(path.name, re.findall(rf";\s+(?:# )?({BEGINNING})", path.read_text())) for path in texts]
    assert [one for one in found if one[1]] == []


def test_the_first_commands_make_an_environment_before_they_install_into_it():
    commands = "".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL))
    assert commands.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert commands.count("-m venv") == 1
