"""The layer of the operating system: flags, limits, exit statuses, colours."""

import errno
import io
import sys

import pytest

from meshdist.system.drawing_style import fill
from meshdist.system.env_flags import switch
from meshdist.system.platform import limit_of, why_no_processes
from meshdist.system.processes import AtExit, describe_status
from meshdist.system.terminal import fold, terminal_width


def test_a_flag_is_on_off_or_not_set(monkeypatch):
    monkeypatch.setenv("MESHDIST_SINGLE_COPY", "0")
    monkeypatch.delenv("MESHDIST_DISABLE_SHM", raising=False)
    assert switch("MESHDIST_SINGLE_COPY") is False
    assert switch("MESHDIST_DISABLE_SHM") is None


def test_lines_fit_the_terminal_and_are_whole_elsewhere(monkeypatch, terminal):
    terminal(30)
    assert terminal_width() == 30
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert terminal_width() == 0


def test_folded_lines_begin_below_the_words_of_the_first():
    text = "ranks:\n\n  rank 0 is in /a/directory/of/several/words now\n"
    assert fold(text, 0) == fold(text, 80) == text
    assert fold(text, 16) == "ranks:\n\n  rank 0 is in\n    /a/directory/of/several/words\n    now\n"
    assert fold("note     rank 0 is in a call", 16, hanging=9) == "note     rank 0\n         is in a\n         call"


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
