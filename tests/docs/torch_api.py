"""What torch.distributed has: its public names and what each takes, read from torch or from the snapshot beside this.

    python tests/docs/torch_api.py      # writes a new snapshot, from the torch that is installed

The snapshot is `torch_api.json`: for each name the calls it knows, one string a call, as `"tensor, dst, tag="`. A name
that may be left out ends in `=`, names behind `*` are keywords, those before `/` have no name. What is no callable, or
does not tell what it takes, has no calls.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_suffix(".json")
VERSION = "2.13.0"

# Private, yet used by scripts: torch had, or has, no public name for them.
PRIVATE = ("_all_gather_base", "_coalescing_manager", "_reduce_scatter_base")

# What older versions had and torch 2.13 has no more, as they were called then; and what only a build with NCCL has.
OLDER = {
    "ProcessGroupNCCL": [],
    "ProcessGroupNCCL.Options": ["is_high_priority_stream="],
    "_make_nccl_premul_sum": ["factor"],
    "all_gather_multigpu": ["output_tensor_lists, input_tensor_list, group=, async_op="],
    "all_reduce_multigpu": ["tensor_list, op=, group=, async_op="],
    "broadcast_multigpu": ["tensor_list, src, group=, async_op=, src_tensor="],
    "deprecated": [],
    "pipeline": [],
    "reduce_multigpu": ["tensor_list, dst, op=, group=, async_op=, dst_tensor="],
    "reduce_scatter_multigpu": ["output_tensor_list, input_tensor_lists, op=, group=, async_op="],
}


def snapshot() -> dict[str, Any]:
    """Return what the snapshot holds."""
    return json.loads(SNAPSHOT.read_text())


def installed() -> dict[str, Any]:
    """Return what the snapshot is to hold, by the torch that is installed."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of what is deprecated
        names = {name: calls_of(value) for name, value in found()}  # a function goes before the module of its name
    return {"torch": torch.__version__.partition("+")[0], "names": names, "older": OLDER}


def found() -> Iterator[tuple[str, Any]]:
    """Give every public name, without the `torch.distributed.` before it, and what it names."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional
    from torch.distributed import distributed_c10d

    for module in pkgutil.iter_modules(dist.__path__):
        if module.name[0] != "_":
            yield module.name, None
    for name in sorted(vars(dist)):
        value = getattr(dist, name)
        is_foreign = isinstance(value, types.ModuleType) or getattr(value, "__module__", "") in ("datetime", "typing")
        if name[0] != "_" and not is_foreign:
            yield name, value
    for name in PRIVATE:
        yield name, getattr(distributed_c10d, name)
    stores = (dist.TCPStore, dist.FileStore, dist.HashStore, dist.PrefixStore)
    yield from members(dist.Store, object)
    for cls in stores:
        yield from members(cls, dist.Store)
    for cls in (dist.Work, dist.ProcessGroup, dist.ReduceOp, dist.DeviceMesh, dist.GroupMember, dist.DebugLevel):
        yield from members(cls, object)
    for name, value in members(dist.Backend, str):
        if name != "Backend.MESHDIST":  # registered if another test of this process has imported meshdist.torch
            yield name, value
    yield "group.WORLD", None
    for name, value in vars(torch.distributed.nn.functional).items():
        if isinstance(value, types.FunctionType) and name[0] != "_":
            yield f"nn.functional.{name}", value
    yield "torch.futures.Future", torch.futures.Future
    for name, value in members(torch.futures.Future, torch._C.Future.__base__):
        yield f"torch.futures.{name}", value
    for name in ("spawn", "ProcessExitedException", "ProcessRaisedException"):
        yield f"torch.multiprocessing.{name}", getattr(torch.multiprocessing, name)


def members(cls: type, base: type) -> Iterator[tuple[str, Any]]:
    """Give the public members of `cls` that `base` has not."""
    for name in dir(cls):
        if name[0] != "_" and not hasattr(base, name):
            yield f"{cls.__name__}.{name}", inspect.getattr_static(cls, name)


def calls_of(value: Any) -> list[str]:
    """Return the calls that `value` knows."""
    value = getattr(value, "__func__", value)
    if isinstance(value, type):
        signatures = [] if issubclass(value, BaseException) else calls_in(value.__init__.__doc__)
    elif callable(value):
        signatures = calls_in(value.__doc__)
    else:
        return []
    is_exception = isinstance(value, type) and issubclass(value, BaseException)
    return signatures or ([in_short(inspect.signature(value))] if has_signature(value) and not is_exception else [])


def has_signature(value: Any) -> bool:
    """Return whether Python can say what `value` takes."""
    try:
        names = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return False
    return names != ["args", "kwargs"]


def in_short(signature: inspect.Signature) -> str:
    """Return a signature as the snapshot has it; what begins with an underscore is torch's own business."""
    parts: list[str] = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls") or name[0] == "_":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        parts.append(f"{stars}{name}{'=' if parameter.default is not inspect.Parameter.empty else ''}")
    return ", ".join(parts)


def calls_in(doc: str | None) -> list[str]:
    """Return the calls that the first lines of a pybind11 docstring tell."""
    calls = []
    for line in (doc or "").splitlines():
        match = re.match(r"\s*(?:\d+\. )?\w+\((.*)\) -> ", line)
        if match and ">>>" not in line:
            calls.append(_without_types(match[1]))
    return calls


def _without_types(text: str) -> str:
    # "arg0: list[str], tag: int = 0": commas inside brackets part nothing.
    flat = text
    while flat != (flat := re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", flat)):
        pass
    parts = []
    for part in filter(None, (part.strip() for part in flat.split(","))):
        name = part.partition(":")[0].strip()
        if name != "self":
            parts.append(f"{name}{'=' if '=' in part else ''}")
    has_names = not any(re.fullmatch(r"arg\d", part) for part in parts)
    return ", ".join(parts if has_names else [*parts, "/"])


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(installed(), indent=1, sort_keys=True) + "\n")
