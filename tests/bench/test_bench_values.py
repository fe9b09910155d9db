"""Sizes as users write them, the rows of the table, and the values that are compared."""

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.bench.measuring import Row
from meshdist.bench.results import line, parse_size, series, show_size
from meshdist.bench.values import Part, Values


def test_sizes():
    assert [parse_size(text) for text in ("64K", "1GiB", "8 B")] == [65536, 1073741824, 8]
    assert series(8, 100, 2) == [8, 16, 32, 64, 100]
    assert [show_size(size) for size in (65536, 1536, 12)] == ["64 KiB", "1536 B", "12 B"]


def test_row_of_the_table():
    row = Row("all_reduce", 4096, 1024, 100, 3.141, 2.5, 9.0, 12.0, 1.304, 1.304, 0)
    assert line(row).split() == ["4", "KiB", "1024", "100", "3.14", "2.50", "12.0", "1.30", "1.30", "0"]


def test_wrong_elements_are_counted():
    values = Values(np.dtype(np.int8), 2, ReduceOp.SUM)
    assert values.of(1, 0, 3, salt=0).tolist() == [8, 9, 10]
    assert values.wrong(np.array([9, 11, 0], np.int8), [Part(0, (0, 1), 0, 3)], salt=0) == 1
