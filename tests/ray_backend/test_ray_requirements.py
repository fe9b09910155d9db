"""What `import meshdist.ray` says where Ray is missing or too old; needs no Ray."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


def import_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("meshdist.ray")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("meshdist.ray")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"meshdist\.ray needs Ray; install Ray .*pip install 'meshdist\[ray\]'"):
        import_ours(monkeypatch)


def test_a_ray_without_other_backends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ray", "ray.util", "ray.util.collective")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["ray"], "__version__", "2.9.3", raising=False)
    monkeypatch.setattr(sys.modules["ray.util.collective"], "get_group_handle", None, raising=False)
    with pytest.raises(
        ImportError, match=r"Ray 2\.9\.3 has no register_collective_backend in ray\.util\.collective, .*; install Ray"
    ):
        import_ours(monkeypatch)


def test_a_ray_without_a_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(sys.modules["ray"], "__version__", "9.0", raising=False)
    monkeypatch.setitem(sys.modules, "ray.util", None)
    monkeypatch.setitem(sys.modules, "ray.util.collective", None)
    with pytest.raises(ImportError, match=r"Ray 9\.0 has no ray\.util\.collective, which .*; install Ray"):
        import_ours(monkeypatch)
