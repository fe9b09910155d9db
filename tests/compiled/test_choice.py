"""With the compiled core and without: which is taken, what is said of it, and that both can talk to each other."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import meshdist
from meshdist import core

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
needs_core = pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}")

JOB = """
import os
import numpy as np
import meshdist as dist

def main(rank):
    dist.init_process_group("gloo", timeout=20)
    for number in range(20):
        x = dist.all_reduce(np.full(3, rank + number))
        assert x.tolist() == [2 * number + 1] * 3, x
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(main, nprocs=2)
    print(dist.core.status())
"""


def python(code, package=None, **variables):
    path = [str(package or ROOT), *[place for place in sys.path if place.endswith("-packages")]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )


@needs_core
@pytest.mark.parametrize(("choice", "said"), [("auto", "used ("), ("require", "used ("), ("python", "not used: MESH")])
def test_the_core_is_taken_unless_python_is_chosen(tmp_path, choice, said):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    env = {**os.environ, "MESHDIST_CORE": choice, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)


@pytest.mark.parametrize("choice", ["auto", "python"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.probe(source=0)", "probe() got an unexpected keyword argument 'source'; did you mean src=?"),
        ("dist.all_reduce(x, oper='sum')", "all_reduce() got an unexpected keyword argument 'oper'; did you mean op=?"),
        ("mesh.send(x, dest=0)", "send() got an unexpected keyword argument 'dest'; did you mean dst=?"),
        ("mesh.all_reduce(x, axis='dp')", "'axis'; along an axis of a mesh: mesh[\"dp\"].all_reduce(...)"),
    ],
)
def test_the_argument_that_was_meant_is_named_with_either(choice, call, words):
    start = "import numpy as np, meshdist as dist; x, mesh = np.ones(1), dist.init_device_mesh('cpu', (1,))"
    done = python(f"{start}; {call}", MESHDIST_CORE=choice)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_an_unknown_choice_is_an_error():
    said = "MESHDIST_CORE must be one of auto, python, require, got 'fast'"
    for start in ("dist.init_process_group()", "dist.run(lambda: None, 1)"):
        done = python(f"import meshdist as dist; print(dist.core.status()); {start}", MESHDIST_CORE="fast")
        assert done.stdout == f"not used: {said}\n"
        assert f"ValueError: {said}" in done.stderr
        assert "core/__init__.py" not in done.stderr


def without_core(tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(ROOT / "meshdist", place / "meshdist", ignore=shutil.ignore_patterns("*.so"))
    return place


def test_a_core_that_is_required_and_missing_is_an_error(tmp_path):
    place = without_core(tmp_path)
    for start in ("dist.init_process_group()", "dist.run(lambda: None, 1)"):
        done = python(f"import meshdist as dist; {start}", place, MESHDIST_CORE="require")
        assert "ImportError: MESHDIST_CORE=require, but there is no compiled core: it was not built" in done.stderr
        assert "core/__init__.py" not in done.stderr
    done = python("import meshdist as dist; print(dist.core.status())", place)
    assert done.stdout == "not used: it was not built\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the core is for Linux")
@pytest.mark.parametrize(
    ("content", "why"), [("", "it cannot be loaded: "), ("INTERFACE = 0\n", "it was built from another version")]
)
def test_a_core_that_does_not_fit_is_not_taken(tmp_path, content, why):
    place = without_core(tmp_path)
    name = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}" if not content else "_core.py"
    (place / "meshdist" / "core" / name).write_text(content)
    done = python("import meshdist as dist; print(dist.core.status())", place, MESHDIST_CORE="auto")
    assert done.stdout.startswith(f"not used: {why}"), done
    done = python("import meshdist; meshdist.init_process_group()", place, MESHDIST_CORE="require")
    assert why in done.stderr


MIXED = """
import os, sys
rank = int(sys.argv[1])
os.environ["MESHDIST_CORE"] = ("python", "require")[rank]
import numpy as np
import meshdist as dist

dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=30)
out = np.zeros(4)
for number in range(50):
    x = dist.all_reduce(np.full(2, rank + number + 0.5))
    assert x.tolist() == [2 * number + 2] * 2
    dist.all_gather_into_tensor(out, np.full(2, float(rank)))
    assert out.tolist() == [0, 0, 1, 1]
    if rank == number % 2:
        dist.send(x, 1 - rank)
    else:
        dist.recv(x, 1 - rank)
    dist.barrier()
dist.destroy_process_group()
print("done")
"""


@needs_core
def test_ranks_with_the_core_and_without_work_together(tmp_path):
    command = [sys.executable, "-c", MIXED]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([*command, str(rank), f"file://{tmp_path}/store"], env=env, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=60) for rank in ranks] == [("done\n", "")] * 2
    finally:
        for rank in ranks:
            rank.kill()


def test_versions_are_shown(capsys):
    meshdist.show_versions()
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert shown["compiled core"].strip() == core.status()
    assert shown["meshdist"].strip() == meshdist.__version__
    assert {"CPU", "cores", "kernel", "Python", "NumPy"} <= set(shown)
