"""Any array as a NumPy array over the same memory; strided ones packed."""

import sys

import numpy as np
import pytest

from meshdist.arrays import as_array, check_dtype, check_writable, describe_array, is_plain, pack, split_rows

pytestmark = pytest.mark.timeout(30)


class Interface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


class Dlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize(
    "wrap", [lambda array: array, Interface, Dlpack], ids=["ndarray", "__array_interface__", "DLPack"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_the_memory_is_shared(wrap, shape):
    source = np.zeros(shape)
    array = as_array(wrap(source), "x")
    assert (array.shape, array.dtype) == (shape, np.float64)
    array[...] = 7
    assert (source == 7).all()


def test_a_torch_tensor_is_shared():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.zeros(3)
    as_array(tensor, "x")[...] = 2
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("value", [None, 1, 1.0, "text", [1, 2], {1: 2}, object()], ids=repr)
def test_what_is_no_array(value):
    with pytest.raises(TypeError, match=f"^input must be an array, got {type(value).__name__}"):
        as_array(value, "input")


def test_a_scalar_is_no_array():
    with pytest.raises(TypeError, match=r"x must be an array, got the scalar .*; use np.array\("):
        as_array(np.float64(3), "x")


def test_dlpack_that_does_not_share():
    class OnAnotherDevice:
        def __dlpack__(self, **how):
            raise BufferError("lives on another device")

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(TypeError, match=r"x: OnAnotherDevice does not share its memory through DLPack"):
        as_array(OnAnotherDevice(), "x")


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "longdouble"])
def test_dtypes_that_travel(name):
    check_dtype(np.zeros(2, name), "x")


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_extension_dtypes_travel(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    check_dtype(np.zeros(2, getattr(ml_dtypes, name)), "x")


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V4", [("a", "f4")], [("a", "f4", 3)]], ids=repr)
def test_dtypes_that_do_not_travel(dtype):
    with pytest.raises(TypeError, match=r"^x has dtype .*; known are bool, the integers"):
        check_dtype(np.zeros(2, dtype), "x")


@pytest.mark.parametrize("name", ["int32", "float64", "complex128"])
def test_the_other_byte_order_does_not_travel(name):
    dtype = np.dtype(name).newbyteorder("<" if sys.byteorder == "big" else ">")
    with pytest.raises(TypeError, match=rf"x has dtype {dtype.str}, of the other byte order; use x.astype\('{name}'\)"):
        check_dtype(np.zeros(2, dtype), "x")


def test_writable():
    base = np.zeros((4, 6))
    for array in (
        base,
        base[::2],
        base.T,
        base[:, ::-1],
        base[:0],
        np.zeros(()),
        np.zeros((0, 4)),
        np.zeros((4, 0, 2)),
        base[:, :1],
    ):
        check_writable(array, "x")
    base.flags.writeable = False
    with pytest.raises(ValueError, match=r"x is read-only, and this call writes it; pass x.copy\(\)"):
        check_writable(base, "x")


@pytest.mark.parametrize(
    ("shape", "strides"), [((4,), (0,)), ((2, 3), (8, 0)), ((2, 3), (0, 8)), ((2, 1, 3), (0, 8, 8))]
)
def test_repeated_elements_cannot_be_written(shape, strides):
    array = np.lib.stride_tricks.as_strided(np.zeros(8), shape, strides)
    with pytest.raises(ValueError, match="x repeats elements in memory"):
        check_writable(array, "x")


def test_one_element_repeated_once_is_written():
    check_writable(np.lib.stride_tricks.as_strided(np.zeros(1), (1,), (0,)), "x")


PLAIN = [np.zeros(()), np.zeros(0), np.zeros(3), np.zeros((2, 3)), np.zeros((2, 3, 4))[1], np.zeros((0, 3))]
UNALIGNED = np.zeros(17, np.uint8)[1:].view(np.float64)
STRIDED = [
    np.arange(9)[::2],
    np.arange(6).reshape(2, 3).T,
    np.arange(24).reshape(4, 6)[:, 1:3],
    np.arange(5)[::-1],
    UNALIGNED,
]


@pytest.mark.parametrize("array", PLAIN, ids=lambda array: str(array.shape))
def test_a_plain_array_is_not_copied(array):
    assert is_plain(array)
    assert pack(array) is array


@pytest.mark.parametrize("array", STRIDED, ids=lambda array: f"{array.shape} {array.strides}")
def test_another_is_packed(array):
    assert not is_plain(array)
    packed = pack(array)
    assert is_plain(packed)
    assert not np.shares_memory(packed, array)
    np.testing.assert_array_equal(packed, array)
    assert (pack(array, keep=False).shape, pack(array, keep=False).dtype) == (array.shape, array.dtype)


def test_split_rows():
    array = np.arange(12).reshape(6, 2)
    blocks = split_rows(array, 3)
    assert [block.tolist() for block in blocks] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    blocks[1][...] = -1
    assert array[2:4].tolist() == [[-1, -1], [-1, -1]]
    assert [block.size for block in split_rows(np.zeros((0, 3)), 4)] == [0, 0, 0, 0]


def test_describe_array():
    assert describe_array(np.zeros((4, 3), "f4")) == "float32[4, 3]"
    assert describe_array(np.zeros((), "?")) == "bool[]"
