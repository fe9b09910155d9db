"""Sizes as users write them, the rows of the table, and the values that are compared."""

import numpy as np
import pytest

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.backends.base import Choice
from meshdist.bench.figure import draw
from meshdist.bench.measuring import Row
from meshdist.bench.results import head, legend, line, lines_of_ways, parse_size, series, show_size
from meshdist.bench.values import Part, Values
from meshdist.system.digits import three_digits


def test_sizes():
    assert [parse_size(text) for text in ("64K", "1GiB", "8 B")] == [65536, 1073741824, 8]
    assert series(8, 100, 2) == [8, 16, 32, 64, 100]
    assert [show_size(size) for size in (65536, 1536, 12)] == ["64 KiB", "1536 B", "12 B"]


def test_row_of_the_table():
    row = Row("all_reduce", 4096, 1024, 100, 3.141, 2.5, 9.0, 12.0, 1.304, 1.304, 0)
    assert line(row).split() == ["4", "KiB", "1024", "100", "3.14", "2.50", "9.00", "1.30", "1.30", "0"]


@pytest.mark.parametrize("num_bytes", [8, (64 << 20) - 4, 1 << 30])
def test_row_of_the_table_for_a_terminal_of_80_columns(num_bytes):
    row = Row("all_reduce", num_bytes, num_bytes // 4, 19968, 98765.4, 87654.3, 123456.7, 123456.7, 12.34, 123.45, 0)
    cells = [*show_size(num_bytes).split(), str(num_bytes // 4), "19968", "98765", "87654", "123457", "12.34", "123.45"]
    assert line(row, 80).split() == line(row).split() == [*cells, "0"]
    assert (len(line(row, 80)), len(line(row, 105)), len(line(row, 106)), len(line(row))) == (80, 80, 106, 106)
    assert [len(text) for text in head("all_reduce", 80).splitlines()] == [10, 80, 80]


def test_the_legend_is_folded_where_it_is_wider_than_the_terminal():
    assert legend(0) == legend(120)
    assert max(map(len, legend(80).splitlines())) <= 80
    assert legend(80).split() == legend(0).split()


def drawn(monkeypatch, tmp_path, names, most_us=40.0, sizes=(8, 32, 128)):
    """Return the figure of a measurement of these operations, whose times are 10 us to `most_us`."""
    figure = pytest.importorskip("matplotlib.figure", reason="pictures need matplotlib")
    saved = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: saved.append(self))
    rows = [Row(name, size, size // 4, 100, 10.0, 9.0, most_us, 1e7, 1.0, 1.0, 0) for name in names for size in sizes]
    draw(tmp_path / "plot.png", rows, "a test")
    return saved[0]


@pytest.mark.parametrize("most_us", [15.0, 40.0, 900.0, 1e6])
def test_a_plot_has_the_curves_of_the_table_and_ticks_to_read_them(monkeypatch, tmp_path, most_us):
    axes = drawn(monkeypatch, tmp_path, ["all_reduce"], most_us).axes[0]
    _, tail = axes.get_lines()
    assert (tail.get_linestyle(), list(tail.get_ydata())) == ("--", [most_us] * 3)
    lowest, highest = axes.get_ylim()
    assert 3 <= len([tick for tick in axes.get_yticks() if lowest <= tick <= highest]) <= 10


def test_a_plot_has_no_label_close_to_that_of_the_largest_size(monkeypatch, tmp_path):
    powers = [8 << number for number in range(30)]  # up to 4 GiB
    axes = drawn(monkeypatch, tmp_path, ["all_reduce"], sizes=powers).axes[1]
    assert sorted(axes.get_xticks()) == powers[1::2]
    assert axes.get_xticks(minor=True).tolist() == powers[::2]


def test_every_size_of_a_short_plot_has_a_label_but_one_next_to_the_last(monkeypatch, tmp_path):
    sizes = [8 * 4**number for number in range(12)]  # up to 32 MiB
    axes = drawn(monkeypatch, tmp_path, ["all_reduce"], sizes=[*sizes, 64 << 20]).axes[1]
    assert sorted(axes.get_xticks()) == [*sizes[:-1], 64 << 20]
    axes = drawn(monkeypatch, tmp_path, ["all_reduce"], sizes=sizes).axes[1]
    assert sorted(axes.get_xticks()) == sizes


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_plot_has_time_and_bandwidth_of_each_operation_on_equal_scales(monkeypatch, tmp_path, count):
    figure = drawn(monkeypatch, tmp_path, [f"call{number}" for number in range(count)])
    latencies, bandwidths = figure.axes[::2], figure.axes[1::2]
    assert [axes.get_title() for axes in latencies] == [f"call{number}" for number in range(count)]
    assert [len(axes.get_lines()) for axes in figure.axes] == [2, 1] * count
    for alike in (latencies, bandwidths):
        assert len({axes.get_ylim() for axes in alike}) == 1


def test_the_legend_of_a_plot_hides_no_line(monkeypatch, tmp_path):
    figure = drawn(monkeypatch, tmp_path, ["all_reduce", "broadcast"])
    assert not any(axes.get_legend() for axes in figure.axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["median", "90th percentile"]
    figure.draw_without_rendering()
    top = figure.legends[0].get_window_extent().y1
    assert all(axes.get_window_extent().y0 > top for axes in figure.axes)


def test_wrong_elements_are_counted():
    values = Values(np.dtype(np.int8), 2, ReduceOp.SUM)
    assert values.of(1, 0, 3, salt=0).tolist() == [8, 9, 10]
    assert values.wrong(np.array([9, 11, 0], np.int8), [Part(0, (0, 1), 0, 3)], salt=0) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(2.0, "2.00"), (1.849, "1.85"), (0.601, "0.601"), (600.2, "600"), (999.7, "1000"), (0.0, "0.00")],
)
def test_numbers_of_tables_have_three_digits(number, text):
    assert three_digits(number) == text


def test_a_default_that_is_kept_although_another_algorithm_is_faster_says_why():
    ways = ("one step", "chunks of 1 MiB")
    choice = Choice("all_reduce sum float32", 1 << 20, ways, 0, dict(zip(ways, (601e-6, 539e-6), strict=True)), 1.25)
    faster, kept = lines_of_ways(choice)
    assert faster.split() == ["1", "MiB", "539", "chunks", "of", "1", "MiB"]
    assert kept.strip() == "601  one step (chosen, default: at most 25% longer than the fastest)"
