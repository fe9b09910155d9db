"""Any array as a NumPy array over the same memory; strided ones packed."""

import numpy as np
import pytest

from meshdist.arrays.host import (
    as_array,
    as_buffers,
    check_apart,
    check_dtype,
    check_writable,
    describe_array,
    is_plain,
    native,
    pack,
    split_rows,
)

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


def test_a_torch_tensor_is_shared(torch):
    tensor = torch.zeros(3)
    as_array(tensor, "x")[...] = 2
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("value", [None, 1, 1.0, "text", [1, 2], {1: 2}, object()], ids=lambda x: type(x).__name__)
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
    with pytest.raises(
        TypeError,
        match=r"^x has the unsupported dtype .*; supported are bool, the integer, floating-point",
    ):
        check_dtype(np.zeros(2, dtype), "x")


@pytest.mark.parametrize("name", ["int32", "float64", "complex128"])
def test_the_other_byte_order_is_swapped(name):
    array = np.arange(3).astype(np.dtype(name).newbyteorder())
    check_dtype(array, "x")
    assert native(array).dtype == np.dtype(name)
    assert np.shares_memory(native(array), array)
    packed = pack(array)
    assert (packed.dtype, packed.tolist()) == (np.dtype(name), array.tolist())
    assert native(packed) is packed


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("O", "send objects with send_object"),
        ("M8[s]", r"pass x.view\('int64'\)"),
        ("U3", "send objects with send_object"),
        ("S3", r"pass x.view\('uint8'\)"),
        ([("a", "f4")], "pass its fields one by one"),
    ],
    ids=str,
)
def test_a_dtype_that_does_not_travel_names_a_way(dtype, hint):
    with pytest.raises(TypeError, match=f"x has the unsupported dtype .*; {hint}"):
        check_dtype(np.zeros(2, dtype), "x")


def test_strings_of_any_length_do_not_travel():
    dtypes = pytest.importorskip("numpy.dtypes", reason="NumPy is older than 1.25")
    if not hasattr(dtypes, "StringDType"):
        pytest.skip("NumPy is older than 2.0")
    with pytest.raises(TypeError, match="x has the unsupported dtype StringDType.*send objects with send_object"):
        check_dtype(np.array(["a", "b"], dtypes.StringDType()), "x")


def test_masked_arrays_are_refused():
    for masked in (np.ma.masked_array([1.0, 2.0], [True, False]), np.ma.masked_array([1.0]), np.ma.masked):
        with pytest.raises(TypeError, match=r"x is a masked array, and its mask is not sent; pass x.data"):
            as_array(masked, "x")


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_share_their_memory():
    source = np.zeros((2, 2))
    for array in (source.view(np.matrix), source.view(np.recarray), source.view(np.memmap)):
        taken = as_array(array, "x")
        assert type(taken) is np.ndarray
        assert np.shares_memory(taken, source)


def test_one_array_and_lists():
    x, y = np.zeros(2), np.zeros(3)
    assert as_buffers(x, "x", False) is x
    assert all(got is given for got, given in zip(as_buffers((x, y), "x", True), (x, y), strict=True))
    assert as_buffers(None, "x", True) is None
    assert as_buffers([], "x", True) == []
    with pytest.raises(TypeError, match=r"^x must be one array, got a list of 2 elements; use np.array\(x\)$"):
        as_buffers([1, 2], "x", False)
    with pytest.raises(TypeError, match=r"^x must be one array, got a tuple of 2 elements$"):
        as_buffers((x, y), "x", False)
    with pytest.raises(TypeError, match=r"^x must be a list of arrays, got generator$"):
        as_buffers((array for array in (x, y)), "x", True)
    with pytest.raises(TypeError, match=r"^x\[1\] must be an array, got int; use np.array\(x\[1\]\)$"):
        as_buffers([x, 3], "x", True)
    with pytest.raises(TypeError, match=r"^x\[1\] has the unsupported dtype object"):
        as_buffers([x, np.zeros(1, object)], "x", True)


def test_arrays_that_are_written_must_be_apart():
    x = np.zeros((3, 2))
    check_apart([x[0], x[1], x[2]], "out")
    check_apart([x[:, 0], x[:, 1]], "out")
    check_apart([x[:0], x[:0]], "out")
    for arrays, pair in (([x[0], x[1], x[0]], (0, 2)), ([x, np.zeros(1), x[1:2, 1]], (0, 2))):
        with pytest.raises(ValueError, match=rf"out\[{pair[0]}\] and out\[{pair[1]}\] share memory"):
            check_apart(arrays, "out")


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
    with pytest.raises(ValueError, match=r"x is read-only, and this call writes to it; pass bytearray\(x\)"):
        check_writable(np.frombuffer(b"abc", np.uint8), "x", b"abc")
    with pytest.raises(ValueError, match=r"x is read-only, and this call writes to it; pass x.copy\(\)"):
        check_writable(base, "x")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4,), (0,)),
        ((2, 3), (8, 0)),
        ((2, 3), (0, 8)),
        ((2, 1, 3), (0, 8, 8)),
        ((3, 3), (8, 8)),
        ((2, 3), (16, 8)),
        ((4,), (4,)),
        ((2, 2), (24, 20)),
    ],
)
def test_repeated_elements_cannot_be_written(shape, strides):
    array = np.lib.stride_tricks.as_strided(np.zeros(8), shape, strides)
    with pytest.raises(ValueError, match="x repeats elements in memory"):
        check_writable(array, "x")


@pytest.mark.parametrize(("shape", "strides"), [((2, 3), (16, 24)), ((3, 2), (-16, 8)), ((2, 2), (24, 16))])
def test_elements_that_interleave_are_written(shape, strides):
    base = np.zeros(64)[32:]
    if shape == (2, 3):
        with pytest.raises(ValueError, match="x repeats elements"):
            check_writable(np.lib.stride_tricks.as_strided(base, (4, 3), strides), "x")
    check_writable(np.lib.stride_tricks.as_strided(base, shape, strides), "x")


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
