"""The files in /dev/shm that stand in for anonymous memory, and go as soon as all ranks have them."""

import pathlib

from until import until


def shared_files():
    """Return those of all processes: tests may run side by side."""
    return {path for path in pathlib.Path("/dev/shm").iterdir() if path.name.startswith("meshdist")}


def assert_none_stays(before):
    """Check that of the files that are not in `before`, which may be of other tests as well, none stays."""
    new = shared_files() - before
    until(lambda: not new & shared_files(), f"{new} are removed", 10.0)
