"""The stand-in for NCCL against the real binding, as far as that goes without a GPU."""

import json

import cupy_environment
import pytest

pytestmark = pytest.mark.timeout(700)  # the first time, CuPy and NCCL are installed


@pytest.fixture(scope="module")
def report():
    return json.loads(cupy_environment.run("binding_programs.py"))


def test_the_library_is_there(report):
    assert report["version"] >= 22000
    assert report["ids"] == [128, True]
    assert report["missing"] == []
    assert all(report["kinds"])


def test_constants_are_those_of_the_binding(report):
    assert {"SUM", "PROD", "MAX", "MIN", "INT8", "UINT8", "FLOAT32", "FLOAT64"} <= set(report["constants"])
    assert all(report["constants"].values()), report["constants"]


def test_calls_take_as_many_arguments_as_those_of_the_stand_in(report):
    for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "send", "recv"):
        # Without a communicator the arguments are read, and found wanting.
        assert report["arities"][name] == ["NCCL 4", "TypeError", "TypeError"], name
    assert report["arities"]["check_async_error"] == ["NCCL 4"]


def test_what_cupy_lacks_is_found_in_the_same_library(report):
    for name in ("premul_sum", "drop_op"):
        assert report["arities"][name][0].startswith("DistBackendError: NCCL says: invalid argument"), name
    for name in ("finalize", "destroy", "abort"):
        assert report["arities"][name] == ["returned None"], name


def test_results_that_cupy_has_no_name_for(report):
    assert report["failures"]["4"].startswith("NCCL says: invalid argument")
    assert report["failures"]["7"].startswith("NCCL says: NCCL operation in progress")
    assert report["failures"]["8"].startswith("NCCL says: ")
    assert report["others"] == ["KeyError", "ValueError"]


def test_a_communicator_without_a_gpu(report):
    if report["no_gpu"] is None:
        pytest.skip("there is a GPU here")
    assert report["no_gpu"].startswith("NCCL says: unhandled cuda error")
