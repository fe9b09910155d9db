"""Wrong calls of every collective: what is raised, and what the message must say."""

import numpy as np

import meshdist as dist

SIZE = 3


def x(*shape, dtype="float32"):
    return np.ones(shape or (4,), dtype)


def many(*shape, count=SIZE):
    return [x(*shape) for _ in range(count)]


def read_only():
    array = x()
    array.flags.writeable = False
    return array


def repeated(*shape):
    array = np.lib.stride_tricks.as_strided(x(1), shape or (4,), (0,) * len(shape or (4,)))
    assert array.flags.writeable
    return array


def other():
    return (dist.get_rank() + 1) % SIZE


OBJECTS = np.zeros(4, object)
STRUCTURED = np.zeros(4, [("a", "f4"), ("b", "i4")])
TEXTS, DATES = np.zeros(4, "U3"), np.zeros(4, "M8[s]")


class NoArray:
    def __repr__(self):
        return "<no array>"


# What is wrong of one array, whatever the collective does with it: class, and words of the message.
WRONG_ARRAYS = {
    "None": (None, TypeError, "None"),
    "number": (3.0, TypeError, "array.*float"),
    "NumPy scalar": (np.float32(3), TypeError, "array.*scalar.*np.(array|empty)"),
    "text": ("abc", TypeError, "array.*str"),
    "no array": (NoArray(), TypeError, "array.*NoArray"),
    "masked": (np.ma.masked_array([1.0], [True]), TypeError, r"masked array.*filled"),
    "objects": (OBJECTS, TypeError, "dtype object.*supported are bool"),
    "structured": (STRUCTURED, TypeError, r"dtype \[\('a'.*supported are bool"),
    "text array": (TEXTS, TypeError, "dtype <U3.*supported are bool"),
    "dates": (DATES, TypeError, r"dtype datetime64\[s\].*supported are bool"),
}
# What is wrong of an output in addition.
WRONG_OUTPUTS = {
    "read-only": (read_only(), ValueError, r"read-only.*\.copy\(\)"),
    "repeated": (repeated(), ValueError, r"repeats elements.*\.copy\(\)"),
}
# Collective -> for each of its arrays: the parameter, whether it is an output, and the call with a wrong one.
ARRAYS = {
    "all_reduce": [("tensor", True, lambda a: dist.all_reduce(a))],
    "broadcast": [
        ("tensor", False, lambda a: dist.broadcast(a, 0)),
        ("tensor", True, lambda a: dist.broadcast(a, (dist.get_rank() + 1) % SIZE)),
    ],
    "reduce": [
        ("tensor", False, lambda a: dist.reduce(a, (dist.get_rank() + 1) % SIZE)),
        ("tensor", True, lambda a: dist.reduce(a, dist.get_rank())),
    ],
    "all_gather": [
        ("tensor", False, lambda a: dist.all_gather(many(4), a)),
        ("tensor_list", True, lambda a: dist.all_gather([x(), x(), a], x())),
    ],
    "all_gather_into_tensor": [
        ("input_tensor", False, lambda a: dist.all_gather_into_tensor(x(12), a)),
        ("output_tensor", True, lambda a: dist.all_gather_into_tensor(a, x(4))),
    ],
    "reduce_scatter": [
        ("output", True, lambda a: dist.reduce_scatter(a, many(4))),
        ("input_list", False, lambda a: dist.reduce_scatter(x(), [x(), a, x()])),
    ],
    "reduce_scatter_tensor": [
        ("output", True, lambda a: dist.reduce_scatter_tensor(a, x(12))),
        ("input", False, lambda a: dist.reduce_scatter_tensor(x(), a)),
    ],
    "all_to_all_single": [
        ("output", True, lambda a: dist.all_to_all_single(a, x(3))),
        ("input", False, lambda a: dist.all_to_all_single(x(3), a)),
    ],
    "send": [("tensor", False, lambda a: dist.send(a, (dist.get_rank() + 1) % SIZE))],
    "recv": [("tensor", True, lambda a: dist.recv(a, (dist.get_rank() + 1) % SIZE))],
}


def array_rows():
    for collective, parameters in ARRAYS.items():
        for parameter, is_output, call in parameters:
            wrong = {**WRONG_ARRAYS, **(WRONG_OUTPUTS if is_output else {})}
            for name, (value, kind, words) in wrong.items():
                yield (
                    f"{collective}: {name} as {parameter}{' that is written' * is_output}",
                    (lambda call=call, value=value: call(value), kind, f"{parameter}.*{words}"),
                )


# Row -> the call, the class of what it raises, what the message must have behind "<collective> on group 'world' (rank".
ROWS = dict(array_rows()) | {
    # Lists.
    "all_gather: short list": (lambda: dist.all_gather(many(4, count=2), x()), ValueError, "tensor_list.*3 arrays.*2"),
    "all_gather: long list": (lambda: dist.all_gather(many(4, count=4), x()), ValueError, "tensor_list.*3 arrays.*4"),
    "all_gather: empty list": (lambda: dist.all_gather([], x()), ValueError, "tensor_list.*3 arrays.*0"),
    "all_gather: no list": (lambda: dist.all_gather(x(12), x()), TypeError, "tensor_list.*list of 3 arrays.*one array"),
    "all_gather: None for the list": (
        lambda: dist.all_gather(None, x()),
        TypeError,
        "tensor_list.*list of 3 arrays.*None",
    ),
    "all_gather: list of numbers": (
        lambda: dist.all_gather([1, 2, 3], x()),
        TypeError,
        r"tensor_list\[0\].*array.*int",
    ),
    "all_gather: list as tensor": (lambda: dist.all_gather(many(4), many(4)), TypeError, "tensor.*one array.*list"),
    "reduce_scatter: short list": (
        lambda: dist.reduce_scatter(x(), many(4, count=2)),
        ValueError,
        "input_list.*3 arrays.*2",
    ),
    "reduce_scatter: no list": (
        lambda: dist.reduce_scatter(x(), x(12)),
        TypeError,
        "input_list.*list of 3 arrays.*one array",
    ),
    "reduce_scatter: None": (lambda: dist.reduce_scatter(x(), None), TypeError, "input_list.*list of 3 arrays.*None"),
    "all_reduce: list": (lambda: dist.all_reduce(many(4)), TypeError, "tensor.*one array.*list"),
    "broadcast: list": (lambda: dist.broadcast(many(4), 0), TypeError, "tensor.*one array.*list"),
    "reduce: list": (lambda: dist.reduce(many(4), 0), TypeError, "tensor.*one array.*list"),
    "send: list": (lambda: dist.send(many(4), other()), TypeError, "tensor.*array.*list"),
    "recv: list": (lambda: dist.recv(many(4), other()), TypeError, "tensor.*array.*list"),
    # Shapes.
    "all_gather: other shape": (
        lambda: dist.all_gather(many(5), x(4)),
        ValueError,
        r"tensor must have the shape of tensor_list\[.\].*\[5\].*\[4\]",
    ),
    "all_gather: other shape, same number of elements": (
        lambda: dist.all_gather(many(4, 1), x(4)),
        ValueError,
        r"tensor must.*tensor_list\[.\].*\[4, 1\].*\[4\]",
    ),
    "all_gather_into_tensor: wrong rows": (
        lambda: dist.all_gather_into_tensor(x(8, 2), x(4, 2)),
        ValueError,
        r"output_tensor must have shape \(12, 2\) or \(3, 4, 2\).*input_tensor.*\(4, 2\).*got \(8, 2\)",
    ),
    "all_gather_into_tensor: wrong columns": (
        lambda: dist.all_gather_into_tensor(x(12, 3), x(4, 2)),
        ValueError,
        r"output_tensor must have shape \(12, 2\).*got \(12, 3\)",
    ),
    "all_gather_into_tensor: flat": (
        lambda: dist.all_gather_into_tensor(x(24), x(4, 2)),
        ValueError,
        r"output_tensor must have shape \(12, 2\).*got \(24,\)",
    ),
    "reduce_scatter: other shape": (
        lambda: dist.reduce_scatter(x(5), many(4)),
        ValueError,
        r"output must have the shape of input_list\[.\].*\[4\].*\[5\]",
    ),
    "reduce_scatter_tensor: does not divide": (
        lambda: dist.reduce_scatter_tensor(x(3), x(10)),
        ValueError,
        r"input must have shape \(9,\) or \(3, 3\).*output.*\(3,\).*got \(10,\)",
    ),
    "all_to_all_single: does not divide": (
        lambda: dist.all_to_all_single(x(4), x(4)),
        ValueError,
        "dim 0 of input.*multiple of 3 ranks.*4.*split sizes",
    ),
    "all_to_all_single: output of a different shape": (
        lambda: dist.all_to_all_single(x(6), x(3)),
        ValueError,
        r"output.*shape of input.*\(3,\).*got \(6,\)",
    ),
    "all_to_all_single: other columns": (
        lambda: dist.all_to_all_single(x(3, 2), x(3, 4)),
        ValueError,
        r"all but dim 0.*\(3, 4\).*\(3, 2\)",
    ),
    "all_to_all_single: 0-d": (
        lambda: dist.all_to_all_single(np.array(1.0), np.array(1.0)),
        ValueError,
        r"dim 0.*\(\)",
    ),
    # Split sizes.
    "all_to_all_single: too few splits": (
        lambda: dist.all_to_all_single(x(4), x(4), [2, 2], [2, 1, 1]),
        ValueError,
        r"output_split_sizes must be 3 sizes.*sum.*4.*got \[2, 2\]",
    ),
    "all_to_all_single: wrong sum": (
        lambda: dist.all_to_all_single(x(4), x(4), [2, 1, 1], [2, 2, 2]),
        ValueError,
        r"input_split_sizes must be 3 sizes.*sum.*4.*got \[2, 2, 2\]",
    ),
    "all_to_all_single: negative split": (
        lambda: dist.all_to_all_single(x(4), x(4), [2, 1, 1], [5, -2, 1]),
        ValueError,
        r"input_split_sizes.*at least 0.*\[5, -2, 1\]",
    ),
    "all_to_all_single: one side does not divide": (
        lambda: dist.all_to_all_single(x(4), x(4), [2, 1, 1]),
        ValueError,
        "input.*4",
    ),
    "all_to_all_single: splits of floats": (
        lambda: dist.all_to_all_single(x(4), x(4), [2, 1.5, 0.5], [2, 1, 1]),
        TypeError,
        "output_split_sizes.*integer.*1.5",
    ),
    "all_to_all_single: a number as splits": (
        lambda: dist.all_to_all_single(x(4), x(4), 4, [2, 1, 1]),
        TypeError,
        "output_split_sizes.*4",
    ),
    # Dtypes.
    "all_gather: two dtypes": (
        lambda: dist.all_gather(many(4), x(dtype="int32")),
        TypeError,
        "tensor and tensor_list.*one dtype.*int32.*float32",
    ),
    "all_gather: list of two dtypes": (
        lambda: dist.all_gather([x(), x(), x(dtype="int32")], x()),
        TypeError,
        "one dtype.*float32.*int32",
    ),
    "all_gather_into_tensor: two dtypes": (
        lambda: dist.all_gather_into_tensor(x(12, dtype="int32"), x()),
        TypeError,
        "input_tensor and output_tensor.*one dtype.*float32.*int32",
    ),
    "reduce_scatter: two dtypes": (
        lambda: dist.reduce_scatter(x(dtype="int32"), many(4)),
        TypeError,
        "input_list and output.*one dtype.*float32.*int32",
    ),
    "reduce_scatter_tensor: two dtypes": (
        lambda: dist.reduce_scatter_tensor(x(dtype="int32"), x(12)),
        TypeError,
        "input and output.*one dtype.*float32.*int32",
    ),
    "all_to_all_single: two dtypes": (
        lambda: dist.all_to_all_single(x(3, dtype="int32"), x(3)),
        TypeError,
        "input and output.*one dtype.*float32.*int32",
    ),
    # Roots and peers.
    "broadcast: no source": (lambda: dist.broadcast(x()), ValueError, "pass src.*or group_src"),
    "broadcast: two sources": (lambda: dist.broadcast(x(), 0, group_src=0), ValueError, "src.*group_src.*both"),
    "broadcast: source outside": (lambda: dist.broadcast(x(), 7), ValueError, r"src.*\[0, 1, 2\].*got 7"),
    "broadcast: negative source": (lambda: dist.broadcast(x(), -1), ValueError, r"src.*\[0, 1, 2\].*got -1"),
    "broadcast: group source outside": (lambda: dist.broadcast(x(), group_src=3), ValueError, "src.*0 to 2.*got 3"),
    "broadcast: negative group source": (lambda: dist.broadcast(x(), group_src=-1), ValueError, "src.*0 to 2.*got -1"),
    "broadcast: text as source": (lambda: dist.broadcast(x(), "0"), TypeError, "src.*integer.*'0'"),
    "broadcast: fraction as source": (lambda: dist.broadcast(x(), 1.0), TypeError, "src.*integer.*1.0"),
    "broadcast: fraction as group source": (lambda: dist.broadcast(x(), group_src=1.0), TypeError, "src.*integer.*1.0"),
    "reduce: no destination": (lambda: dist.reduce(x()), ValueError, "pass dst.*or group_dst"),
    "reduce: two destinations": (lambda: dist.reduce(x(), 0, group_dst=0), ValueError, "dst.*group_dst.*both"),
    "reduce: destination outside": (lambda: dist.reduce(x(), 3), ValueError, r"dst.*\[0, 1, 2\].*got 3"),
    "send: to nobody": (lambda: dist.send(x()), ValueError, "pass dst.*or group_dst"),
    "send: to two": (lambda: dist.send(x(), 1, group_dst=1), ValueError, "dst.*group_dst.*both"),
    "send: to itself": (lambda: dist.send(x(), dist.get_rank()), ValueError, "dst is this rank.*posted no receive"),
    "send: to itself in the group": (
        lambda: dist.send(x(), group_dst=dist.get_rank()),
        ValueError,
        "dst is this rank.*posted no receive",
    ),
    "send: outside": (lambda: dist.send(x(), 3), ValueError, r"dst.*\[0, 1, 2\].*got 3"),
    "send: array as target": (
        lambda: dist.send(1, x()),
        TypeError,
        r"dst.*integer.*did you swap tensor and dst\?",
    ),
    "recv: array as source": (lambda: dist.recv(1, x()), TypeError, r"src.*integer.*did you swap tensor and src\?"),
    "recv: from itself": (lambda: dist.recv(x(), dist.get_rank()), ValueError, "src is this rank.*sent itself no"),
    "recv: outside": (lambda: dist.recv(x(), 3), ValueError, r"src.*\[0, 1, 2\].*got 3"),
    "send: negative tag": (lambda: dist.send(x(), other(), tag=-1), ValueError, "tag.*negative.*-1"),
    "recv: negative tag": (lambda: dist.recv(x(), other(), tag=-1), ValueError, "tag.*negative.*-1"),
    "send: text as tag": (lambda: dist.send(x(), other(), tag="a"), TypeError, "tag.*integer.*'a'"),
    "recv: fraction as tag": (lambda: dist.recv(x(), other(), tag=1.5), TypeError, "tag.*integer.*1.5"),
    # Ops.
    "all_reduce: no op": (lambda: dist.all_reduce(x(), None), TypeError, "op must be a ReduceOp.*None"),
    "all_reduce: list as op": (lambda: dist.all_reduce(x(), ["sum"]), TypeError, "op must be a ReduceOp.*list"),
    "all_reduce: array as op": (lambda: dist.all_reduce(x(), x()), TypeError, "op must be a ReduceOp.*ndarray"),
    "reduce: unknown op": (lambda: dist.reduce(x(), 0, "mean"), ValueError, "'mean'.*choose from sum.*avg"),
    "reduce: no op": (lambda: dist.reduce(x(), 0, None), TypeError, "op must be a ReduceOp.*None"),
    "reduce_scatter: unknown op": (
        lambda: dist.reduce_scatter(x(), many(4), "+"),
        ValueError,
        r"'\+'.*choose from sum",
    ),
    "reduce_scatter: no op": (
        lambda: dist.reduce_scatter(x(), many(4), None),
        TypeError,
        "op must be a ReduceOp.*None",
    ),
    "reduce_scatter_tensor: no op": (
        lambda: dist.reduce_scatter_tensor(x(), x(12), None),
        TypeError,
        "op must be a ReduceOp.*None",
    ),
    "all_reduce: op not for complex": (
        lambda: dist.all_reduce(x(dtype="complex64"), "max"),
        TypeError,
        "MAX.*not defined for complex64",
    ),
    "all_reduce: mean of integers": (
        lambda: dist.all_reduce(x(dtype="int32"), "avg"),
        TypeError,
        "AVG.*not defined for int32",
    ),
    "all_reduce: bits of floats": (lambda: dist.all_reduce(x(), "bxor"), TypeError, "BXOR.*not defined for float32"),
}
