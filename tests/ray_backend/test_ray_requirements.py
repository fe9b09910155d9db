"""What `import meshdist.ray` says where Ray is missing or too old; needs no Ray."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def import_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("meshdist.ray")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("meshdist.ray")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"meshdist\.ray needs Ray; install Ray .*pip install 'ray>=2.60'"):
        import_ours(monkeypatch)


def pretend_ray(monkeypatch: pytest.MonkeyPatch, version: str, modules: dict[str, tuple[str, ...]]) -> None:
    """Put modules that have these names, and no others, in place of Ray."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    for module, names in modules.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name in names:
            monkeypatch.setattr(sys.modules[module], name, None, raising=False)
    monkeypatch.setattr(sys.modules["ray"], "__version__", version, raising=False)


def test_a_ray_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_ray(
        monkeypatch,
        "2.9.3",
        {"ray": (), "ray.experimental": (), "ray.experimental.internal_kv": ("_internal_kv_get",)},
    )
    with pytest.raises(
        ImportError,
        match=r"Ray 2\.9\.3 has no _internal_kv_del, _internal_kv_put in ray\.experimental\.internal_kv, .*; install",
    ):
        import_ours(monkeypatch)


def test_a_ray_without_a_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_ray(monkeypatch, "9.0", {"ray": ()})
    with pytest.raises(ImportError, match=r"Ray 9\.0 has no ray\.experimental\.internal_kv, which .*; install Ray"):
        import_ours(monkeypatch)


def test_collectives_without_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_ray(monkeypatch, "2.9.3", {"ray": (), "ray.util": (), "ray.util.collective": ("get_group_handle",)})
    check = check_of_collectives()
    with pytest.raises(
        ImportError, match=r"Ray 2\.9\.3 has no register_collective_backend in ray\.util\.collective, .*; install Ray"
    ):
        check()


def check_of_collectives() -> Callable[[], None]:
    """Import the check of the collectives without the package, which refuses this Ray already."""
    import meshdist

    folder = Path(meshdist.__file__).parent / "ray" / "installed_ray.py"
    spec = importlib.util.spec_from_file_location("installed_ray_alone", folder)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check: Callable[[], None] = module.check_collectives
    return check
