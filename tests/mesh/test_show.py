"""mesh.show: what a reader sees of a mesh as text, as HTML and in a plot."""

import math
import re
import sys
import types
from html.parser import HTMLParser

import numpy as np
import pytest
from figures import axes_of_figures, texts_of, unreadable

import meshdist
from meshdist.mesh.layout.layout import Layout
from meshdist.mesh.show import show

pytestmark = pytest.mark.timeout(60)


class TwoHosts:
    """As much of a world as a drawing asks for: the calling rank, and ranks that came to two hosts in turn."""

    def __init__(self, rank):
        self.rank = rank

    def host_names(self):
        return ("ada", "<bob>") * 32

    def hosts(self, ranks):
        return [f"id of host {rank % 2}" for rank in ranks]


class Cells(HTMLParser):
    """The cells of all tables: what stands in each, its title and its style."""

    def __init__(self, html):
        super().__init__()
        self.cells = []
        self._attributes = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._attributes = dict(attrs) if tag == "td" else None

    def handle_data(self, data):
        if self._attributes is not None:
            self.cells.append((data, self._attributes["title"], self._attributes["style"]))


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    """Have text for a terminal of so many characters, 0 for none; a function sets another number."""

    def set_width(width):
        monkeypatch.setattr("meshdist.mesh.show.terminal_width", lambda: width)

    set_width(0)
    return set_width


def shown(capsys, *args):
    show(*args)
    return capsys.readouterr().out


UNSORTED = Layout([[3, 0, 5], [1, 4, 2]], ("dp", "tp"))


def test_text_shows_ranks_hosts_and_the_calling_rank(capsys):
    assert shown(capsys, UNSORTED, TwoHosts(4), None, None, None).splitlines() == [
        "mesh (dp=2, tp=3), rank 4 at (dp=1, tp=1)",
        "",
        "      tp=0 tp=1 tp=2",
        " dp=0  3b   0a   5b",
        " dp=1  1b  [4a]  2a",
        "",
        "hosts (ranks): a ada (3), b <bob> (3)",
    ]


def test_text_shows_the_groups_of_an_axis(capsys):
    lines = shown(capsys, UNSORTED, TwoHosts(4), "text", "dp", None).splitlines()
    assert lines[3:] == [
        " dp=0  3b  (0a)  5b",
        " dp=1  1b  [4a]  2a",
        "",
        "3 groups along dp; this rank's group is highlighted",
        "hosts (ranks): a ada (3), b <bob> (3)",
    ]
    by_index = shown(capsys, UNSORTED, TwoHosts(4), "text", 0, None).splitlines()
    assert by_index == lines


def test_text_of_a_rank_outside_marks_nothing(capsys):
    text = shown(capsys, UNSORTED, TwoHosts(9), "text", "tp", None)
    assert text.startswith("mesh (dp=2, tp=3), rank 9 is outside\n")
    assert "2 groups along tp\n" in text
    assert "[" not in text


def test_more_axes_are_panels_and_axes_without_names_have_numbers(capsys):
    layout = Layout(np.arange(8).reshape(2, 2, 2))
    assert shown(capsys, layout, None, "text", None, None).splitlines() == [
        "mesh (2, 2, 2)",
        "",
        "0   0  1",
        " 0 0  1",
        " 1 2  3",
        "",
        "1   0  1",
        " 0 4  5",
        " 1 6  7",
    ]


def test_a_large_mesh_is_cut_and_says_so(capsys):
    layout = Layout(np.arange(4096).reshape(32, 128), ("dp", "tp"))
    text = shown(capsys, layout, None, "text", None, None)
    assert "112 of 4096 ranks are shown" in text


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (32, 16, 8), (8, 8, 8, 8), (16, 16, 16)])
def test_4096_ranks_fit_on_one_screen(capsys, shape):
    text = show_in_a_dry_run(4096, 2077, 8, shape, "text", capsys)
    assert " of 4096 ranks are shown" in text
    assert "[2077" in text
    assert len(text.splitlines()) <= 23
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("shape", [(16,), (300,), (4096,), (16, 16), (64, 64), (8, 8, 64)])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_text_fits_the_width_of_the_terminal(capsys, terminal, shape, width):
    terminal(width)
    size = math.prod(shape)
    text = show_in_a_dry_run(size, size // 2, 8, shape, "text", capsys)
    assert f"[{size // 2}" in text
    assert max(map(len, text.splitlines())) <= width
    num_shown = len(re.findall(r"\d[a-z]*[ \]]", text))
    assert (" ranks are shown" in text) == (size > 256)
    if size == 4096:
        assert len(text.splitlines()) <= 24
        assert num_shown > 40
    terminal(2 * width)
    wider = show_in_a_dry_run(size, size // 2, 8, shape, "text", capsys)
    assert len(re.findall(r"\d[a-z]*[ \]]", wider)) >= num_shown


def test_long_names_of_axes_fit_the_width_of_the_terminal(capsys, terminal):
    terminal(80)
    layout = Layout([[0, 1], [2, 3]], ("data_parallel", "tensor_parallel"))
    title, *folded, blank = shown(capsys, layout, TwoHosts(3), None, None, None).splitlines()[:3]
    assert title == "mesh (data_parallel=2, tensor_parallel=2), rank 3 at (data_parallel=1,"
    assert (folded, blank) == (["  tensor_parallel=1)"], "")


def test_html_has_every_rank_with_its_host_and_group():
    cells = Cells(show(UNSORTED, TwoHosts(4), "html", "dp", None)).cells
    assert [text for text, _, _ in cells] == ["3", "0", "5", "1", "4", "2"]
    assert cells[0][1] == "rank 3, on <bob>, group 0 along dp"
    framed = [text for text, _, style in cells if "outline:3px" in style]
    assert framed == ["0", "4"]
    colours = [style.split(";")[0] for _, _, style in cells]
    assert colours[:3] == colours[3:]
    assert len(set(colours)) == 3


def test_a_frame_in_html_moves_no_cell():
    styles = {style for *_, style in Cells(show(UNSORTED, TwoHosts(4), "html", "dp", None)).cells}
    boxes = {";".join(part for part in style.split(";") if part.startswith(("border", "padding"))) for style in styles}
    assert len(boxes) == 1


def test_html_colours_hosts_and_names_them_safely():
    html = show(UNSORTED, TwoHosts(4), "html", None, None)
    assert "&lt;bob&gt; (3 ranks)" in html
    assert "<bob>" not in html
    colours = {text: style.split(";")[0] for text, _, style in Cells(html).cells}
    assert colours["0"] == colours["2"] == colours["4"] != colours["1"]


def test_cells_on_one_host_have_no_colour():
    one = types.SimpleNamespace(rank=1, host_names=lambda: ("ada",) * 6, hosts=lambda ranks: ["ada"] * len(ranks))
    html = show(UNSORTED, one, "html", None, None)
    assert {style.split(";")[0] for _, _, style in Cells(html).cells} == {"background:#e4e4e4"}
    assert "all ranks on ada" in html
    coloured = show(UNSORTED, one, "html", "dp", None)
    assert len({style.split(";")[0] for _, _, style in Cells(coloured).cells}) == 3


def test_plot_draws_into_the_given_axes():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    figure, ax = pyplot.subplots()
    assert show(UNSORTED, TwoHosts(4), "plot", None, ax) is ax
    assert {text.get_text() for text in ax.texts} == {*"012345", "dp=0", "dp=1", "tp=0", "tp=1", "tp=2"}
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["ada (3 ranks)", "<bob> (3 ranks)", "rank 4 at (dp=1, tp=1)"]
    assert ax.get_title() == "mesh (dp=2, tp=3)"
    figure.canvas.draw()
    pyplot.close(figure)
    made = show(Layout(np.arange(8).reshape(2, 2, 2)), TwoHosts(0), "plot", 0, None)
    assert [text.get_text() for text in made.get_legend().get_texts()] == ["rank 0 at (0, 0, 0) and its group"]
    assert made.get_title() == "mesh (2, 2, 2): 4 groups along axis 0"
    pyplot.close(made.figure)


def test_the_words_around_a_plot_are_no_wider_than_its_cells():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    names = ("data_parallel", "tensor_parallel")
    ax = show(Layout(np.arange(16).reshape(4, 4), names), TwoHosts(5), "plot", "data_parallel", None)
    ax.figure.canvas.draw()
    squares = [patch.get_window_extent() for patch in ax.patches]
    left, right = min(box.x0 for box in squares), max(box.x1 for box in squares)
    for part in (ax.title, ax.get_legend()):
        box = part.get_window_extent()
        assert (box.x0 + box.x1) / 2 == pytest.approx((left + right) / 2, abs=2)
        assert box.width <= 1.02 * (right - left)
    pyplot.close(ax.figure)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2, 2), ("dp", "pp", "tp")),
        ((3, 2, 2, 2), ("a", "b", "c", "d")),
        ((4, 4), ("data_parallel", "tensor_parallel")),
        ((64,), ("dp",)),
        pytest.param((4, 4, 8), None, marks=pytest.mark.slow),
    ],
)
def test_all_texts_of_a_plot_can_be_read(shape, names):
    mesh = Layout(np.arange(np.prod(shape)).reshape(shape), names)
    for places in axes_of_figures():
        shown = [show(mesh, TwoHosts(5), "plot", None, ax) for ax in places]
        assert unreadable(shown[0].figure.canvas.figure) == []


def test_there_is_more_space_between_the_grids_of_a_plot_than_inside_them():
    for places in axes_of_figures():
        for ax in places:
            made = show(Layout(np.arange(8).reshape(2, 2, 2), ("dp", "pp", "tp")), None, "plot", None, ax)
        figure = made.figure.canvas.figure
        # Of equal labels, that of the first grid.
        box_of = {text.get_text(): box for text, box in reversed(texts_of(figure)) if text.axes is made}
        cells = [patch.get_window_extent() for patch in made.patches]
        if cells[4].x0 > cells[1].x1:  # side by side
            between = box_of["dp=1"].x0 - max(box_of["tp=1"].x1, cells[1].x1)
        else:
            between = cells[2].y0 - box_of["dp=1"].y1
        assert between > cells[1].x0 - cells[0].x1


def test_a_worker_of_a_notebook_marks_no_rank_in_any_form(monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    monkeypatch.setattr("meshdist.mesh.show.marks_me", False)
    forms = []
    for rank in (0, 4):
        ax = show(UNSORTED, TwoHosts(rank), "plot", None, None)
        words = [text.get_text() for text in (ax.title, *ax.texts, *ax.get_legend().get_texts())]
        frames = [patch.get_linewidth() for patch in ax.patches]
        pyplot.close(ax.figure)
        html, text = (
            show(UNSORTED, TwoHosts(rank), "html", "tp", None),
            shown(capsys, UNSORTED, TwoHosts(rank), "text", "tp", None),
        )
        forms.append((words, frames, html, text))
    assert forms[0] == forms[1]
    assert "this rank" not in forms[0][3]


def test_plot_without_matplotlib_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib; pip install .*form='text'"):
        show(UNSORTED, None, "plot", None, None)


def test_in_a_notebook_html_is_displayed(monkeypatch, capsys):
    displayed = []
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    display.HTML, display.display = str, displayed.append
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert shown(capsys, UNSORTED, TwoHosts(4), None, None, None) == ""
    assert len(Cells(displayed[0]).cells) == 6


def test_wrong_arguments():
    with pytest.raises(ValueError, match="form must be one of 'text', 'html', 'plot' or None, got 'svg'"):
        show(UNSORTED, None, "svg", None, None)
    with pytest.raises(ValueError, match="ax needs form='plot'"):
        show(UNSORTED, None, "text", None, object())
    with pytest.raises(KeyError, match="unknown axis 'pp'.*'dp', 'tp'"):
        show(UNSORTED, None, "text", "pp", None)


def outside_of_a_slice():
    mesh = meshdist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = mesh.show("html")
    mesh = meshdist.DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    if meshdist.get_rank() < 2:
        return whole, mesh["tp"].show("html")
    with pytest.raises(ValueError, match="a slice exists only on ranks of the mesh"):
        mesh["tp"].show("html")
    return whole, None


def test_meshes_and_slices_of_a_real_world():
    (whole, own), (_, other), (outside, _) = meshdist.run(outside_of_a_slice, 3)
    assert [text for text, _, _ in Cells(whole).cells] == ["0", "1"]
    assert [text for text, _, _ in Cells(own).cells] == ["0"]
    assert [text for text, _, _ in Cells(other).cells] == ["1"]
    assert "rank 2 is outside" in outside


# ---- Large meshes


def show_in_a_dry_run(size, rank, per_host, shape, form, capsys=None):
    with meshdist.dry_run(size, rank, ranks_per_host=per_host):
        mesh = meshdist.init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "pp", "dp", "tp")[-len(shape) :])
        found = mesh.show(form)
    return capsys.readouterr().out if form == "text" else found


def test_a_large_mesh_is_shown_around_the_calling_rank(capsys):
    text = show_in_a_dry_run(65536, 5000, 64, (256, 256), "text", capsys)
    lines = text.splitlines()
    assert lines[2].split() == ["…", *(f"tp={column}" for column in range(133, 141)), "…"]
    assert [line.split()[0] for line in lines[3:19]] == ["…", *(f"dp={row}" for row in range(13, 27)), "…"]
    assert "[5000g]" in lines[10]
    assert lines[10].index("5000g") < lines[2].index("tp=136") + len("tp=136") <= lines[10].index("g]") + 2
    assert "112 of 65536 ranks are shown: dp=13..26 of 256, tp=133..140 of 256" in text
    assert lines[-1] == "hosts (ranks): a node54 (64), g node78 (64), and 1,022 more"  # 5000 is on g


def test_the_host_of_the_calling_rank_is_named(capsys):
    text = show_in_a_dry_run(4096, 2077, 8, (64, 64), "text", capsys)
    assert "[2077m]" in text
    assert text.endswith("hosts (ranks): a node211 (8), m node259 (8), and 510 more\n")
    html = show_in_a_dry_run(4096, 2077, 8, (64, 64), "html")
    assert "k node251 (8 ranks)" in html
    assert "m node259 (8 ranks)" in html
    assert "l node" not in html


def test_windows_stop_at_the_ends(capsys):
    assert ": tp=8184..8191 of 8192" in show_in_a_dry_run(8192, 8190, 8, (8192,), "text", capsys)
    assert ": tp=0..7 of 8192" in show_in_a_dry_run(8193, 8192, 8, (8192,), "text", capsys)
    text = show_in_a_dry_run(128, 127, 8, (32, 2, 2), "text", capsys)
    assert "16 of 128 ranks are shown: 4 of 32 panels" in text
    assert "pp=28 " in text
    assert "pp=27 " not in text
    assert "[127b]" in text


def test_more_hosts_than_letters_have_two(capsys):
    text = show_in_a_dry_run(256, 0, 8, (16, 16), "text", capsys)
    assert "255af" in text
    assert text.rstrip().endswith("l node11 (8), and 20 more")


def test_dots_for_further_rows_are_apart_from_cells_and_labels():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    ax = show_in_a_dry_run(4096, 2077, 8, (64, 64), "plot")
    ax.figure.canvas.draw()
    cells = min(patch.get_window_extent().x0 for patch in ax.patches)
    of_rows = [box for text, box in texts_of(ax.figure) if text.get_text() == "…" and box.x1 < cells]
    rows = sorted(box.y0 for box in of_rows)
    assert len(of_rows) == 3  # for columns, and for rows above and below
    assert all(cells - box.x1 > 4 for box in of_rows)
    assert rows[-1] - rows[-2] > 15  # pixels
    pyplot.close(ax.figure)


@pytest.mark.slow
def test_large_html_and_plots(recwarn):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    html = show_in_a_dry_run(65536, 5000, 64, (256, 256), "html")
    assert [text for text, _, style in Cells(html).cells if "outline:3px" in style] == ["5000"]
    assert "framed: rank 5000 at (dp=19, tp=136)" in html
    assert "and 1,012 more" in html
    assert html.count("…") == 4
    ax = show_in_a_dry_run(65536, 5000, 64, (256, 256), "matplotlib")
    ax.figure.canvas.draw()
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend[0] == "a node54 (64 ranks)"
    assert legend[12:] == ["and 1,012 more", "rank 5000 at (dp=19, tp=136)"]
    assert "5000" in {text.get_text() for text in ax.texts}
    pyplot.close(ax.figure)
    assert not recwarn.list


@pytest.mark.slow
def test_panels_leave_no_blank_bands():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    pyplot.switch_backend("agg")
    ax = show_in_a_dry_run(256, 100, 32, (8, 4, 8), "plot")
    ax.figure.canvas.draw()
    box = ax.get_window_extent().transformed(ax.figure.transFigure.inverted())
    assert box.height > 0.8
    pyplot.close(ax.figure)
