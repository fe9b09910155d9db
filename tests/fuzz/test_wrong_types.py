"""Each argument of each flat function with whatever Python has: taken, or refused in words, on all ranks alike."""

from __future__ import annotations

import inspect
import os
import sys

import numpy as np
import pytest

import meshdist as dist

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]
SIZE = 2


def x():
    return np.ones(4)


def right_arguments(rank):
    """Return right arguments of each function, by name; what is not named has its default."""
    two, whole, at_root = [x(), x()], np.ones(8), rank == 0
    return {
        "all_reduce": {"tensor": x(), "op": "sum"},
        "broadcast": {"tensor": x(), "src": 0},
        "reduce": {"tensor": x(), "dst": 0},
        "all_gather": {"tensor_list": two, "tensor": x()},
        "all_gather_into_tensor": {"output_tensor": whole, "input_tensor": x()},
        "gather": {"tensor": x(), "gather_list": two if at_root else None, "dst": 0},
        "scatter": {"tensor": x(), "scatter_list": two if at_root else None, "src": 0},
        "reduce_scatter": {"output": x(), "input_list": two},
        "reduce_scatter_tensor": {"output": x(), "input": whole},
        "all_to_all": {"output_tensor_list": two, "input_tensor_list": [x(), x()]},
        "all_to_all_single": {"output": x(), "input": x()},
        "all_reduce_coalesced": {"tensors": two},
        "all_gather_coalesced": {"output_tensor_lists": [[x()], [x()]], "input_tensor_list": [x()]},
        "all_gather_into_tensor_coalesced": {"output_tensors": [whole], "input_tensors": [x()]},
        "reduce_scatter_tensor_coalesced": {"output_tensors": [x()], "input_tensors": [whole]},
        "all_reduce_multigpu": {"tensor_list": two},
        "broadcast_multigpu": {"tensor_list": two, "src": 0},
        "reduce_multigpu": {"tensor_list": two, "dst": 0},
        "all_gather_multigpu": {"output_tensor_lists": [two], "input_tensor_list": [x()]},
        "reduce_scatter_multigpu": {"output_tensor_list": [x()], "input_tensor_lists": [two]},
        "barrier": {},
        "monitored_barrier": {},
        "all_gather_object": {"object_list": [None, None], "obj": 1},
        "broadcast_object_list": {"object_list": [rank], "src": 0},
        "gather_object": {"obj": 1, "object_gather_list": [None, None] if at_root else None, "dst": 0},
        "scatter_object_list": {
            "scatter_object_output_list": [None],
            "scatter_object_input_list": [1, 2] if at_root else None,
            "src": 0,
        },
        "send": {"tensor": x(), "dst": 1 - rank},
        "isend": {"tensor": x(), "dst": 1 - rank},
        "send_object_list": {"object_list": [1], "dst": 1 - rank},
        "isend_object_list": {"object_list": [1], "dst": 1 - rank},
        "send_object": {"obj": 1, "dst": 1 - rank},
    }


FUNCTIONS = list(right_arguments(0))
# Arguments are checked before a backend comes in; these have some that it gets as they are.
ON_GLOO = FUNCTIONS if "MESHDIST_FUZZ_EXAMPLES" in os.environ else ["send", "isend", "all_to_all_single", "barrier"]
PAIRS = [*[("threads", name) for name in FUNCTIONS], *[("gloo", name) for name in ON_GLOO]]
VALUES = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "99": lambda: 99,
    "10**30": lambda: 10**30,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "abc",
    "bytes": lambda: b"abc",
    "empty list": list,
    "list of None": lambda: [None],
    "list of numbers": lambda: [1, 2],
    "list of lists": lambda: [[], [[]]],
    "ragged": lambda: [[x()], x(), 3],
    "tuple": lambda: (x(), x()),
    "dict": lambda: {0: x()},
    "set": lambda: {1, 2},
    "generator": lambda: (k for k in range(2)),
    "object": object,
    "class": lambda: np.ndarray,
    "function": lambda: len,
    "module": lambda: np,
    "NumPy scalar": lambda: np.float32(2),
    "array": x,
    "0-d": lambda: np.array(1),
    "empty": lambda: np.zeros(0),
    "2-d": lambda: np.ones((2, 4)),
    "dtype": lambda: np.dtype("f4"),
    "op": lambda: dist.ReduceOp.MAX,
    "factor": lambda: dist.ReduceOp.PREMUL_SUM([1, 2, 3]),
}


def try_all(name):
    """Call the function with every wrong argument; return what was not as it should be."""
    function, rank, found = getattr(dist, name), dist.get_rank(), []
    parameters = list(inspect.signature(function).parameters)
    for parameter in parameters:
        group = dist.new_group(timeout=20)
        for label, make in VALUES.items():
            if parameter == "group" and label == "None":
                continue  # the world: what is sent there would come to whoever uses it next
            arguments = {"group": group, **right_arguments(rank)[name], parameter: make()}
            if parameter.startswith("group_"):
                arguments.pop(parameter.removeprefix("group_"), None)
            kind, message = outcome(lambda arguments=arguments: function(**arguments))
            in_step, why = outcome(group.barrier)
            if not is_in_words(kind, message, name, parameter):
                found.append(f"{parameter}={label}: {kind.__name__}: {message}")
            if in_step is not None:
                if kind is None:
                    found.append(f"{parameter}={label}: the group is broken afterwards: {why}")
                dist.destroy_process_group(group)
                dist.barrier()
                group = dist.new_group(timeout=20)
        dist.destroy_process_group(group)
    return found


def is_in_words(kind, message, name, parameter):
    """Return whether a call ended as it may: well, or with an error that says of which call it is, and of what."""
    if kind is None:
        return True
    if kind is dist.DistBackendError:
        return "disagree" in message or "failed: " in message
    if kind is dist.DistTimeoutError:
        return parameter == "timeout" and "timed out after 0 s" in message
    if kind not in (ValueError, TypeError):
        return False
    if "group must be" in message or "cannot pickle" in message:
        return True
    called = "send" if name.startswith("send") else name  # objects are sent by two sends
    return called in message or (parameter == "async_op" and "truth value" in message)


def outcome(call):
    try:
        result = call()
        if isinstance(result, dist.Work):
            result.wait()
    except Exception as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_any_value_for_any_argument(worlds, backend, name):
    for rank, found in enumerate(worlds.world(backend, SIZE).run(try_all, name)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)
