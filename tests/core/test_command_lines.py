"""Command lines whose output is closed early, and commands that are not there."""

import os
import subprocess
import sys

import pytest

import meshdist


def command(*arguments, **popen):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(meshdist.__file__))}
    return subprocess.run([sys.executable, "-m", *arguments], env=environment, timeout=60, **popen)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "arguments", [["meshdist"], ["meshdist.debug", "--help"], ["meshdist.doctor", "--json"]], ids=lambda given: given[0]
)
@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes that raise")
def test_a_command_whose_reader_has_gone_ends_quietly(arguments):
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = command(*arguments, stdout=write_fd, stderr=subprocess.PIPE)
    finally:
        os.close(write_fd)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("profile", "`meshdist.profile` is a function"),
        ("run", "to start the ranks of a script, run `meshrun`"),
        ("doctr", "did you mean `python -m meshdist.doctor`?"),
        ("elastic", "`meshrun` restarts jobs"),
    ],
)
def test_a_command_that_is_not_there_is_explained(name, words):
    done = command(f"meshdist.{name}", capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
