"""Future, and what a Work and a Future share: waiting, callbacks, errors."""

import threading

import numpy as np
import pytest

import meshdist as dist
from meshdist import Future

pytestmark = pytest.mark.timeout(30)


def test_set_result_is_what_wait_and_value_return():
    future = Future()
    assert not future.done()
    with pytest.raises(RuntimeError, match="wait"):
        future.value()
    future.set_result([1, 2])
    assert future.done()
    assert future.wait() == future.value() == [1, 2]


def test_set_exception_is_raised_every_time():
    future = Future()
    future.set_exception(ValueError("no"))
    assert future.done()
    for ask in (future.wait, future.value, future.wait):
        with pytest.raises(ValueError, match="no"):
            ask()


def test_a_future_is_set_once():
    future = Future()
    future.set_result(1)
    with pytest.raises(RuntimeError, match="already"):
        future.set_result(2)
    with pytest.raises(RuntimeError, match="already"):
        future.set_exception(ValueError())
    assert future.value() == 1


def test_an_exception_must_be_one():
    with pytest.raises(TypeError, match="str"):
        Future().set_exception("text")


def test_wait_that_timed_out_can_be_waited_again():
    future = Future()
    for _ in range(2):
        with pytest.raises(dist.DistTimeoutError):
            future.wait(0.01)
    future.set_result(3)
    assert future.wait(0.01) == 3


@pytest.mark.parametrize("early", [True, False], ids=["chained before", "chained after"])
def test_then_gets_the_future_and_gives_a_new_one(early):
    future, seen = Future(), []

    def callback(done):
        seen.append(done)
        return done.value() + 1

    if not early:
        future.set_result(1)
    after = future.then(callback).then(lambda done: 10 * done.value())
    if early:
        assert not after.done()
        future.set_result(1)
    assert after.wait() == 20
    assert seen == [future]


def test_exceptions_run_through_a_chain():
    future = Future()
    after = future.then(lambda done: done.value()).then(lambda done: done.value())
    rescued = after.then(lambda done: "rescued" if done.done() else None)
    future.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        after.wait()
    assert rescued.wait() == "rescued"


def test_what_a_callback_raises_belongs_to_its_future():
    future = Future()
    broken = future.then(lambda done: 1 / 0)
    future.set_result(1)
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    assert future.wait() == 1


def test_a_ctrl_c_in_a_callback_ends_whoever_is_here_as_well():
    future = Future()
    future.set_result(1)

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        future.then(interrupted)


def test_done_callbacks_run_in_order_and_do_not_disturb_each_other(caplog):
    future, order = Future(), []
    future.add_done_callback(lambda done: order.append(("first", done.value())))
    future.add_done_callback(lambda done: 1 / 0)
    future.add_done_callback(lambda done: order.append(("last", done.value())))
    future.set_result(7)
    future.add_done_callback(lambda done: order.append(("late", done.value())))
    assert order == [("first", 7), ("last", 7), ("late", 7)]
    assert "callback of a Future raised" in caplog.text


def test_many_threads_wait_for_one_future():
    future, found = Future(), []
    threads = [threading.Thread(target=lambda: found.append(future.wait(20))) for _ in range(20)]
    for thread in threads:
        thread.start()
    future.set_result("there")
    for thread in threads:
        thread.join()
    assert found == ["there"] * 20


def test_every_callback_runs_once_however_it_meets_the_result():
    for _ in range(200):
        future, ran = Future(), []
        barrier = threading.Barrier(2)

        def add(future=future, ran=ran, barrier=barrier):
            barrier.wait()
            for number in range(20):
                future.add_done_callback(lambda done, number=number: ran.append(number))

        thread = threading.Thread(target=add)
        thread.start()
        barrier.wait()
        future.set_result(None)
        thread.join()
        assert sorted(ran) == list(range(20))


def futures_of_works():
    size = dist.get_world_size()
    x, out = np.ones(3), [np.zeros(1) for _ in range(size)]
    mean = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / size)
    gathered = dist.all_gather(out, np.array([1.0]), async_op=True).get_future()
    nothing = dist.barrier(async_op=True).get_future()
    assert mean.wait(20).tolist() == [1.0] * 3
    assert all(a is b for a, b in zip(gathered.wait(20), out, strict=True))
    assert nothing.wait(20) == []
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.get_future().value()[0] is x
    with pytest.raises(ValueError, match="irecv"):
        work.source_rank()


def test_futures_of_works(world_of_3):
    world_of_3.run(futures_of_works)


def future_of_a_failed_work():
    group = dist.new_group()
    work = group.all_reduce(np.zeros(3 + (dist.get_rank() == 1)), async_op=True)
    after = work.get_future().then(lambda done: done.value())
    for _ in range(2):
        with pytest.raises(dist.DistBackendError):
            after.wait(20)
    with pytest.raises(dist.DistBackendError):
        work.get_future().wait()


def test_the_future_of_a_failed_work_raises(world_of_3):
    world_of_3.run(future_of_a_failed_work)


def calls_from_callbacks():
    # A callback starts the next call; it finds its world, and the order is the same on all ranks.
    size = dist.get_world_size()
    x, y = np.ones(1), np.zeros(1)

    def go_on(done):
        y[...] = done.value()[0]
        return dist.all_reduce(y, async_op=True)

    second = dist.all_reduce(x, async_op=True).get_future().then(go_on).wait(20)
    second.wait(20)
    assert y.item() == size**2


def test_callbacks_start_calls(world_of_3):
    world_of_3.run(calls_from_callbacks)


def wait_in_a_callback():
    group, rank, size = dist.new_group(), dist.get_rank(), dist.get_world_size()
    x, y = np.ones(1), np.ones(1)
    if rank == 0:
        first = group.all_reduce(x, async_op=True)
        after = first.get_future().then(lambda done: group.all_reduce(y, async_op=True).wait())
        for peer in range(1, size):  # before this message the others do not come, so the callback is there in time
            dist.send(np.zeros(1), peer)
        with pytest.raises(dist.DistError, match="callback"):
            after.wait(20)
    else:
        dist.recv(np.zeros(1), 0)
        group.all_reduce(x)
        group.all_reduce(y)
    group.barrier()
    assert (x.item(), y.item()) == (size, size)


def test_a_callback_that_waits_is_an_error_and_no_hang(world_of_3):
    world_of_3.run(wait_in_a_callback)
