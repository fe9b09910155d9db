"""Which versions of torch the backend supports."""

from __future__ import annotations

import re
from importlib import import_module

OLDEST = (2, 13)
TESTED = "2.13.0"
# What the backend builds on; a later version of torch may have moved it.
_NAMES = {
    "torch.distributed": ("Backend", "ProcessGroup", "ReduceOp", "Work", "init_process_group"),
    "torch._C._distributed_c10d": ("AllreduceOptions", "BarrierOptions", "Store"),
}


def check_torch() -> None:
    """Raise ImportError, with what to install, unless the backend can run with the torch that is installed."""
    advice = f"install torch {TESTED}, with which the backend is tested: pip install 'torch>=2.13' ml_dtypes"
    try:
        version: str = import_module("torch").__version__
    except ModuleNotFoundError as error:
        raise ImportError(f"meshdist.torch needs torch; {advice}", name="torch") from error
    if version_of(version) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(f"meshdist.torch needs torch {wanted} or later, found {version}; {advice}", name="torch")
    for module, names in _NAMES.items():
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            raise ImportError(f"torch {version} was built without {module}; {advice}", name="torch") from None
        missing = [name for name in names if not hasattr(found, name)]
        if missing:
            raise ImportError(
                f"torch {version} has no {', '.join(missing)} in {module}, which meshdist.torch builds on; {advice}",
                name="torch",
            )


def version_of(text: str) -> tuple[int, int]:
    """Return the major and minor version of "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ImportError(f"meshdist.torch cannot read the version of torch, {text!r}", name="torch")
    return int(found[1]), int(found[2])
