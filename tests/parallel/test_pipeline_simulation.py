"""Simulated pipelines have the bubbles and the activations of the papers; their drawings show them."""

import itertools
import re
import sys

import pytest
from figures import unreadable

import meshdist as dist
from meshdist.parallel import (
    PipelineCosts,
    PipelineRunner,
    PipelineStage,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zbv,
    zero_bubble,
)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 1), (2, 2), (4, 4), (4, 8), (8, 32)])
def test_bubbles_and_activations_are_those_of_the_papers(num_ranks, num_microbatches):
    p, m = num_ranks, num_microbatches
    all_forward, alternating = gpipe(p, m).simulate(), one_f_one_b(p, m).simulate()
    assert all_forward.makespan == alternating.makespan == 3 * (m + p - 1)
    assert all_forward.bubble == pytest.approx((p - 1) / (m + p - 1))  # Huang et al., section 2.3
    assert alternating.bubbles == pytest.approx([all_forward.bubble] * p)
    assert all_forward.peak_activations == [m] * p
    assert alternating.peak_activations == [min(m, p - rank) for rank in range(p)]
    half = interleaved(p, m, 2).simulate(PipelineCosts(0.5, 0.5, 0.5))
    assert half.makespan == 3 * m + 3 * (p - 1) / 2  # Narayanan et al., section 2.2: the bubble is half as long
    delayed = zero_bubble(p, m).simulate()
    assert delayed.makespan == 3 * m + p - 1  # Qi et al., table 1: (p - 1) (F + I - W)
    assert max(delayed.peak_activations) <= p


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 16), (8, 16)])
def test_zbv_has_no_bubble_but_the_start(num_ranks, num_microbatches):
    timeline = zbv(num_ranks, num_microbatches).simulate()
    assert timeline.makespan == 6 * num_microbatches + num_ranks - 1
    assert max(timeline.peak_activations) == 2 * num_ranks


def test_costs_are_per_stage_and_messages_take_time():
    schedule = one_f_one_b(2, 1)
    timeline = schedule.simulate(PipelineCosts(forward=[1, 2], backward=[4, 8], message=0.5))
    assert [tuple(span[1:]) for span in timeline.rows[0]] == [(0, 1), (12, 16)]
    assert [tuple(span[1:]) for span in timeline.rows[1]] == [(1.5, 3.5), (3.5, 11.5)]
    assert schedule.with_messages().simulate(PipelineCosts(message=0.5)).makespan == 7
    # Between stages of one rank there is no message.
    assert Schedule(["0F0 1F0 1B0 0B0"]).simulate(PipelineCosts(message=9)).makespan == 6
    with pytest.raises(ValueError, match="forward has costs of 1 stage, and there is a stage 1"):
        schedule.simulate(PipelineCosts(forward=[1]))
    with pytest.raises(ValueError, match="backward must not be negative, got -1"):
        PipelineCosts(backward=-1)


def test_text_is_to_scale_where_there_is_room(capsys):
    interleaved(2, 2).show(width=100)
    assert capsys.readouterr().out.splitlines() == [
        "Interleaved1F1B: makespan 15, bubble 20.0%",
        "rank 0 0F0 0F1 2F0 2F1 ........2B0---- ....2B1---- 0B0---- 0B1----",
        "rank 1 ....1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1---- ........",
        "rank 0: bubble 20%, 4 activations",
        "rank 1: bubble 20%, 3 activations",
    ]


@pytest.mark.parametrize("width", [0, 10, 40])
def test_a_narrow_terminal_or_none_gets_lists(width):
    text = one_f_one_b(2, 8).simulate().to_text(width)
    assert max(map(len, text.splitlines()[1:-2])) <= (width or 100)
    lines = text.replace("\n       ", " ").splitlines()
    assert lines[1] == "rank 0 0F0 0F1 . 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0F6 0B5 0F7 0B6 . 0B7"
    assert lines[2].startswith("rank 1 . 1F0 1B0 1F1")
    assert lines[3:] == ["rank 0: bubble 11%, 2 activations", "rank 1: bubble 11%, 1 activation"]


def test_the_width_is_that_of_the_terminal(terminal):
    timeline = gpipe(2, 2).simulate()
    terminal(0)
    assert str(timeline) == timeline.to_text(0)
    terminal(100)
    assert str(timeline) == timeline.to_text(100) != timeline.to_text(0)


def test_html_names_each_action_and_its_time():
    html = zbv(2, 4).show("html")
    assert html.count('title="') == 2 * 2 * 4 * 3
    assert 'title="3I0: backward of the input, 4 to 5"' in html
    assert "ZBV: makespan 25, bubble 4.0%" in html
    assert zbv(2, 4)._repr_html_() == zbv(2, 4).simulate()._repr_html_() == html
    assert Schedule(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])._repr_html_() is None  # it deadlocks
    # A zero-width space lets a label that is wider than its bar wrap, out of sight: no number is cut.
    assert all(bar.startswith("&#8203;") for bar in re.findall(r'title="[^"]*">([^<]*)</span>', html))
    assert "&lt;b&gt;" in Schedule(["0F0"], name="<b>").show("html")


def test_plot_has_a_bar_for_each_action():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = gpipe(3, 2).show("matplotlib")
    assert [len(bars.get_paths()) for bars in ax.collections] == [4, 4, 4]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert sorted(text.get_text() for text in ax.texts) == 6 * ["0"] + 6 * ["1"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "F: forward",
        "B: backward",
        "number: micro-batch",
    ]
    assert ax.get_xlabel() == "time (in cost units)"
    assert gpipe(3, 2).simulate().plot(ax) is ax
    pyplot.close(ax.figure)


def test_plot_writes_only_labels_that_fit():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = gpipe(2, 40).show("plot")
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert any(text.get_text() == "5" for text in ax.texts)  # of F5, for which there is no room
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes) if one.y0 == other.y0)
    pyplot.close(ax.figure)
    ax = gpipe(2, 200).show("plot")
    assert len(ax.texts) == 0
    pyplot.close(ax.figure)


def test_the_legend_of_a_plot_is_in_the_figure():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    for layout in (None, "constrained"):
        figure, ax = pyplot.subplots(layout=layout)
        zbv(2, 4).show("plot", ax=ax)
        assert unreadable(figure) == []
        pyplot.close(figure)


def test_other_forms_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="form must be one of 'text', 'html', 'plot' or None, got 'svg'"):
        gpipe(2, 2).show("svg")
    with pytest.raises(ValueError, match="ax needs form='plot'"):
        gpipe(2, 2).show("text", ax=object())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        gpipe(2, 2).show("plot")


def measured():
    stage = PipelineStage(lambda x: (x, None), lambda saved, dy: (dy, None))
    runner = PipelineRunner([stage], gpipe(2, 2), loss=lambda y, target: (0.0, y))
    runner.step(dist.zeros((4, 1)), dist.zeros((4, 1)))
    return runner.timeline()


def test_the_runner_measures_a_timeline():
    first, second = dist.run(measured, 2, timeout=20)
    assert first.name == "GPipe, measured"
    assert first.rows == second.rows
    assert [[str(span.action) for span in row] for row in first.rows] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
    ]
    assert min(span.begin for row in first.rows for span in row) == 0
    assert first.peak_activations == [2, 2]
    assert 0 < first.bubble < 1
    assert repr(first).startswith("<PipelineTimeline GPipe, measured: makespan ")
