"""Command lines: output that is closed early, commands and options that are not there, and help in a job."""

import os
import subprocess
import sys

import pytest

import meshdist

ROOT = os.path.dirname(os.path.dirname(meshdist.__file__))


def command(*arguments, variables=None, **popen):
    environment = {**os.environ, "PYTHONPATH": ROOT, **(variables or {})}
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


def test_a_command_after_a_blank_is_spelled():
    done = command("meshdist", "doctor", "--json", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "python -m meshdist: write python -m meshdist.doctor --json\n")


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("doctor --jsn", "meshdist.doctor: --jsn is not an option; did you mean --json?"),
        ("doctor --colour", "meshdist.doctor: --colour is not an option; see --help"),
        ("debug", "meshdist.debug: expected a command: report, attach; see --help"),
        ("debug attac", "no command 'attac'; the commands are report, attach; did you mean attach?"),
        ("debug attach --pd 3", "meshdist.debug attach: --pd is not an option; did you mean --pid?"),
        ("checkpoint conv x", "the commands are info, verify, convert; did you mean convert?"),
        ("bench --dtpe int8", "meshdist.bench: --dtpe is not an option; did you mean --dtype?"),
        (
            "topology --calibrat x.toml --second=3 --gps",
            "meshdist.topology: --gps is not an option; did you mean --gpus?",
        ),
        ("launch status --wach", "meshrun status: --wach is not an option; did you mean --watch?"),
        ("launch --backnd gloo x.py", 'of meshrun: the script chooses the backend, as in init_process_group("gloo")'),
        ("launch --axes dp=2 x.py", "of meshrun: the script creates the mesh, with init_device_mesh"),
    ],
)
def test_a_wrong_word_is_answered_in_a_line(line, words):
    name, *arguments = line.split()
    done = command(f"meshdist.{name}", *arguments, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["bench", "doctor", "topology"])
def test_one_rank_of_a_job_prints_the_help(name):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"meshdist.{name}", "--help"],
            env={**os.environ, "PYTHONPATH": ROOT, "RANK": rank, "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    first, second = (rank.communicate(timeout=60)[0] for rank in ranks)
    assert first.startswith(f"usage: python -m meshdist.{name}")
    assert second == ""
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_one_rank_of_a_job_complains():
    """The other ends with status 0: a launcher ends all ranks as soon as one has failed."""
    job = {"WORLD_SIZE": "2"}
    ranks = [
        command("meshdist.doctor", "--jsn", capture_output=True, text=True, variables={**job, "RANK": rank})
        for rank in "01"
    ]
    assert [(rank.returncode, rank.stderr.count("--json")) for rank in ranks] == [(2, 1), (0, 0)]
