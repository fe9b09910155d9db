"""What CuPy's binding of NCCL, and ours of the rest, do where there is no communicator, and no GPU is needed."""

from __future__ import annotations

import inspect
import json
from typing import Any

import standin_cupy
from standin_nccl import StandInCommunicator, StandInLibrary

from meshdist.backends.nccl import library
from meshdist.errors import DistBackendError

INVALID_ARGUMENT = 4


def outcome(call: Any, *given: Any) -> str:
    from cupy.cuda import nccl  # not where the tests are collected

    try:
        return f"returned {call(*given)!r}"
    except TypeError:
        return "TypeError"
    except nccl.NcclError as error:
        return f"NCCL {error.status}"
    except DistBackendError as error:
        return f"DistBackendError: {error}"


def arities() -> dict[str, list[str]]:
    """For each call of a communicator: what it makes of as many arguments as the stand-in's, of one less, one more."""
    from cupy.cuda import nccl

    null = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    comm = library.CupyCommunicator(null, library.Supplement())
    found = {}
    for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "send", "recv"):
        count = len(inspect.signature(getattr(StandInCommunicator, name)).parameters) - 1
        ours = len(inspect.signature(getattr(library.Communicator, name)).parameters) - 1
        assert count == ours, name
        given = [1] * count
        calls = (given, given[:-1], [*given, 1])
        found[name] = [outcome(getattr(comm, name), *arguments) for arguments in calls]
    found["check_async_error"] = [outcome(comm.check_async_error)]
    found["premul_sum"] = [outcome(comm.premul_sum, b"\0\0\0\0", library.FLOAT32)]
    found["drop_op"] = [outcome(comm.drop_op, 7)]
    found["finalize"] = [outcome(comm.finalize)]
    found["destroy"] = [outcome(comm.destroy)]
    found["abort"] = [outcome(comm.abort)]
    return found


def main() -> None:
    from cupy import cuda
    from cupy.cuda import nccl

    made = library.CupyLibrary()
    ids = [made.unique_id() for _ in range(2)]
    made.group_start()
    made.group_end()
    missing = [name for name in vars(StandInLibrary) if not name.startswith("_") and not hasattr(made, name)]
    in_cuda = [name for name in vars(standin_cupy.module().cuda) if not name.startswith("_")]
    stream = ["wait_event", "record", "synchronize", "done", "__enter__", "__exit__"]
    report = {
        "version": made.version(),
        "ids": [len(ids[0]), ids[0] != ids[1]],
        "missing": missing
        + [name for name in in_cuda if not hasattr(cuda, name)]
        + [name for name in vars(standin_cupy.runtime) if not hasattr(cuda.runtime, name)]
        + [name for name in stream if not hasattr(cuda.Stream, name)]
        + [name for name in ("record", "synchronize", "done") if not hasattr(cuda.Event, name)],
        "kinds": [
            getattr(cuda.runtime, name) == getattr(standin_cupy.runtime, name)
            for name in ("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice")
        ],
        "constants": {
            name: getattr(nccl, f"NCCL_{name}") == getattr(library, name)
            for name in dir(library)
            if name.isupper() and hasattr(nccl, f"NCCL_{name}")
        },
        "arities": arities(),
        "failures": {
            str(code): str(made.failure(error))
            for code, error in ((4, nccl.NcclError(4)), (7, KeyError(7)), (8, KeyError(8)))
        },
        "others": [type(made.failure(error)).__name__ for error in (KeyError("x"), ValueError("y"))],
        "no_gpu": None if _num_gpus() else outcome_of_communicator(made, ids[0]),
    }
    print(json.dumps(report))


def outcome_of_communicator(made: library.CupyLibrary, unique_id: bytes) -> str:
    try:
        made.communicator(1, unique_id, 0)
    except Exception as error:  # what CuPy raises, in our words
        return str(made.failure(error))
    return "a communicator"


def _num_gpus() -> int:
    from cupy import cuda

    try:
        return cuda.runtime.getDeviceCount()
    except cuda.runtime.CUDARuntimeError:
        return 0


if __name__ == "__main__":
    main()
