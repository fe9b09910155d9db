"""A collective is its definition and one line: all that knows the others knows it, on every backend."""

import added_collectives
import numpy as np
import pytest
from added_collectives import rotate, rotated

import meshdist as dist
from meshdist.collectives.registry import register, sent_by, sent_bytes
from meshdist.collectives.traffic import Seat
from meshdist.topology import CostModel, Topology

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def added():
    added_collectives.add()
    yield
    added_collectives.take_away()


def call_each_way():
    if "rotate" not in dir(dist.ProcessGroup):  # this rank is a process of its own
        added_collectives.add()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    x, want = np.arange(3.0) + rank, rotated(rank, size)
    with mesh.account() as account, dist.profile() as profile:
        for call in (dist.rotate, mesh.rotate, mesh.get_group().rotate, rotate):
            y = np.zeros(3)
            assert call(y, x) is y
            assert y.tolist() == want.tolist()
        y = np.zeros((2, 6))[:, ::2]  # strided, and async
        dist.rotate(y, np.stack([x, x]), async_op=True).wait()
        assert y.tolist() == [want.tolist()] * 2
        dist.patch(z := np.full(2 * size + 1, float(rank)))
        assert z.tolist() == [part for other in range(size) for part in [float(other)] * (2 + (other == 0))]
        for count in (1, 100_000):
            assert dist.total(np.full(count, rank + 1.0)).tolist() == [size * (size + 1) / 2] * count
    records = dist.flight_recorder()["records"]
    return (
        account.as_dict()["x"],
        [(event.name, event.nbytes) for event in profile.events],
        [record["text"] for record in records if record["call"] == "rotate"][-5:],
    )


def test_on_every_backend(world):
    size = world.size
    for counted, events, texts in world.run(call_each_way):
        moved = [(counts["calls"], counts["nbytes"]) for counts in counted.values()]
        assert list(counted) == ["rotate", "patch", "total"]
        assert moved == [(5, 4 * 24 + 48), (1, 8 * (2 * size + 1)), (2, 800_008)]
        sent = counted["rotate"]["inside"] + counted["rotate"]["between"]
        assert sent == (0 if size == 1 else 4 * 24 + 48)
        assert [name for name, _ in events] == ["rotate"] * 5 + ["patch"] + ["total"] * 2
        assert texts == ["rotate(float64[3])"] * 4 + ["rotate(float64[2, 3])"]


def call_wrongly():
    added_collectives.add()
    with pytest.raises(ValueError, match="rotate on group .*output must have the shape of input"):
        dist.rotate(np.zeros(2), np.zeros(3))


def test_wrong_arguments_are_refused(worlds):
    worlds.world("threads", 2).run(call_wrongly)


def test_in_a_dry_run():
    with dist.dry_run(1000, 7, ranks_per_host=8) as dry:
        y = dist.rotate(np.ones(3), np.ones(3))
        assert y.shape == (3,)
        assert dist.total(np.ones(2)).tolist() == [1000.0, 1000.0]
    counted = dry.account.as_dict()["group 'world'"]
    assert counted["rotate"] == {"calls": 1, "nbytes": 24, "inside": 0, "between": 24}  # to the first of the next host


def test_traffic_by_name():
    assert sent_bytes("rotate", 1000, 4) == 1000
    assert sent_bytes("rotate", 1000, 1) == 0
    assert sent_bytes("patch", 1000, 4) == 750
    assert sent_bytes("total", 1000, 4) == sent_bytes("all_reduce", 1000, 4)
    assert sent_by("rotate", 1000, Seat(1, ["a", "a", "b"])) == (0, 1000)
    assert sent_by("total", 1200, Seat(0, ["a", "a", "b", "b"])) == (1200, 600)


def test_in_the_cost_model():
    cost = CostModel(Topology.uniform(2, 4))
    for nbytes in (8, 1 << 20):
        assert cost.predict("rotate", nbytes, 2) == pytest.approx(cost.predict("all_gather", 2 * nbytes, 2))
        assert cost.predict("total", nbytes, 8) == cost.predict("all_reduce", nbytes, 8)
        ring = cost.predict("all_gather", nbytes, 8, algorithm="ring")
        assert cost.predict("patch", nbytes, 8) == pytest.approx(ring)
    assert cost.predict("rotate", 8, 1) == 0
    assert list(cost.algorithms("rotate", 8, 8)) == ["default"]
    plan = dist.plan({"x": {"rotate": 1e6}, "y": {"all_reduce": 1e6}}, 16)
    assert plan.best.seconds > 0


def test_a_name_that_is_taken():
    with pytest.raises(ValueError, match="groups have a method 'rotate' already"):
        register(rotate)
