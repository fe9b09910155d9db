"""The collectives of meshdist.autograd: dot products across ranks, finite differences, and what they refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import meshdist
import meshdist.autograd as ag
from meshdist import functional

RANKS = (1, 2, 3, 4)
GRADS = ("reduce", "identity")
SHAPE = (12, 2)  # of a multiple of all numbers of ranks


def forms(size: int) -> dict[str, tuple[Callable[[Any], Any], bool]]:
    """Return the collectives by a name, and whether the gradients of all ranks' uses of the result are added."""
    uneven = [rank if size > 1 else 1 for rank in range(size)]
    ring = [(rank, (rank + 1) % size) for rank in range(size - 1)]
    found: dict[str, tuple[Callable[[Any], Any], bool]] = {}
    for op in ("sum", "avg", "max", "min", meshdist.premul_sum(1.0 + size)):
        for choice in GRADS:
            found[f"all_reduce {op} {choice}"] = (
                lambda x, o=op, c=choice: ag.all_reduce(x, o, grad=c),
                choice == "reduce",
            )
        found[f"reduce_scatter {op}"] = lambda x, o=op: ag.reduce_scatter(x, o), True
    for choice in GRADS:
        adds = choice == "reduce"
        for axis in (0, 1, -1):
            found[f"all_gather {axis} {choice}"] = lambda x, a=axis, c=choice: ag.all_gather(x, axis=a, grad=c), adds
        found[f"all_gather list {choice}"] = lambda x, c=choice: anp.concatenate(ag.all_gather(x, grad=c)), adds
        found[f"broadcast {choice}"] = lambda x, c=choice: ag.broadcast(x, size - 1, grad=c), adds
    found["reduce_scatter list"] = lambda x: ag.reduce_scatter([x * (i + 1) for i in range(size)]), True
    found["reduce_scatter axis"] = lambda x: ag.reduce_scatter(x.T, dim=1), True
    found["all_to_all"] = ag.all_to_all, True
    found["all_to_all axis"] = lambda x: ag.all_to_all(x.T, axis=-1), True
    found["all_to_all list"] = lambda x: ag.all_to_all([x[: i + 1] for i in [2] * size])[size - 1], True
    found["all_to_all uneven"] = (
        lambda x: ag.all_to_all(
            x[: sum(uneven)],
            input_split_sizes=uneven,
            output_split_sizes=[uneven[meshdist.get_rank()]] * size,
        ),
        True,
    )
    found["permute ring"] = lambda x: ag.permute(x, 1), True
    found["permute pairs"] = lambda x: ag.permute(x, ring), True
    found["copy"] = ag.copy, True
    return found


@pytest.mark.parametrize("size", RANKS)
def test_gradients_are_those_of_finite_differences(size: int) -> None:
    """L is the sum over the ranks of what each makes of the result, or what all make of it alike."""

    def main() -> None:
        rank = meshdist.get_rank()
        rng = np.random.default_rng(rank)
        for name, (form, adds) in forms(size).items():
            x, direction = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
            if name == "copy":  # takes what is the same on all ranks
                x, direction = np.ones(SHAPE), np.full(SHAPE, 0.5)
            weights = np.random.default_rng(7 + rank * adds).standard_normal(np.shape(form(x)))
            loss = lambda x, f=form, w=weights: anp.sum(w * anp.tanh(f(x)))  # noqa: E731
            gradient = ag.grad(loss)(x)
            assert gradient.shape == SHAPE, name
            step = 1e-6
            difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
            found = np.sum(gradient * direction)
            if name != "copy":
                found = functional.all_reduce(found)
            wanted = functional.all_reduce(difference) if adds else difference
            assert abs(found - wanted) < 1e-6 * max(1, abs(wanted)), (name, found, wanted)

    meshdist.run(main, size, timeout=60)


@pytest.mark.parametrize("size", [1, 3])
def test_second_derivatives_are_those_of_finite_differences(size: int) -> None:
    def main() -> None:
        rank = meshdist.get_rank()
        rng = np.random.default_rng(rank)
        for name, (form, adds) in forms(size).items():
            same = name == "copy"  # takes what is the same on all ranks
            x, direction = (np.ones(SHAPE), np.full(SHAPE, 0.5)) if same else rng.standard_normal((2, *SHAPE))
            weights = np.random.default_rng(7 + rank * adds).standard_normal(np.shape(form(x)))

            def along(function: Callable[[Any], Any], d: Any = direction, same: bool = same) -> Callable[[Any], Any]:
                def derivative(at: Any) -> Any:
                    part = anp.sum(ag.grad(function)(at) * d)
                    return part if same else ag.all_reduce(part)

                return derivative

            first = along(lambda x, f=form, w=weights: anp.sum(w * anp.tanh(f(x))))
            wanted = (first(x + 1e-6 * direction) - first(x - 1e-6 * direction)) / 2e-6
            assert np.isclose(along(first)(x), wanted, rtol=1e-5, atol=1e-6), name

    meshdist.run(main, size, timeout=60)


@pytest.mark.parametrize("size", [2, 3])
def test_the_package_autograd_itself_differentiates_them(size: int) -> None:
    def main() -> list[float]:
        x = np.array([1.0 + meshdist.get_rank(), 2.0])
        loss = lambda x: ag.all_reduce(anp.sum(x**3), "avg")  # noqa: E731
        second = autograd.grad(lambda x: anp.sum(autograd.grad(loss)(x) ** 2))(x)
        assert np.allclose(second, ag.grad(lambda x: anp.sum(ag.grad(loss)(x) ** 2))(x))
        assert np.allclose(second, 2 * (3 * x**2 / size) * 6 * x / size)
        return list(autograd.grad(loss)(x))

    for rank, found in enumerate(meshdist.run(main, size)):
        assert np.allclose(found, [3 * (1 + rank) ** 2 / size, 12 / size])


def test_ties_share_the_gradient_of_a_maximum() -> None:
    def main() -> Any:
        x = np.array([1.0, 5.0, float(meshdist.get_rank())])
        return ag.grad(lambda x: anp.sum(ag.all_reduce(x, "max")))(x).tolist()

    third = 1 / 3
    assert meshdist.run(main, 3) == [[third, third, 0], [third, third, 0], [third, third, 1]]


@pytest.mark.filterwarnings("error")
def test_a_nan_in_a_maximum_has_a_nan_as_its_gradient() -> None:
    def main() -> list[float]:
        x = np.array([np.nan if meshdist.get_rank() else 1.0, 2.0])
        return ag.grad(lambda x: anp.sum(ag.all_reduce(x, "max")))(x).tolist()

    assert all(np.isnan(first) and second == 0.5 for first, second in meshdist.run(main, 2))


def test_vjp_gives_the_functions_for_a_backward_pass_by_hand() -> None:
    def main() -> None:
        x = np.arange(4.0) * (1 + meshdist.get_rank())
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (ag.all_reduce, ("max",), {"grad": "reduce"}),
            (ag.all_reduce, (), {}),
            (ag.reduce_scatter, ("min",), {}),
            (ag.all_gather, (), {"axis": 0}),
            (ag.all_to_all, (), {}),
            (ag.broadcast, (1,), {}),
            (ag.permute, (1,), {}),
            (ag.copy, (), {}),
        ]
        for collective, args, kwargs in calls:
            forward, backward = ag.vjp(collective, *args, **kwargs)
            y = forward(x)
            assert np.array_equal(y, collective(x, *args, **kwargs))
            g = np.ones_like(y)
            wanted = ag.grad(lambda x, c=collective, a=args, k=kwargs: anp.sum(c(x, *a, **k)))(x)
            assert np.allclose(backward(g, x, y), wanted), collective
        forward, backward = ag.vjp(ag.all_gather, grad="identity")  # of lists, as without an axis
        assert [y.tolist() for y in forward(x)] == [y.tolist() for y in ag.all_gather(x)]
        assert backward([np.full(4, rank) for rank in range(2)]).tolist() == [meshdist.get_rank()] * 4
        assert [float(y) for y in forward(2.0)] == [2.0, 2.0]
        forward, backward = ag.vjp(ag.all_gather)
        assert backward([np.full(4, rank) for rank in range(2)]).tolist() == [2 * meshdist.get_rank()] * 4
        if meshdist.get_rank() == 0:
            forward, backward = ag.vjp(ag.send, 1)
            forward(x)
            assert np.array_equal(backward(None, x), x * 2)
        else:
            meshdist.send(ag.recv(x, src=0) * 2, dst=0)

    meshdist.run(main, 2)


def test_messages_bring_their_gradients_back_also_where_a_rank_needs_none() -> None:
    """Two stages, two microbatches: the first has no loss, and sends also what it does not differentiate."""

    def main() -> Any:
        if meshdist.get_rank() == 0:
            # The token is not part of the loss, and the last message is not differentiated here.
            def first(w: Any) -> Any:
                for number in (1.0, 2.0):
                    ag.send(w * number, dst=1)
                ag.send(np.array(5.0), dst=1)
                return 0.0

            return float(ag.grad(first)(3.0))

        def last(w: Any) -> Any:
            h = [ag.recv(0.0, src=0) for _ in range(3)]
            return w * h[0] + w**2 * h[1] + h[2]

        return float(ag.grad(last)(2.0))

    first, last = meshdist.run(main, 2)
    assert first == 2.0 * 1 + 2.0**2 * 2
    assert last == 3.0 + 2 * 2.0 * 6.0


def test_ranks_that_do_not_use_a_result_take_part_in_its_backward_pass() -> None:
    def main() -> float:
        own = 1.0 + meshdist.get_rank()

        def loss(x: Any) -> Any:
            total = ag.all_reduce(x, grad="reduce")
            gathered = ag.all_gather(x, axis=0)
            return own * total[0] if meshdist.get_rank() == 0 else gathered[1] + 0 * x[0]

        return float(ag.grad(loss)(np.ones(1))[0])

    assert meshdist.run(main, 3) == [1.0, 1.0 + 2.0, 1.0]


def test_collectives_of_independent_branches_run_backwards_in_the_order_of_the_calls() -> None:
    """Rank 1 adds the terms the other way round, so that an order by dependence would differ."""

    def main() -> float:
        def loss(x: Any) -> Any:
            terms = [ag.all_reduce(x * k, grad="reduce") for k in (1.0, 2.0)]
            terms.append(anp.sum(ag.all_gather(x, axis=0)))
            return sum(terms if meshdist.get_rank() == 0 else terms[::-1])

        return float(ag.grad(loss)(2.0))

    assert meshdist.run(main, 2) == [2 * 3 + 2.0] * 2


def refused(function: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_what_is_refused_is_named_on_every_rank() -> None:
    def main() -> list[str]:
        x = np.ones(4)
        forward, backward = ag.vjp(ag.all_reduce, "max")
        forward(x)
        return [
            refused(lambda: ag.all_reduce(x, "product"), TypeError),
            refused(lambda: ag.all_reduce(x, grad="sum"), ValueError),
            refused(lambda: ag.all_reduce([x]), TypeError),
            refused(lambda: ag.reduce_scatter(np.ones(5)), ValueError),
            refused(lambda: ag.reduce_scatter([x]), ValueError),
            refused(lambda: ag.permute(x, [(0, 5)]), ValueError),
            refused(lambda: ag.permute(x, [(0, 1), (1, 1)]), ValueError),
            refused(lambda: ag.permute(x, "right"), TypeError),
            refused(lambda: backward(np.ones(3), x, x), ValueError),
            refused(lambda: backward(np.ones(4, int), x, x), TypeError),
            refused(lambda: backward(np.ones(4)), ValueError),
            refused(lambda: ag.vjp(functional.all_reduce), TypeError),
            refused(lambda: ag.grad(lambda x: anp.sum(x * 1.0))(np.arange(3)), TypeError),
            refused(lambda: ag.grad(lambda p: anp.sum(p["w"]))({"w": x, "n": 3}), TypeError),
            refused(lambda: ag.grad(lambda x: ag.all_reduce(x))(x), ValueError),
            refused(lambda: ag.grad(lambda x: anp.cumprod(x)[0])(x), TypeError),
            refused(lambda: ag.grad(lambda x: None)(x), TypeError),
        ]

    for said in meshdist.run(main, 2):
        parts = (
            "op 'product' has no gradient", "'reduce' or 'identity'", "x must be an array", "multiple of 2 ranks",
            "an array for each rank: expected 2, got", "ranks must be 0 to 1", "can be a destination once", "pairs",
            "must have its shape (4,), got (3,)", "must be of this dtype, got int64", "needs x and y", "must be one of",
            "x has dtype int64", "p['n'] has dtype int64", "shape (4,); add", "cumprod has no gradient", "a NoneType",
        )  # fmt: skip
        for text, part in zip(said, parts, strict=True):
            assert part in text, (part, text)


def test_detail_finds_gradients_that_were_not_added() -> None:
    logger = logging.getLogger("meshdist")
    level = logger.level
    meshdist.set_debug_level(meshdist.DebugLevel.DETAIL)
    logger.propagate, logger.disabled = False, True

    def main() -> str:
        own = 1.0 + meshdist.get_rank()
        ag.grad(lambda x: own * ag.all_reduce(x, grad="reduce"))(1.0)
        ag.grad(lambda x: ag.all_reduce(own * ag.copy(ag.all_reduce(x))))(1.0)
        return refused(lambda: ag.grad(lambda x: own * ag.all_reduce(x))(1.0), meshdist.DistBackendError)

    try:
        for said in meshdist.run(main, 2):
            assert "the gradient of the result of all_reduce" in said
            assert "grad='reduce'" in said
    finally:
        logger.propagate, logger.disabled = True, False
        logger.setLevel(level)


def test_reports_name_the_line_that_differentiates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MESHDIST_DEBUG", "DETAIL")
    with caplog.at_level(logging.DEBUG, "meshdist"):
        meshdist.run(lambda: ag.grad(lambda x: ag.all_reduce(ag.copy(x)))(1.0), 2)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]  # not of slow calls
    calls = [message for message in said if "all_reduce" in message]
    assert len(calls) == 4  # on two ranks, forward and backward
    assert all("at test_differentiable_collectives.py:" in call for call in calls)
