"""DTensor.show: what a reader sees of an array's blocks as text, as HTML and in a plot."""

import math
import re
import sys
import types

import pytest
from figures import axes_of_figures, unreadable

import meshdist
from meshdist.tensor import DTensor, Partial, Replicate, Shard, zeros

pytestmark = pytest.mark.timeout(60)


def array(mesh_shape, rank, shape, placements):
    """Return an array as `rank` sees it, of a mesh that nobody else is in."""
    names = ("dp", "tp", "pp")[: len(mesh_shape)]
    mesh = meshdist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    cut = {name: Replicate() if isinstance(p, Partial) else p for name, p in placements.items()}
    block = zeros(shape, mesh=mesh, placements=cut).to_local()
    return DTensor.from_local(block, mesh, placements, shape=shape)


def drawn(capsys, mesh_shape, rank, shape, placements):
    with meshdist.dry_run(world_size=math.prod(mesh_shape), rank=rank):
        array(mesh_shape, rank, shape, placements).show("text")
    return capsys.readouterr().out.splitlines()


# The lines below the title, by the shape of the mesh, the calling rank, the shape of the array, and the placements.
TEXTS = [
    ((2, 2), 2, (6, 8), {"dp": Shard(0), "tp": Shard(1)}, ["     0:4 4:8", " 0:3  0   1", " 3:6 [2]  3"]),
    (
        (2, 2),
        3,
        (6, 8),
        {"dp": Shard(1)},
        ["       0:4   4:8", " 0:6  0 1  [2 3]", "", "replicated: the 2 ranks along tp hold the same block"],
    ),
    (
        (2, 2),
        0,
        (5, 2),
        {"dp": Shard(0), "tp": Partial()},
        [
            "       0:2",
            " 0:3 [0+1]",
            " 3:5  2+3",
            "",
            "pending sum: the array is the sum of what the 2 ranks along tp hold",
        ],
    ),
    (
        (2, 2),
        0,
        (2,),
        {"tp": Partial("max")},
        [
            "                      0:2",
            "  [max(0 1), …, max(2 3)]",
            "",
            "replicated: the 2 ranks along dp hold the same block",
            "pending max: the array is the maximum of what the 2 ranks along tp hold",
        ],
    ),
    (
        (1, 3),
        2,
        (),
        {},
        [
            "  [0 1 2]",
            "",
            *[f"replicated: the {n} ranks along {a} hold the same block" for n, a in [(1, "dp"), (3, "tp")]],
        ],
    ),
    (
        (2, 3),
        2,
        (11,),
        {"dp": Shard(0), "tp": Shard(0, sizes=((5, 0, 1), (2, 3, 0)))},
        ["    0:5   5:5   5:6   6:8  8:11 11:11", "     0     1    [2]    3     4     5"],
    ),
    (
        (2, 2, 2),
        5,
        (4, 5, 6, 7),
        {"dp": Shard(0), "tp": Shard(1), "pp": Shard(3)},
        [
            "[0:2, :, :, :]",
            "     0:4 4:7",
            " 0:3  0   1",
            " 3:5  2   3",
            "",
            "[2:4, :, :, :]",
            "     0:4 4:7",
            " 0:3  4  [5]",
            " 3:5  6   7",
            "",
            "down: dimension 1; across: dimension 3",
        ],
    ),
    ((1,), 0, (0, 4), {"dp": Shard(1)}, ["     0:4", " 0:0 [0]", "", "the array has no elements"]),
]


@pytest.mark.parametrize(("mesh_shape", "rank", "shape", "placements", "below"), TEXTS)
def test_text_shows_the_ranks_of_every_block(capsys, mesh_shape, rank, shape, placements, below):
    first, second, empty, *lines = drawn(capsys, mesh_shape, rank, shape, placements)
    assert first.startswith(f"float64 {shape} as {{'dp': ")
    assert f"rank {rank} holds [" in second
    assert empty == ""
    assert lines == below


def test_every_rank_holds_what_is_drawn_as_its_own():
    def program():
        mesh = meshdist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = zeros((5, 7), mesh=mesh, placements={"dp": Shard(1), "tp": Shard(0)})
        return x.index, x.show("html")

    for rank, ((rows, columns), html) in enumerate(meshdist.run(program, 4)):
        lines = re.findall(r"<tr>(.*?)</tr>", html)
        heads = re.findall(r"<th[^>]*>(.*?)</th>", lines[0])[1:]
        for line in lines[1:]:
            head = re.search(r"<th[^>]*>(.*?)</th>", line)[1]
            cells = re.findall(r'<td style="(.*?)">(.*?)</td>', line)
            for label, (style, ranks) in zip(heads, cells, strict=True):
                here = (head, label) == (f"{rows.start}:{rows.stop}", f"{columns.start}:{columns.stop}")
                assert (ranks == str(rank)) == ("outline:3px" in style) == here


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "placements"),
    [
        ((64, 64), (10**6, 5000), {"dp": Shard(0), "tp": Shard(1)}),
        ((64, 64), (10**6, 5000), {"dp": Shard(1), "tp": Partial()}),
        ((4096,), (10**9,), {"dp": Shard(0)}),
        ((4096,), (10**9, 3), {"dp": Shard(0)}),
        ((4096,), (3,), {"dp": Partial("avg")}),
        ((4096,), (), {}),
    ],
)
def test_4096_ranks_stay_on_one_screen(capsys, mesh_shape, shape, placements):
    lines = drawn(capsys, mesh_shape, 2000, shape, placements)
    assert len(lines) < 30
    assert max(map(len, lines)) <= 120
    assert any("[2000]" in line or "…" in line for line in lines)
    with meshdist.dry_run(world_size=4096, rank=2000):
        assert len(array(mesh_shape, 2000, shape, placements)._repr_html_()) < 40_000


def test_plot_draws_into_the_given_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    with meshdist.dry_run(world_size=4, rank=2):
        x = array((2, 2), 2, (10, 6), {"dp": Shard(0, sizes=(9, 1)), "tp": Shard(1)})
        figure, ax = pyplot.subplots()
        assert x.show("plot", ax=ax) is ax
        made = x.show("matplotlib")
    assert {text.get_text() for text in ax.texts} == {*"0123", "0:9", "9:10", "0:3", "3:6"}
    assert ax.get_title().replace("\n", " ").startswith("float64 (10, 6) as ")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["rank 2 holds [9:10, 0:3]"]
    assert ax.get_legend().get_title().get_text() == "numbers: ranks of mesh (dp=2, tp=2)"
    outlines = [patch for patch in ax.patches if patch.get_facecolor()[3] == 0]
    assert outlines[0].get_height() > 2 * outlines[2].get_height()
    assert [patch.get_linewidth() > 2 for patch in outlines] == [False, False, True, False]
    figure.canvas.draw()
    pyplot.close(figure)
    pyplot.close(made.figure)


def test_an_array_without_rows_is_drawn_as_one(capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    sides = []
    with meshdist.dry_run(world_size=4, rank=0):
        for shape in ((4, 3), (0, 3), (4, 0)):
            x = array((2, 2), 0, shape, {})
            ax = x.show("plot")
            sides.append((ax.patches[0].get_width(), ax.patches[0].get_height()))
            pyplot.close(ax.figure)
            x.show("text")
            says_so = "the array has no elements" in capsys.readouterr().out
            assert says_so == ("the array has no elements" in x.show("html")) == (x.size == 0)
    whole, without_rows, without_columns = sides
    assert without_rows[0] == whole[0]
    assert without_columns[1] == whole[1]
    assert without_rows[1] < whole[1] / 2
    assert without_columns[0] < whole[0] / 2


# Meshes, shapes of arrays and placements: tall, wide, of one dimension and of none, of many ranks, in several slices.
PLOTTED = [
    ((2, 2, 2), (5, 7), {"dp": Shard(0), "tp": Shard(0)}),
    ((4, 2), (512, 16), {"dp": Shard(0)}),
    ((32,), (10**6, 4), {"dp": Shard(0)}),
    ((32,), (4, 10**6), {"dp": Shard(1)}),
    ((2, 2, 2), (4, 6), {"dp": Shard(0), "tp": Partial()}),
    ((8,), (1000,), {"dp": Shard(0)}),
    ((1,), (1, 1), {"dp": Shard(0)}),
    ((2, 2), (), {}),
    ((2, 2), (0, 3), {}),
    ((2, 2), (3, 0), {"dp": Shard(0)}),
    ((64, 64), (10**6, 5000), {"dp": Shard(1), "tp": Partial()}),
    pytest.param((64, 64), (10**6, 5000), {"dp": Shard(0), "tp": Shard(1)}, marks=pytest.mark.slow),
    ((2, 2, 2), (6, 4, 8), {"dp": Shard(0), "tp": Shard(1), "pp": Shard(2)}),
    pytest.param((8, 4, 4), (64, 16, 16), {"dp": Shard(0), "tp": Shard(1), "pp": Shard(2)}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), PLOTTED)
def test_all_texts_of_a_plot_can_be_read(mesh_shape, shape, placements):
    with meshdist.dry_run(world_size=math.prod(mesh_shape), rank=0):
        x = array(mesh_shape, 0, shape, placements)
        for places in axes_of_figures():
            shown = [x.show("plot", ax=ax) for ax in places]
            assert unreadable(shown[0].figure.canvas.figure) == []


def ranks_drawn(form, mesh_shape, shape, placements):
    with meshdist.dry_run(world_size=math.prod(mesh_shape), rank=0):
        x = array(mesh_shape, 0, shape, placements)
        if form == "html":
            return re.findall(r"<td[^>]*>(\d+)</td>", x.show("html"))
        pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
        pyplot.switch_backend("agg")
        ax = x.show("plot")
        pyplot.close(ax.figure)
    return [text.get_text() for text in ax.texts if text.get_text().isdecimal()]


@pytest.mark.parametrize("form", ["html", "plot"])
def test_every_rank_is_in_one_of_the_slices(form):
    three, four = (6, 4, 8), (4, 4, 4, 4)
    cut = {"dp": Shard(0), "tp": Shard(1), "pp": Shard(2)}
    assert sorted(map(int, ranks_drawn(form, (2, 2, 2), three, cut))) == [*range(8)]
    assert sorted(map(int, ranks_drawn(form, (4, 2, 2), three, cut))) == [*range(16)]
    assert sorted(map(int, ranks_drawn(form, (4, 2), four, {"dp": Shard(3), "tp": Shard(0)}))) == [*range(8)]
    nested = {"dp": Shard(0), "tp": Shard(0), "pp": Shard(1)}
    assert sorted(map(int, ranks_drawn(form, (2, 2, 2), four, nested))) == [*range(8)]


def test_slices_that_are_left_out_are_counted(capsys):
    cut = {"dp": Shard(0), "tp": Shard(1), "pp": Shard(2)}
    lines = drawn(capsys, (16, 16, 16), 2000, (64, 64, 64), cut)
    assert len(lines) < 30
    assert any("[2000]" in line for line in lines)
    assert lines[-1] == "80 of 4096 blocks are shown, in 2 of 16 slices"


def test_the_title_of_a_plot_breaks_between_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    with meshdist.dry_run(world_size=4, rank=0):
        figure, ax = pyplot.subplots(figsize=(2.4, 2))
        array((2, 2), 0, (10, 6), {"dp": Shard(0, sizes=(9, 1)), "tp": Partial()}).show("plot", ax=ax)
    shape, *axes = ax.get_title().split("\n")
    assert shape == "float64 (10, 6) as"
    assert axes == ["{'dp': Shard(0, sizes=(9, 1)),", "'tp': Partial('sum')}"]
    pyplot.close(figure)


def test_plot_without_matplotlib_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with meshdist.dry_run(world_size=1, rank=0):
        x = array((1,), 0, (3,), {})
        with pytest.raises(ImportError, match=r"needs matplotlib; pip install .*form='text'"):
            x.show("plot")


def test_in_a_notebook_html_is_displayed(monkeypatch, capsys):
    displayed = []
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=None)
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.HTML = lambda html: html
    ipython.display.display = displayed.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    with meshdist.dry_run(world_size=2, rank=1):
        x = array((2,), 1, (3,), {"dp": Shard(0)})
        x.show()
        assert displayed == [x._repr_html_()]
    assert capsys.readouterr().out == ""


def test_bad_arguments_are_refused():
    with meshdist.dry_run(world_size=1, rank=0):
        x = array((1,), 0, (3,), {})
        with pytest.raises(ValueError, match="form must be one of 'text', 'html', 'plot' or None, got 'svg'"):
            x.show("svg")
        with pytest.raises(ValueError, match="ax needs form='plot'; pass both"):
            x.show("text", ax=object())


def colours_of(placements):
    """Return the colours of each block, of an array over a mesh of 2 x 2 ranks."""
    with meshdist.dry_run(world_size=4, rank=0):
        html = array((2, 2), 0, (4, 4), placements).show("html")
    return [re.findall(r"#\w{6}", cell) for cell in re.findall(r"background:(.*?);color", html)]


def test_a_block_has_the_colours_of_all_ranks_that_hold_it():
    zero, one, two, three = (colour for (colour,) in colours_of({"dp": Shard(0), "tp": Shard(1)}))
    assert len({zero, one, two, three}) == 4

    def banded(placements):
        """Return the colours of the band of each block."""
        blocks = [dict.fromkeys(block) for block in colours_of(placements)]
        return [[colour for colour in block if colour in (zero, one, two, three)] for block in blocks]

    assert banded({"dp": Shard(0)}) == [[zero, one], [two, three]]
    assert banded({"tp": Shard(0)}) == [[zero, two], [one, three]]
    assert banded({"dp": Shard(0), "tp": Partial()}) == [[zero, one], [two, three]]
    assert banded({}) == [[zero, one, two, three]]


def test_bands_in_a_plot_are_below_the_numbers():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    with meshdist.dry_run(world_size=4, rank=0):
        ax = array((2, 2), 0, (4, 4), {"dp": Shard(0)}).show("plot")
    numbers = [text for text in ax.texts if text.get_text() == "0 1"]
    ax.figure.canvas.draw()
    number = numbers[0].get_window_extent()
    coloured = [patch for patch in ax.patches if len(set(patch.get_facecolor()[:3])) > 1 and patch.get_facecolor()[3]]
    assert len(coloured) == 4
    assert not any(patch.get_window_extent().overlaps(number) for patch in coloured)
    pyplot.close(ax.figure)


def test_the_bands_of_a_row_have_one_height_and_place():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    with meshdist.dry_run(world_size=8, rank=0):
        ax = array((2, 2, 2), 0, (8, 6), {"tp": Shard(0), "pp": Shard(1)}).show("plot")
    bands = [patch for patch in ax.patches if len(set(patch.get_facecolor()[:3])) > 1 and patch.get_facecolor()[3]]
    places = {(round(band.get_y(), 6), round(band.get_height(), 6)) for band in bands}
    assert (len(bands), len(places)) == (8, 2)  # of two rows
    pyplot.close(ax.figure)


def test_a_note_below_a_plot_is_not_wrapped_for_one_word():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    with meshdist.dry_run(world_size=8, rank=0):
        ax = array((2, 2, 2), 0, (8, 6), {"tp": Shard(0), "pp": Shard(1)}).show("plot")
    assert ax.get_legend().get_title().get_text().split("\n") == [
        "numbers: ranks of mesh (dp=2, tp=2, pp=2)",
        "replicated: the 2 ranks along dp hold the same block",
    ]
    assert unreadable(ax.figure) == []
    pyplot.close(ax.figure)


def test_a_block_of_many_ranks_is_hatched():
    with meshdist.dry_run(world_size=8, rank=0):
        html = array((8,), 0, (4,), {}).show("html")
    assert "repeating-linear-gradient" in html


def test_a_worker_of_a_notebook_marks_no_rank_in_any_form(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    monkeypatch.setattr("meshdist.mesh.show.marks_me", False)
    forms = []
    for rank in (0, 3):
        with meshdist.dry_run(world_size=8, rank=rank):
            x = array((2, 2, 2), rank, (4, 5, 6, 7), {"dp": Shard(0), "tp": Shard(1), "pp": Shard(3)})
            ax = x.show("plot")
            words = [text.get_text() for text in (ax.title, ax.get_legend().get_title(), *ax.texts)]
            forms.append((words, [patch.get_linewidth() for patch in ax.patches], x.show("html")))
            pyplot.close(ax.figure)
    assert forms[0] == forms[1]
    assert not any("rank 0" in word or "this rank" in word for word in forms[0][0])
