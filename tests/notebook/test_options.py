"""The options of `%%mesh`."""

import pytest

from meshdist.notebook.magic_options import CellOptions, parse_options


@pytest.mark.parametrize(
    ("line", "num_ranks", "axes"),
    [
        ("-n 4", 4, ()),
        ("--nproc 3", 3, ()),
        ("-n 4 --axes dp=2,tp=2", 4, (("dp", 2), ("tp", 2))),
        ("--axes x=3", 3, (("x", 3),)),
    ],
)
def test_workers_and_mesh(line, num_ranks, axes):
    options = parse_options(line)
    assert (options.num_ranks, options.axes) == (num_ranks, axes)


def test_what_is_not_given_stays():
    first = parse_options("--axes a=2,b=3 --backend threads --timeout 5 --send x --get y,z --restart")
    assert (first.send, first.get, first.restart) == (("x",), ("y", "z"), True)
    assert parse_options("", first) == CellOptions(6, (("a", 2), ("b", 3)), "threads", 5.0)
    assert parse_options("-n 6", first).axes == (("a", 2), ("b", 3))
    assert parse_options("-n 2", first).axes == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "%%mesh: pass the number of workers, as in %%mesh -n 4, or --axes dp=2,tp=2"),
        ("-n 0", "%%mesh: -n must be at least 1, got 0"),
        ("-n 500000000", "%%mesh: 500000000 processes take at least 3,906,250 GiB of memory, and this host has"),
        ("-n four", "%%mesh: argument -n/--nproc: invalid int value: 'four'; usage: %%mesh -n 4"),
        ("-n 3 --axes dp=2,tp=2", "%%mesh: --axes dp=2,tp=2 has 4 ranks, but -n is 3"),
        ("-n 2 --axes dp=4", "%%mesh: --axes dp=4 has 4 ranks, but -n is 2"),
        ("--axes dp", "%%mesh: --axes takes names and sizes, as in --axes dp=2,tp=2, got 'dp'"),
        ("--axes dp=2,dp=2", "%%mesh: --axes names an axis twice: 'dp=2,dp=2'"),
        ("-n 2 --get x.y", "%%mesh: --get takes names of variables, as in --get x,y, got 'x.y'"),
        ("-n 2 --colour red", "%%mesh: --colour is not an option; usage: %%mesh -n 4"),
        ("--nn 3", "%%mesh: --nn is not an option; did you mean -n? usage: %%mesh -n 4"),
        ("-n 2 --axs dp=2", "%%mesh: --axs is not an option; did you mean --axes? usage: "),
        ("-n 2 --timeout 0", "%%mesh: --timeout must be a positive number of seconds, got 0"),
        ("-n '2", "%%mesh: No closing quotation"),
    ],
)
def test_what_makes_no_sense_is_said(line, message):
    with pytest.raises(ValueError, match="^%%mesh: ") as raised:
        parse_options(line)
    assert str(raised.value).startswith(message)


def test_axes_give_the_number_of_ranks_and_are_kept():
    options = parse_options("--axes dp=2,tp=3 --get loss")
    assert (options.num_ranks, options.axes, options.get) == (6, (("dp", 2), ("tp", 3)), ("loss",))
    assert parse_options("", options).axes == (("dp", 2), ("tp", 3))
