"""Arrays of other libraries: shared, or refused with the reason."""

import array
import ctypes
import mmap

import numpy as np
import pytest

import meshdist as dist
from meshdist.arrays.host import as_array, check_dtype, check_writable

pytestmark = pytest.mark.timeout(30)


class OldDlpack:
    """Exports by the first version of the protocol, which does not say whether memory may be written."""

    def __init__(self, source):
        self.source = source

    def __dlpack__(self, stream=None):
        return self.source.__dlpack__()

    def __dlpack_device__(self):
        return self.source.__dlpack_device__()


def test_the_first_version_of_dlpack_is_read():
    source = np.arange(3.0)
    taken = as_array(OldDlpack(source), "x")
    assert np.shares_memory(taken, source)


class Struct:
    def __init__(self, source):
        self.source = source
        self.__array_struct__ = source.__array_struct__


BUFFERS = {
    "array.array": (lambda: array.array("d", [0, 0, 0]), "float64"),
    "bytearray": (lambda: bytearray(3), "uint8"),
    "memoryview": (lambda: memoryview(bytearray(24)).cast("d"), "float64"),
    "ctypes": (lambda: (ctypes.c_int16 * 3)(), "int16"),
    "mmap": (lambda: mmap.mmap(-1, 3), "uint8"),
    "__array_struct__": (lambda: Struct(np.zeros(3)), "float64"),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_are_shared(kind):
    make, dtype = BUFFERS[kind]
    value = make()
    taken = as_array(value, "x")
    check_dtype(taken, "x")
    check_writable(taken, "x", value)
    assert (taken.dtype, taken.shape) == (np.dtype(dtype), (3,))
    taken[1] = 5
    assert as_array(value, "x").tolist() == [0, 5, 0]


def test_bytes_are_read_only():
    taken = as_array(b"abc", "x")
    assert taken.tolist() == [97, 98, 99]
    with pytest.raises(ValueError, match="x is read-only"):
        check_writable(taken, "x", b"abc")


def test_the_kind_of_array_that_numpy_would_copy():
    class Copying:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3)

    taken = as_array(Copying(), "x")
    assert taken.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"x is a Copying, of which NumPy makes a copy.*np.array\(x\)"):
        check_writable(taken, "x", Copying())
    with pytest.raises(ValueError, match="x is read-only"):
        check_writable(taken, "x")


class Broken:
    """Says that it is an array, and is none."""

    def __init__(self, name, value):
        setattr(self, name, value)


class BrokenArray:
    def __array__(self, dtype=None, copy=None):
        raise ValueError("no elements today")


@pytest.mark.parametrize(
    "value",
    [Broken("__array_interface__", 3), Broken("__array_interface__", {}), Broken("__dlpack__", 3), BrokenArray()],
    ids=["number", "empty", "DLPack", "__array__"],
)
def test_broken_interfaces_are_refused(value):
    with pytest.raises(TypeError, match=rf"x: {type(value).__name__} does not share its memory through"):
        as_array(value, "x")


def test_gpu_arrays_are_refused():
    value = Broken("__cuda_array_interface__", {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3})
    with pytest.raises(TypeError, match="x is a Broken in GPU memory.*CPU"):
        as_array(value, "x")


def test_a_class_is_no_array():
    with pytest.raises(TypeError, match="x must be an array, got the class ndarray"):
        as_array(np.ndarray, "x")


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "int64", "float16", "float64", "complex64"])
def test_tensors_are_shared(torch, name):
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    taken = as_array(tensor.T, "x")
    assert taken.dtype == np.dtype(name)
    taken[2, 1] = 1
    assert tensor[1, 2] == 1


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_tensors_of_few_bits_are_shared(torch, name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    for tensor in (torch.zeros(3, dtype=getattr(torch, name)), torch.zeros((), dtype=getattr(torch, name))):
        taken = as_array(tensor, "x")
        assert taken.dtype == np.dtype(getattr(ml_dtypes, name))
        taken[...] = 1.5
        assert (tensor.float() == 1.5).all()


def test_tensors_that_are_no_memory(torch):
    plain, number = torch.zeros(3), torch.zeros(3, dtype=torch.complex64)
    refused = {
        "resolve_conj": number.conj(),
        "resolve_neg": torch.imag(number.conj()),
        "layout": plain.to_sparse(),
        "meta": torch.zeros(3, device="meta"),
    }
    for word, tensor in refused.items():
        with pytest.raises(TypeError, match=r"x: .* does not share its memory through tensor.numpy\(\)") as raised:
            as_array(tensor, "x")
        assert word in str(raised.value)


def test_parameters_are_written_in_place_and_keep_their_gradients(torch):
    def main():
        mine = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
        dist.broadcast(mine, src=1)
        halves = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        dist.all_reduce(halves)
        loss = (mine * halves.sum().float()).sum()
        dist.all_reduce(loss, op="avg")
        loss.backward()
        dist.all_reduce(mine.grad)
        return mine.tolist(), halves.tolist(), loss.item(), mine.grad.tolist(), mine.requires_grad

    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    assert dist.run(main, 2) == [([1.0] * 3, [2.0] * 2, 12.0, [8.0] * 3, True)] * 2


def test_what_would_lose_its_gradient_unseen_is_refused(torch):
    def main():
        with pytest.raises(TypeError, match=r": x requires grad, .* would have no gradient; pass x.detach\(\)$"):
            dist.functional.all_reduce(torch.nn.Parameter(torch.ones(2)))
        return dist.functional.all_reduce(torch.ones(2)).tolist()

    assert dist.run(main, 2) == [[2.0, 2.0]] * 2


def test_an_expanded_tensor_is_read_only(torch):
    taken = as_array(torch.zeros(1).expand(3), "x")
    with pytest.raises(ValueError, match="x repeats elements"):
        check_writable(taken, "x")
