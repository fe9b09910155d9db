"""What is published: the wheel, the sdist, their metadata; that they work where they say they do, and are typed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import meshdist

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "tests" / "package" / "typed_project"
MINORS = (10, 11, 12, 13)

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SMOKE = """
import sys

import numpy as np

import meshdist as dist

mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
x = mesh["dp"].all_reduce(np.arange(3.0) + dist.get_rank())
assert x.tolist() == [1.0, 3.0, 5.0], x
objects = [None, None]
dist.all_gather_object(objects, dist.get_rank())
assert objects == [0, 1]
if dist.get_rank() == 0:
    dist.send(x, dst=1)
    print("python", sys.version.split()[0], "numpy", np.__version__)
else:
    dist.recv(x, src=0)
dist.destroy_process_group()
"""


def names_in_the_wheel(folder):
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return wheel.namelist()


def metadata(folder):
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(wheel.read(name).decode())


def test_the_wheel_has_the_package_and_nothing_else(distributions):
    names = names_in_the_wheel(distributions)
    version = meshdist.__version__
    package = {
        str(path.relative_to(ROOT)) for path in (ROOT / "meshdist").rglob("*.py*") if path.suffix in (".py", ".pyi")
    }
    package |= {"meshdist/py.typed"}
    info = f"meshdist-{version}.dist-info"
    assert set(names) == package | {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert next(distributions.glob("*.whl")).name == f"meshdist-{version}-py3-none-any.whl"


def build_wheel(folder, **variables):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    env = {**os.environ, **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the core is for Linux")


@needs_linux
def test_a_wheel_with_the_core_is_for_this_platform(distributions, tmp_path):
    done = build_wheel(tmp_path, MESHDIST_CORE="require")
    assert done.returncode == 0, done.stdout + done.stderr
    tag = f"cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_"
    assert next(tmp_path.glob("*.whl")).name.startswith(f"meshdist-{meshdist.__version__}-{tag}")
    core = {f"meshdist/core/_core{sysconfig.get_config_var('EXT_SUFFIX')}"}
    assert set(names_in_the_wheel(tmp_path)) == set(names_in_the_wheel(distributions)) | core


@needs_linux
def test_without_a_compiler_the_wheel_is_for_all_platforms_or_none_is_built(tmp_path):
    done = build_wheel(tmp_path, MESHDIST_CORE="auto", CC="false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "meshdist is built without its compiled core: false failed" in done.stdout + done.stderr
    assert [path.name for path in tmp_path.glob("*.whl")] == [f"meshdist-{meshdist.__version__}-py3-none-any.whl"]
    done = build_wheel(tmp_path / "none", MESHDIST_CORE="require", CC="false")
    assert "MESHDIST_CORE=require, but the compiled core cannot be built: false failed" in done.stdout + done.stderr
    assert not list(tmp_path.glob("none/*.whl"))


def test_the_sdist_has_what_a_distributor_needs_and_no_leftovers(distributions):
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", "meshdist/py.typed"}
    assert names >= {"tests/conftest.py", "examples/train_digits.py", "examples/data/digits.npz", "docs/index.md"}
    assert [name for name in names if re.search(r"(^|/)(__pycache__|\.git|\.venv|build|dist)(/|$)", name)] == []


def test_only_numpy_and_networkx_are_needed(distributions):
    requirements = metadata(distributions).get_all("Requires-Dist")
    needed = [line for line in requirements if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in needed) == ["networkx", "numpy"]


def test_the_metadata_is_good(distributions):
    fields = metadata(distributions)
    assert fields["Version"] == meshdist.__version__
    assert fields["Requires-Python"] == ">=3.10"
    said = {line for line in fields.get_all("Classifier") if re.search(r":: 3\.\d+$", line)}
    assert said == {f"Programming Language :: Python :: 3.{minor}" for minor in MINORS}
    if importlib.util.find_spec("twine") is None:
        pytest.skip('twine is not installed: pip install -e ".[dev]"')
    files = [str(path) for path in distributions.iterdir() if path.is_file()]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_version_stands_in_one_place():
    literal = f'"{meshdist.__version__}"'
    files = [*ROOT.glob("*.toml"), *(ROOT / "meshdist").rglob("*.py"), ROOT / "docs" / "conf.py"]
    assert [path.name for path in files if literal in path.read_text()] == ["_version.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
@pytest.mark.parametrize("minor", [minor for minor in MINORS if sys.version_info[:2] != (3, minor)])
def test_the_wheel_works(environment, minor, tmp_path):
    folder = environment(minor)
    (tmp_path / "smoke.py").write_text(SMOKE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MESHDIST_"))}
    command = [folder / "bin" / "meshrun", "--nproc-per-node", "2", "smoke.py"]
    done = subprocess.run(command, env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"python 3.{minor}.")
    if minor == MINORS[0]:
        assert "numpy 1.24." in done.stdout


@needs_linux
@pytest.mark.parametrize("minor", [minor for minor in MINORS if sys.version_info[:2] != (3, minor)])
def test_the_core_is_compiled_by_every_python(environment, minor, tmp_path):
    python = environment(minor) / "bin" / "python"
    (tmp_path / "smoke.py").write_text(SMOKE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MESHDIST_"))}
    kept |= {"MESHDIST_CORE": "require", "PYTHONPATH": str(tmp_path / "site")}
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    done = subprocess.run(
        [*install, "--target", tmp_path / "site", ROOT], env=kept, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    command = [python, "-m", "meshdist.launch.meshrun", "--nproc-per-node", "2", "smoke.py"]
    done = subprocess.run(command, env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"python 3.{minor}.")


def test_a_project_is_type_checked_against_it(environment, tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip('mypy is not installed: pip install -e ".[dev]"')
    folder = environment(MINORS[0])
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", folder / "bin" / "python"]
    command += ["--python-version", "3.10", "--cache-dir", tmp_path, "uses_meshdist.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "MYPY"))}
    done = subprocess.run(command, env=kept, cwd=PROJECT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_refuses_the_lines_that_are_wrong_and_no_others(environment):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip('basedpyright is not installed: pip install -e ".[dev]"')
    script = PROJECT / "uses_meshdist.py"
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson"]
    command += ["--pythonpath", environment(MINORS[0]) / "bin" / "python", script]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)["generalDiagnostics"]
    refused = {problem["range"]["start"]["line"] for problem in found}
    # It reads comments for mypy only where it is told to.
    wrong = {number for number, line in enumerate(script.read_text().splitlines()) if "# type: ignore[" in line}
    assert refused == wrong, found
