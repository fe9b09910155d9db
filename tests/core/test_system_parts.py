"""The layer of the operating system: flags, limits, exit statuses, colours."""

import errno
import sys

import pytest

from meshdist.system.drawing_style import fill
from meshdist.system.env_flags import switch
from meshdist.system.platform import limit_of, why_no_processes
from meshdist.system.processes import AtExit, describe_status


def test_a_flag_is_on_off_or_not_set(monkeypatch):
    monkeypatch.setenv("MESHDIST_SINGLE_COPY", "0")
    monkeypatch.delenv("MESHDIST_DISABLE_SHM", raising=False)
    assert switch("MESHDIST_SINGLE_COPY") is False
    assert switch("MESHDIST_DISABLE_SHM") is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of descriptors")
def test_an_error_of_a_limit_names_the_limit():
    assert limit_of(OSError(errno.EMFILE, "Too many open files")).partition(":")[0] == "; no file descriptor is left"
    assert limit_of(OSError(errno.ENOENT, "No such file or directory")) == ""


def test_ranks_are_processes_except_on_windows():
    assert (why_no_processes() is None) == (sys.platform != "win32")


def test_exit_statuses_in_words():
    assert describe_status(3) == "exited with status 3"
    assert describe_status(-9) == "was killed by SIGKILL"


def test_at_exit_can_be_cancelled():
    AtExit(print).cancel()


def test_cells_have_the_colour_of_their_host():
    assert fill(0, None) == "#77aadd"
    assert fill(None, None) == "#f2f2f2"
