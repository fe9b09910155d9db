"""Writes the programs of examples/ into the pages that show them: `python docs/write_programs.py`."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGES = [*sorted(FOLDER.glob("howto/*.md")), FOLDER / "writing-a-backend.md"]
# A link to the program, then the program.
PROGRAM = re.compile(r"(\]\((\S+\.py)\):\n\n~~~python\n)(.*?)(~~~\n)", re.DOTALL)


def written(page: Path) -> str:
    """Return the page with the program as it is in its file."""
    text, found = PROGRAM.subn(
        lambda match: match[1] + page.parent.joinpath(match[2]).read_text() + match[4], page.read_text()
    )
    if found != 1:
        raise ValueError(f"{page.name}: expected a link to a program followed by `~~~python`, got {found}")
    return text


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each))
