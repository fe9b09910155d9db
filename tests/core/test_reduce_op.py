"""ReduceOp: names, and which dtypes each is defined for."""

import itertools
import pickle

import numpy as np
import pytest

from meshdist import ReduceOp
from meshdist.arrays.reduce_op import as_reduce_op, check_op_dtype

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("op", ReduceOp)
def test_every_spelling(op):
    for spelling in (op, op.name, op.value, op.name.capitalize()):
        assert as_reduce_op(spelling) is op


def test_it_is_hashable_and_pickles():
    table = {op: op.value for op in ReduceOp}
    for op in ReduceOp:
        assert pickle.loads(pickle.dumps(op)) is op
        assert table[op] == op.name.lower()


@pytest.mark.parametrize("name", ["", "mean", "add", "sum ", "*"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=f"unknown op {name!r}; choose from".replace("*", r"\*")) as raised:
        as_reduce_op(name)
    assert [op.value for op in ReduceOp if op.value not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("prod", "product"), ("mean", "avg"), ("SUM ", "sum"), ("add", "sum"), ("maximum", "max"), ("xor", "bxor")],
)
def test_an_unknown_name_that_is_near_a_known_one(name, meant):
    with pytest.raises(ValueError, match=f"unknown op {name!r}; choose from .*; did you mean {meant!r}\\?$"):
        as_reduce_op(name)


def test_an_unknown_name_that_is_near_none_may_be_that_of_an_axis():
    with pytest.raises(
        ValueError, match=r"choose from [a-z, ]*; if it is an axis of a mesh, call the method of mesh\['tp'\]$"
    ):
        as_reduce_op("tp")


def test_premul_sum_without_a_factor():
    with pytest.raises(ValueError, match=r"PREMUL_SUM needs a factor: pass op=meshdist.premul_sum\(2.0\)"):
        as_reduce_op("premul_sum")


@pytest.mark.parametrize("value", [None, 0, 1.5, np.add, ["sum"], b"sum"], ids=repr)
def test_what_is_no_op(value):
    with pytest.raises(TypeError, match=f"op must be a ReduceOp or its name, got {type(value).__name__}"):
        as_reduce_op(value)


UNDEFINED = {
    "?": "AVG",
    "i4": "AVG",
    "u8": "AVG",
    "f2": "BAND BOR BXOR",
    "f8": "BAND BOR BXOR",
    "c8": "MIN MAX BAND BOR BXOR",
    "c16": "MIN MAX BAND BOR BXOR",
}


@pytest.mark.parametrize(("code", "op"), list(itertools.product(UNDEFINED, ReduceOp)))
def test_which_dtypes_have_which_ops(code, op):
    dtype = np.dtype(code)
    if op.name in UNDEFINED[code].split():
        with pytest.raises(TypeError, match=f"op {op.name} is not defined for {dtype}"):
            check_op_dtype(op, dtype)
    else:
        check_op_dtype(op, dtype)


@pytest.mark.parametrize("op", ReduceOp)
def test_extension_dtypes(op):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    dtype = np.dtype(ml_dtypes.bfloat16)
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        with pytest.raises(TypeError, match=f"op {op.name} is not defined for bfloat16"):
            check_op_dtype(op, dtype)
    else:
        check_op_dtype(op, dtype)


def test_truth_values_have_no_mean():
    with pytest.raises(TypeError, match="op AVG is not defined for bool: truth values have no mean"):
        check_op_dtype(ReduceOp.AVG, np.dtype(bool))


def test_only_the_mean_divides():
    for op in ReduceOp:
        total = np.array([6.0, -9.0], np.float32)
        op.finish(total, 3)
        assert total.tolist() == ([2.0, -3.0] if op is ReduceOp.AVG else [6.0, -9.0])
        assert total.dtype == np.float32


@pytest.mark.parametrize(("name", "meant"), [("PROD", "PRODUCT"), ("MEAN", "AVG"), ("MAXIMUM", "MAX"), ("sum", "SUM")])
def test_a_member_with_another_name_is_pointed_out(name, meant):
    with pytest.raises(
        AttributeError, match=rf"^ReduceOp has no attribute '{name}'; .*; did you mean ReduceOp\.{meant}\?$"
    ):
        getattr(ReduceOp, name)
    assert not hasattr(ReduceOp, "NOTHING_LIKE_IT")


@pytest.mark.parametrize(("name", "op"), [("land", "band"), ("LOR", "bor"), ("logical_xor", "bxor")])
def test_logical_reductions_are_those_of_truth_values(name, op):
    words = f"for a logical reduction, pass an array of bool, x != 0, and op={op!r}$"
    with pytest.raises(ValueError, match=f"unknown op {name!r}; choose from .*; {words}"):
        as_reduce_op(name)
    with pytest.raises(AttributeError, match=words):
        getattr(ReduceOp, name.upper())


def test_the_function_of_a_logical_reduction():
    with pytest.raises(TypeError, match="got ufunc 'logical_and'; for a logical reduction, pass an array of bool"):
        as_reduce_op(np.logical_and)


def test_a_function_is_no_op():
    with pytest.raises(
        TypeError, match=r"functions are not supported: call functools\.reduce\(f, meshdist\.functional"
    ):
        as_reduce_op(lambda a, b: a + b)


def test_an_op_of_mpi4py_is_no_op():
    op = type("Op", (), {"__module__": "mpi4py.MPI", "__call__": lambda self, a, b: a})()
    with pytest.raises(TypeError, match="got Op of mpi4py; pass the name of a reduction: sum, product, min"):
        as_reduce_op(op)
