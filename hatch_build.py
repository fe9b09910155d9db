"""Builds the compiled core of meshdist, where there is a C compiler.

`MESHDIST_CORE` chooses as it does at run time: `auto` builds the core if that is possible here, `python` does not try,
and `require` fails where it cannot be built. A wheel with the core is for this platform and this Python; one without is
for all. An editable installation has the core in the source tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FLAGS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")
_PLACE = "meshdist/core"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the core before the wheel is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core into the wheel, or for an editable installation beside its sources."""
        choice = os.environ.get("MESHDIST_CORE") or "auto"
        problem = "MESHDIST_CORE=python" if choice == "python" else _obstacle()
        if problem is None:
            name = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
            sources = Path(self.root, _PLACE)
            self._folder = tempfile.TemporaryDirectory()
            built = Path(self._folder.name, name)
            problem = _compile(sorted(sources.glob("*.c")), built)
        if problem is not None:
            if choice == "require":
                raise RuntimeError(f"MESHDIST_CORE=require, but the compiled core cannot be built: {problem}")
            self.app.display_warning(f"meshdist is built without its compiled core: {problem}")
        elif version == "editable":
            shutil.move(built, sources / name)
        else:
            build_data["force_include"][str(built)] = f"{_PLACE}/{name}"
            build_data.update(pure_python=False, infer_tag=True)


def _obstacle() -> str | None:
    if sys.platform != "linux":
        return "the backend gloo shares memory on Linux only"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is for CPython with the GIL"
    return None


def _compile(sources: list[Path], target: Path) -> str | None:
    """Compile the sources; return why that is impossible, in a line."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    flags = [*_FLAGS, f"-I{sysconfig.get_path('include')}", *shlex.split(os.environ.get("CFLAGS", ""))]
    objects = {source: f"{target}.{source.stem}.o" for source in sources}

    def run(*arguments: str) -> None:
        subprocess.run([*compiler, *flags, *arguments], check=True, capture_output=True, text=True)

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # as many compilers as processors
            list(pool.map(lambda source: run("-c", str(source), "-o", objects[source]), sources))
        run("-shared", *objects.values(), "-o", str(target))
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return lines[0] if lines else f"{compiler[0]} failed"
    return None
