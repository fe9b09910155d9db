"""What `import meshdist.dask` says where Dask's distributed is missing; needs no Dask."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest


def test_without_distributed_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("meshdist.dask")]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "distributed" else found(name, *rest)
    )
    with pytest.raises(
        ImportError, match=r"meshdist\.dask needs Dask's distributed; .*pip install distributed 'dask\[array\]'"
    ):
        importlib.import_module("meshdist.dask")
