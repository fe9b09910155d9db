"""`%%mesh` in IPython, and in the kernel of a notebook."""

import atexit
import os
import re
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("IPython", reason="IPython is not installed")
pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))
    program = sys.modules["__main__"]
    shell = InteractiveShell()  # which takes the place of the program, and does not give it back
    shell.extension_manager.load_extension("meshdist")
    yield shell
    shell.run_line_magic("mesh", "stop")
    shell.atexit_operations()
    atexit.unregister(shell.atexit_operations)
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = program
    del os.environ["IPYTHONDIR"]


def test_a_cell_prints_by_rank(shell, capsys):
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", "mesh.get_coordinate()")
    assert capsys.readouterr().out.splitlines() == ["[0] (0, 0)", "[1] (0, 1)", "[2] (1, 0)", "[3] (1, 1)"]


def test_what_all_ranks_print_is_shown_once(shell, capsys):
    shell.run_cell_magic("mesh", "-n 4", "print('begin')\nprint(rank if rank == 2 else 'other')\nprint('end')")
    assert capsys.readouterr().out.splitlines() == [
        "[0-3] begin",
        "[0,1,3] other",
        "[0,1,3] end",
        "[2] 2",
        "[2] end",
    ]


def test_options_stay_and_variables_go_both_ways(shell, capsys):
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", "pass")
    capsys.readouterr()
    shell.push({"scale": 3})
    source = "scaled = rank * scale\ndef square(x): return x * x"
    shell.run_cell_magic("mesh", "--send scale --get scaled,square", source)
    assert shell.user_ns["scaled"] == [0, 3, 6, 9]
    assert [square(3) for square in shell.user_ns["square"]] == [9] * 4
    shell.run_line_magic("mesh", "")
    assert capsys.readouterr().out.startswith("4 workers, backend gloo, mesh: dp=2, tp=2; pids [")


def test_a_mesh_is_drawn_once(shell, capsys):
    shell.run_cell_magic("mesh", "--axes dp=2,tp=2", "mesh.show()")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[0-3] mesh (dp=2, tp=2)"
    assert {line.partition(" ")[0] for line in lines} == {"[0-3]", ""}


def test_drawings_are_shown_once_for_all_workers(shell, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda shown, raw=False: displayed.append(shown))
    source = "from meshdist.tensor import Shard, zeros\nx = zeros((6, 8), mesh=mesh, placements={'dp': Shard(0)})\n"
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", source + "x.show()")
    lines = capsys.readouterr().out.splitlines()
    assert "[0-3]  0:3 0 1" in lines
    assert {line.partition(" ")[0] for line in lines} <= {"[0-3]", "", "new"}
    for last, said in (
        ("x", "[0-3]:"),
        ("x.show('plot')", "[0-3]: 1 figure"),
        ("mesh.show('plot')", "[0-3]: 1 figure"),
        ("mesh.show('plot', axis='tp')", "[0-3]: 1 figure"),
    ):
        displayed.clear()
        shell.run_cell_magic("mesh", "", last)
        assert capsys.readouterr().out.splitlines() == [said]
        assert len(displayed) == 1
    shell.run_cell_magic("mesh", "", "del x")  # which belongs to the world


def test_an_error_is_that_of_the_rank_that_made_it(shell):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4", "if rank == 2:\n    1 / 0\ndist.barrier()")
    assert raised.value._render_traceback_() == [
        "[2] Traceback (most recent call last):",
        *(line for line in str(raised.value).splitlines()[1:-1]),
        "[2] ZeroDivisionError: division by zero",
    ]
    assert "1 / 0" in str(raised.value)
    assert "DistBackendError" not in str(raised.value)


def last_number(shell):
    return len(shell.history_manager.input_hist_parsed) - 1


def test_a_traceback_ends_at_the_line_of_the_cell_unless_the_package_has_a_mistake(shell):
    def files_of(source):
        with pytest.raises(RuntimeError) as raised:
            shell.run_cell_magic("mesh", "-n 4", source)
        return re.findall(r'File "([^"]*)"', str(raised.value))

    name = f"In [{last_number(shell)}]"
    assert files_of("dist.all_reduce(np.ones(2), op='none')") == [name]
    caused = "try:\n    dist.barrier(group=1)\nexcept TypeError as error:\n    raise KeyError(1) from error"
    assert files_of(caused) == [name, name]
    mistake = "found = {}\nexec(compile('def f(): None + 1', dist.__file__, 'exec'), found)\nfound['f']()"
    assert [os.path.basename(file) for file in files_of(mistake)] == [name, "__init__.py"]


IN_THE_KERNEL = """\
import numpy as np
import meshdist as dist
def main():
    try:
        dist.all_reduce(np.ones(1 + dist.get_rank()))
    except dist.DistBackendError as error:
        return str(error)
said = dist.run(main, 2)[0]
"""


def test_lines_of_cells_are_named_as_the_notebook_does(shell, monkeypatch):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)  # as in a program of its own
    assert shell.run_cell(IN_THE_KERNEL, store_history=True).success
    count = last_number(shell)
    assert f"rank 0 calls all_reduce(float64[1], op=sum) at In [{count}], line 5\n  rank 1" in shell.user_ns["said"]
    result = shell.run_cell("%%mesh -n 4\nif rank:\n    dist.recv(np.ones(1), rank)", store_history=True)
    assert result.execution_count == count + 1
    assert f'[1]   File "In [{count + 1}]", line 2, in <module>' in str(result.error_in_exec)


def test_a_traceback_of_threads_has_no_frames_of_the_package(shell, capsys):
    call = "dist.run(lambda: dist.all_reduce(np.ones(1), op='none'), 2)"
    shell.run_cell(f"import numpy as np\nimport meshdist as dist\n{call}")
    shown = capsys.readouterr().out
    assert "unknown op 'none'" in shown
    assert "thread_ranks.py" not in shown
    assert "name_hints.py" not in shown
    assert "process_group.py" not in shown


OWN_MESH = """\
import numpy as np
import meshdist as dist
from meshdist.tensor import Replicate, distribute_tensor
own = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
x = distribute_tensor(np.ones(4), own, [Replicate()])
"""


@pytest.mark.parametrize("line", ["own.all_reduce(3)", "own['tp']", "x + np.ones(7)", "own.al_reduce"])
def test_a_traceback_of_the_notebooks_own_cells_ends_at_the_users_line(shell, capsys, line):
    assert shell.run_cell(OWN_MESH).success
    try:
        capsys.readouterr()
        shell.run_cell(f"def step():\n    {line}\nstep()")
        shown = capsys.readouterr().out
        assert f"----> 2     {line}" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert os.path.dirname(sys.modules["meshdist"].__file__) not in shown
        shell.run_cell("import json\njson.loads(3)")
        assert os.path.join("json", "__init__.py") in capsys.readouterr().out
    finally:
        shell.run_cell("dist.destroy_process_group()")


def test_the_same_error_of_several_ranks_is_said_once(shell):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4", "1 / 0")
    lines = raised.value._render_traceback_()
    assert lines[-2:] == ["[0] ZeroDivisionError: division by zero", "ranks 1, 2, 3: the same"]
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4", "if rank == 2: raise KeyError(5)\ndist.all_reduce(np.ones(2), op='none')")
    lines = raised.value._render_traceback_()
    assert [line for line in lines if "the same" in line] == ["ranks 1, 3: the same"]
    assert lines[-1] == "[2] KeyError: 5"


@pytest.mark.parametrize(("name", "meant"), [("size_y", "size_x"), ("np.ones(2).shap", "shape")])
def test_the_name_that_python_suggests_is_shown(shell, name, meant):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4", f"size_x = 3\n{name}")
    (line,) = [line for line in raised.value._render_traceback_() if "Error: " in line]
    assert line.endswith(f". Did you mean: '{meant}'?")


def test_the_same_timeout_of_several_ranks_is_said_once(shell):
    source = "import time\ndist.barrier()\nif rank == 0: time.sleep(3)\nelse: dist.all_reduce(np.ones((2, 2)))"
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4 --timeout 2", source)
    lines = raised.value._render_traceback_()
    # Those that were told of another's timeout, and failed for that, are left out.
    assert all(
        re.fullmatch(r"ranks? [123](, [23])?: the same", line) and line == lines[-1]
        for line in lines
        if not line.startswith("[")
    )
    (error,) = [line for line in lines if "DistTimeoutError: all_reduce" in line and "] meshdist.errors." in line]
    assert "timed out after 2 s waiting for rank 0" in error
    waits = [line.partition("] ")[2] for line in lines if "not reached" in line]
    assert [line.partition(", at ")[0].strip() for line in waits] == [
        "rank 0 has not reached all_reduce(float64[2, 2], op=sum), call 2 on 'world'"
    ], "\n".join(lines)
    # Where others have given up before it, the report of that timeout says so.
    others = [line for line in lines if "timed out after 2 s" in line and line != error]
    assert all(re.match(r"\[\d\]   rank \d failed(:| because)", line) for line in others), "\n".join(lines)
    shell.run_cell_magic("mesh", "--timeout 1800", "pass")  # the default


def test_only_what_belongs_to_the_ended_world_is_lost(shell, capsys):
    source = "row = dist.new_group([0, 1]); held = {'axis': mesh['dp']}; kept = 5\nif rank == 2: missing"
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", source)
    *_, error, said = raised.value._render_traceback_()
    assert error == "[2] NameError: name 'missing' is not defined"
    assert said == "The workers are joining a new world: create `held`, `row` again; the other variables stay."
    shell.run_cell_magic("mesh", "", "del held, row\nkept, mesh.size(), dist.barrier()")
    assert capsys.readouterr().out.splitlines() == ["[0-3] (5, 4, None)"]
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "", "missing")
    assert raised.value._render_traceback_()[-1] == "ranks 1, 2, 3: the same"


def test_an_error_of_all_ranks_takes_no_groups(shell, capsys):
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", "dp = mesh['dp']\nrow = dist.new_group([0, 1])\nrow")
    capsys.readouterr()
    for source in (
        "dp.barrier()\nmissing",
        "dist.all_reduce(np.ones(2), op='none')",
        "if rank < 2: row.barrier()\n1 / 0",
        "time = 1\nraise SystemExit(3)",
    ):
        with pytest.raises(RuntimeError) as raised:
            shell.run_cell_magic("mesh", "", source)
        assert raised.value._render_traceback_()[-1] == "ranks 1, 2, 3: the same"
    with pytest.raises(RuntimeError, match="this rank has no variable 'nope'"):
        shell.run_cell_magic("mesh", "--get nope", "row.barrier() if rank < 2 else None")
    source = "total = dp.all_reduce(np.ones(1)).item() + (row.all_reduce(np.ones(1)).item() if rank < 2 else 2)"
    shell.run_cell_magic("mesh", "", f"{source}\ndel dp, row\ntotal")
    assert capsys.readouterr().out.splitlines() == ["[0-3] 4.0"]


@pytest.mark.parametrize(
    "source",
    [
        "if rank == 0: line.all_reduce(np.ones(1), async_op=True)\nmissing",
        "if rank == 0: line.send(np.ones(1), 1)\nmissing",
        "if rank == 0:\n    missing\nmissing",
        "if rank == 0: missing\nline.barrier()",
    ],
    ids=["async", "message", "lines", "ranks"],
)
def test_ranks_that_have_not_done_the_same_lose_their_groups_which_are_named(shell, source):
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", "line = mesh['dp']\nline.barrier()")
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "", source)
    said = "The workers are joining a new world: create `line` again; the other variables stay."
    assert raised.value._render_traceback_()[-1] == said
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "", "line.barrier()")
    assert "belongs to an earlier world" in str(raised.value)
    assert 'as in `dp = mesh["dp"]`' in str(raised.value)
    shell.run_cell_magic("mesh", "", "mesh['dp'].barrier()\ndel line")


def test_a_worker_that_ends_is_said(shell, capsys):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 4", "import os\nif rank == 1: os._exit(3)\ndist.barrier()")
    assert str(raised.value).splitlines() == [
        "rank 1 ended in the cell (exit status 3); a new process takes its place, without the variables of the old one",
        "The other workers keep their variables.",
    ]
    shell.run_cell_magic("mesh", "", "dist.barrier()")


def test_killed_workers_are_said_with_one_hint_at_the_cause(shell):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic(
            "mesh", "-n 4", "import os, signal\nif rank > 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        )
    said = str(raised.value)
    assert said.count("(killed by SIGKILL)") >= 1
    assert said.count("run out of memory: `dmesg`") == 1
    shell.run_cell_magic("mesh", "", "dist.barrier()")


def test_other_workers_take_the_place_of_those_before(shell, capsys):
    shell.run_cell_magic("mesh", "-n 4 --axes dp=2,tp=2", "pass")
    capsys.readouterr()
    shell.run_cell_magic("mesh", "-n 2", "world_size")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "new workers have replaced the previous 4; their variables are lost",
        "`mesh` is no longer defined in cells; pass --axes, as in --axes dp=2",
    ]
    shell.run_cell_magic("mesh", "-n 1", "world_size")
    assert "`mesh` is no longer defined" not in capsys.readouterr().out  # there was none
    shell.run_cell_magic("mesh", "-n 2", "world_size")


def test_the_options_are_printed(shell, capsys):
    shell.run_cell_magic("mesh", "--help", "print('not run')")
    told = capsys.readouterr().out
    assert told.startswith("usage: %%mesh [-n N] [--axes dp=2,tp=2]")
    assert "not run" not in told
    shell.run_line_magic("mesh", "--help")
    assert capsys.readouterr().out == told


def kill(pid):
    """Kill a worker, and return when it has ended."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)


def pids(shell, capsys):
    shell.run_line_magic("mesh", "")
    return [int(pid) for pid in re.findall(r"\d+", capsys.readouterr().out.partition("pids ")[2].splitlines()[0])]


def test_a_worker_that_ends_between_two_cells_is_said(shell, capsys):
    shell.run_cell_magic("mesh", "-n 2", "kept = 5")
    kill(pids(shell, capsys)[1])
    shell.run_line_magic("mesh", "")
    said = "rank 1 has ended (killed by SIGKILL); a new process takes its place before the next cell"
    workers, *lines = capsys.readouterr().out.splitlines()
    assert workers.startswith("1 of 2 workers, backend gloo")
    assert lines == [said]
    shell.run_cell_magic("mesh", "", "dist.barrier()\n'kept' in globals()")
    said, *lines = capsys.readouterr().out.splitlines()
    assert said == (
        "rank 1 had ended between two cells (killed by SIGKILL); a new process takes its place, without the variables"
        " of the old one; create your own groups and meshes again"
    )
    assert lines == ["[0] True", "[1] False"]
    shell.run_line_magic("mesh", "")
    workers, replaced = capsys.readouterr().out.splitlines()
    assert workers.startswith("2 workers, ")
    assert replaced.endswith("rank 1 (killed by SIGKILL)")


def test_the_workers_left_after_one_ended_in_a_cell_are_counted(shell, capsys):
    with pytest.raises(RuntimeError, match="exit status 3"):
        shell.run_cell_magic("mesh", "-n 2", "import os\nif dist.get_rank() == 1: os._exit(3)")
    capsys.readouterr()
    shell.run_line_magic("mesh", "")
    assert re.match(r"1 of 2 workers, backend gloo, mesh: none; pids \[\d+\]\n", capsys.readouterr().out)


def test_another_backend_or_timeout_takes_no_variables(shell, capsys):
    shell.run_cell_magic("mesh", "-n 2", "kept = 5")
    capsys.readouterr()
    shell.run_cell_magic("mesh", "--timeout 60", "kept + dist.get_world_size()")
    said, *lines = capsys.readouterr().out.splitlines()
    assert said.startswith(
        "the workers are joining a new world (backend gloo, timeout 60 s); variables are kept, but create"
    )
    assert lines == ["[0,1] 7"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backend bogus", "%%mesh --backend bogus: unknown backend 'bogus'; choose from "),
        ("--backend fake", "%%mesh --backend fake: the 'fake' backend is not available: it is for dry runs"),
        ("--backend threads", "the 'threads' backend is for ranks that are threads"),
        ("-n 3 --backend threads", "the 'threads' backend is for ranks that are threads"),
    ],
)
def test_a_backend_that_cannot_be_takes_nothing(shell, capsys, line, message):
    shell.run_cell_magic("mesh", "-n 2", "kept = 5")
    with pytest.raises((UsageError, RuntimeError)) as raised:
        shell.run_cell_magic("mesh", line, "pass")
    assert message in str(raised.value)
    capsys.readouterr()
    shell.run_cell_magic("mesh", "", "dist.barrier()\nkept")
    assert capsys.readouterr().out.splitlines() == ["[0,1] 5"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1\n1 +", ['  File "In [{count}]", line 2', "    1 +", "       ^", "SyntaxError: invalid syntax"]),
        (
            "x = 1\n%time x",
            [
                "%%mesh: line 2 is '%time x': magics need IPython, and workers run plain Python; put it"
                " in a separate cell"
            ],
        ),
    ],
)
def test_what_is_no_python_is_said_without_frames_and_takes_nothing(shell, capsys, source, said):
    shell.run_cell_magic("mesh", "-n 2", "kept = 5")
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 3", source)
    count = last_number(shell)
    assert raised.value._render_traceback_() == [line.replace("{count}", str(count)) for line in said]
    shell.run_cell_magic("mesh", "", "kept")


def test_stop_says_how_many_it_has_stopped(shell, capsys):
    shell.run_cell_magic("mesh", "-n 2", "pass")
    shell.run_line_magic("mesh", "stop")
    shell.run_line_magic("mesh", "stop")
    assert capsys.readouterr().out.splitlines()[-2:] == ["stopped 2 workers", "no workers"]


def test_what_cannot_be_brought_back_is_one_sentence(shell):
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 2 --get lock", "import threading\nlock = threading.Lock()")
    said = "TypeError: %%mesh --get lock: cannot be pickled: cannot pickle '_thread.lock' object"
    assert str(raised.value).splitlines() == [f"[0] {said}", "rank 1: the same"]


def test_figures_are_shown_once_with_those_who_drew_them(shell, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    source = """
from matplotlib import pyplot
pyplot.plot([1, 2])
pyplot.show()
if rank == 1:
    pyplot.plot([2, 1])
"""
    shell.run_cell_magic("mesh", "-n 2", "pass")
    capsys.readouterr()
    shell.run_cell_magic("mesh", "", source)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["[0,1]: 1 figure", "[1]: 1 figure"]
    assert len(lines) == 4
    shell.run_cell_magic("mesh", "", "pyplot.get_fignums()")
    assert capsys.readouterr().out.splitlines() == ["[0,1] []"]


@pytest.mark.parametrize(
    "last", ["axes", "axes.figure", "pyplot.plot([1, 2])", "pyplot.subplots()", "pyplot.bar([1], [2])"]
)
def test_a_picture_as_the_last_expression_has_no_repr(shell, capsys, last):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    source = f"from matplotlib import pyplot\naxes = pyplot.figure(figsize=(1, 1)).add_subplot()\n{last}"
    shell.run_cell_magic("mesh", "-n 2", source)
    lines = capsys.readouterr().out.splitlines()
    num = len(lines) - 1
    assert [line for line in lines if not line.startswith("<IPython")] == [f"[0,1]: {num} figure{'s' * (num != 1)}"]


def test_a_figure_that_pyplot_does_not_know_is_drawn(shell, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    source = "from matplotlib.figure import Figure\nFigure(figsize=(1, 1)).subplots()"
    shell.run_cell_magic("mesh", "-n 2", source)
    assert capsys.readouterr().out.splitlines()[:1] == ["[0,1]: 1 figure"]


def test_the_last_expression_is_shown_as_jupyter_shows_it(shell, capsys, monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda forms, raw: displayed.append(forms))
    source = """
class Table:
    def __init__(self, name): self.name = name
    def __repr__(self): return f"table {self.name}"
    def _repr_html_(self): return f"<b>{self.name}, {rank}</b>"
Table("same")
"""
    shell.run_cell_magic("mesh", "-n 2", source)
    shell.run_cell_magic("mesh", "-n 2", "Table(rank)")
    assert capsys.readouterr().out.splitlines() == ["[0,1]:", "[0]:", "[1]:"]
    assert displayed == [
        {"text/plain": "table same", "text/html": "<b>same, 0</b>"},
        {"text/plain": "table 0", "text/html": "<b>0, 0</b>"},
        {"text/plain": "table 1", "text/html": "<b>1, 1</b>"},
    ]
    shell.run_cell_magic("mesh", "-n 2", "Table")  # a class has a text only
    assert capsys.readouterr().out.splitlines() == ["[0,1] <class '__main__.Table'>"]


def test_a_mesh_as_the_last_expression_is_one_table(shell, capsys, monkeypatch):
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda forms, raw: displayed.append(forms))
    shell.run_cell_magic("mesh", "--axes dp=2", "mesh")
    assert capsys.readouterr().out.splitlines()[-1:] == ["[0,1]:"]
    [forms] = displayed
    assert "<table" in forms["text/html"]
    assert forms["text/plain"].splitlines() == [  # without HTML, each rank has its place
        "[0] DeviceMesh('cpu', (dp=2), rank 0 at (dp=0), ranks 0, 1)",
        "[1] DeviceMesh('cpu', (dp=2), rank 1 at (dp=1), ranks 0, 1)",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n nobody", "usage: %%mesh -n 4"),
        ("-n 2 --send no_such", "%%mesh --send: the notebook has no variable 'no_such'"),
        ("-n 2 --send unpicklable", "%%mesh --send unpicklable: cannot be pickled"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(shell, line, message):
    shell.push({"unpicklable": sys._getframe()})
    with pytest.raises(UsageError) as raised:
        shell.run_cell_magic("mesh", line, "pass")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_cloudpickle_it_says_what_to_install(shell, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"^%%mesh needs the package cloudpickle: .*'meshdist\[notebook\]'"):
        shell.run_cell_magic("mesh", "-n 2", "pass")


def test_a_notebook_interrupts_its_workers(tmp_path, monkeypatch):
    jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")
    try:
        assert run(client, "%load_ext meshdist")[0] == "ok"
        source = "%%mesh -n 2\nprint('begun', rank)\nwhile True: pass"
        status, shown = run(client, source, until=2 * "begun", then=manager.interrupt_kernel)
        assert status == "error"
        assert "The cell was interrupted." in shown
        status, shown = run(client, "%%mesh\nint(dist.all_reduce(np.array(rank + 1)))")
        assert (status, shown.split()) == ("ok", ["[0,1]", "3"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client, source, until=None, then=None):
    """Run a cell in a kernel; return its status and all that it shows. Call `then` once it has shown `until`."""
    shown = ""

    def take(message):
        nonlocal shown, then
        content = message["content"]
        shown += content.get("text", "") + "\n".join(content.get("traceback", ()))
        if then is not None and until in "".join(re.findall("begun", shown)):
            then()
            then = None

    reply = client.execute_interactive(source, timeout=40, output_hook=take)
    return reply["content"]["status"], shown


def test_a_cell_without_axes_is_told_how_to_get_a_mesh(shell):
    shell.run_cell_magic("mesh", "--axes dp=2", "mesh")
    with pytest.raises(RuntimeError) as raised:
        shell.run_cell_magic("mesh", "-n 3", "mesh.size()")
    assert any(
        "NameError: name 'mesh' is not defined; %%mesh --axes creates it" in line
        for line in raised.value._render_traceback_()
    )
