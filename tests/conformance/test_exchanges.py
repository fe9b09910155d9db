"""sendrecv, messages of a rank to itself, probe and iprobe."""

import cases
import numpy as np
import pytest
from cases import Placed

import meshdist as dist
from meshdist.backends import Engine

pytestmark = pytest.mark.timeout(120)
KIB = cases.KIB


def around_the_ring(counts):
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in counts:
        taken = np.zeros((count, 2), np.int32)
        source = dist.sendrecv(np.full(2 * count, rank, np.int32), taken, after, before, tag=count)
        cases.same(source, before, "what sendrecv returns")
        cases.same(set(taken.ravel().tolist()), {before} if count else set(), f"{count} pairs around the ring")


def test_around_the_ring_with_any_size(world):
    # Buffered, not buffered, and empty; of one kind again and again.
    world.run(around_the_ring, (1, 1, 1, 0, 100 * KIB, 3))


def both_tags_and_strides():
    rank, size = dist.get_rank(), dist.get_world_size()
    partner = size - 1 - rank
    give, take = Placed(np.arange(6.0) + rank, "every second"), Placed(np.zeros((2, 3)), "transposed")
    # Its tag is that of the partner's send.
    source = dist.sendrecv(give.view, take.view, partner, partner, tag=rank, recv_tag=partner)
    cases.same(source, partner, "source")
    take.check(np.arange(6.0).reshape(2, 3) + partner, "sendrecv of strided arrays")
    give.check_unchanged("sendrecv")


def test_pairs_with_a_tag_each_and_strided_arrays(world_of_3):
    world_of_3.run(both_tags_and_strides)


def in_groups_and_meshes():
    rank = dist.get_rank()
    group = dist.new_group([2, 0], sort_ranks=False)
    mesh = dist.DeviceMesh("cpu", [2, 1, 0], mesh_dim_names=("x",))
    taken = np.zeros(1, int)
    if rank != 1:
        cases.same(group.sendrecv(np.array([rank]), taken, 1 - group.rank(), 1 - group.rank()), 1 - group.rank(), "")
        cases.same(taken.item(), 2 - rank, "sendrecv of a group")
        cases.same(dist.sendrecv(np.array([rank]), taken, 2 - rank, 2 - rank, group), 2 - rank, "global ranks")
        cases.same(dist.sendrecv(np.array([rank]), taken, group_dst=1 - group.rank(), group=group), 2 - rank, "any")
    me = mesh["x"].get_local_rank()
    cases.same(mesh["x"].sendrecv(np.array([me]), taken, dst=(me + 1) % 3), (me - 1) % 3, "from any along a mesh")
    cases.same(taken.item(), (me - 1) % 3, "sendrecv along a mesh")


def test_groups_and_meshes(world_of_3):
    world_of_3.run(in_groups_and_meshes)


def against_other_calls():
    rank, x = dist.get_rank(), np.zeros(1, int)
    if rank == 0:
        dist.sendrecv(np.array([7]), x, 1, 2)
    elif rank == 1:
        dist.recv(x, 0)
    else:
        dist.isend(np.array([2]), 0).wait()
    return x.item()


def test_against_plain_messages(world_of_3):
    assert world_of_3.run(against_other_calls) == [2, 7, 0]


def to_oneself(num_bytes):
    rank, x = dist.get_rank(), np.zeros(num_bytes, np.uint8)
    sent = np.full(num_bytes, rank + 1, np.uint8)
    for _ in range(2):
        x[...] = 0
        cases.same(dist.sendrecv(sent, x, rank, rank), rank, "sendrecv with oneself")
        cases.same(set(x.tolist()), {rank + 1}, "sendrecv with oneself")
        x[...] = 0
        given = dist.isend(sent, rank, tag=3)
        dist.recv(x, rank, tag=3)  # buffered
        given.wait()
        cases.same(set(x.tolist()), {rank + 1}, "isend and recv with oneself")
        x[...] = 0
        taken = dist.irecv(x, rank)
        dist.send(sent, rank)
        taken.wait()
        cases.same((set(x.tolist()), taken.source_rank()), ({rank + 1}, rank), "irecv and send with oneself")
        x[...] = 0
        dist.isend(sent, rank, tag=5)
        cases.same(dist.recv(x, tag=5), rank, "recv from any, sent by oneself")
        cases.same(set(x.tolist()), {rank + 1}, "recv from any, sent by oneself")
    for call, words in (
        (lambda: dist.send(sent, rank), f"dst is this rank, {rank}, which has posted no receive with tag 0"),
        (lambda: dist.recv(x, rank), f"src is this rank, {rank}, which has sent itself no message with tag 0"),
        (lambda: dist.probe(rank), f"src is this rank, {rank}, which has sent itself no such message"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("num_bytes", [8, 700 * KIB])
def test_messages_to_oneself(world_of_3, num_bytes):
    world_of_3.run(to_oneself, num_bytes)


def test_messages_to_oneself_in_a_group_of_one():
    def main():
        to_oneself(5)
        with pytest.raises(ValueError, match="src is this rank, 0, which has sent itself no message"):
            dist.recv(np.zeros(1))
        with pytest.raises(ValueError, match="probe on .* src is this rank, 0, which has sent itself no such message"):
            dist.probe()
        assert dist.iprobe() is None

    dist.run(main, 1)


def probing(num_bytes):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(np.full(num_bytes, rank, np.uint8), 0, tag=rank)
        return
    for src in range(size - 1, 0, -1):
        for info in (dist.probe(src, tag=src), dist.iprobe(src, tag=src), dist.probe(src, tag=None)):
            cases.same(info, (src, src, num_bytes, np.uint8, None), "probe")
        cases.same(dist.iprobe(src, tag=99), None, "iprobe of a tag that nobody sends")
    for _ in range(size - 1):
        info = dist.probe(tag=None)
        x = np.empty(info.nbytes, np.uint8)
        dist.recv(x, info.source, tag=info.tag)
        cases.same((set(x.tolist()), info.tag), ({info.source}, info.source), "the message that was found")
    cases.same(dist.iprobe(tag=None), None, "iprobe after all")


@pytest.mark.parametrize("num_bytes", [8, 1536 * KIB])
def test_probes_find_what_is_received_next(world_of_several, num_bytes):
    world_of_several.run(probing, num_bytes)


def known_messages_that_were_probed():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = np.full(3, float(rank)), np.zeros(3)
    for _ in range(4):  # later ones are of a known kind
        if rank == 0:
            for src in range(1, size):
                dist.recv(y, src)
        else:
            dist.send(x, 0)
    for number in range(6):
        if rank == 0:
            for src in range(1, size):
                if number % 2:  # all that have come leave their rings
                    dist.probe(src)
                dist.recv(y, src)
                cases.same(y.tolist(), [100 * number + src] * 3, f"message {number} of rank {src}")
        else:
            dist.send(x + 100 * number, 0)


def test_messages_are_received_in_order_whether_they_were_probed_or_not(world_of_several):
    world_of_several.run(known_messages_that_were_probed)


def late_message():
    # The probe begins before the message is sent: it sleeps, and is woken.
    rank = dist.get_rank()
    if rank == 0:
        dist.send(np.zeros(1), 1, tag=1)
        return dist.probe(tag=2), dist.recv(np.zeros(3, np.float32), tag=2)
    if rank == 1:
        dist.recv(np.zeros(1), 0, tag=1)
        dist.send(np.zeros(3, np.float32), 0, tag=2)
    return None


def test_a_probe_waits(world_of_several):
    info, source = world_of_several.run(late_message)[0]
    assert (info, source, info.nbytes) == ((1, 2, 12, np.float32, None), 1, 12)


def until_it_is_there():
    rank, polls = dist.get_rank(), 0
    if rank == 1:
        dist.send(np.arange(3), 0)
    elif rank == 0:
        while dist.iprobe() is None:
            polls += 1
        dist.recv(x := np.empty(3, int), 1)
        cases.same(x.tolist(), [0, 1, 2], "after iprobe")


def test_iprobe_finds_a_message_in_the_end(world_of_several):
    world_of_several.run(until_it_is_there)


def probes_along_a_group():
    rank = dist.get_rank()
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank == 2:
        group.send(np.zeros(2), 1)
    elif rank == 0:
        cases.same(group.probe(), (0, 0, 16, np.float64, None), "probe of a group")
        cases.same(group.iprobe(src=0), (0, 0, 16, np.float64, None), "iprobe of a group")
        cases.same(dist.probe(2, group), (2, 0, 16, np.float64, None), "probe with a global rank")
        dist.probe(group_src=-1, group=group)
        cases.same(dist.iprobe(), None, "iprobe of the world")
        group.recv(np.zeros(2))


def test_probes_along_a_group(world_of_3):
    world_of_3.run(probes_along_a_group)


x = np.zeros(2)
WRONG = {
    "not an array": (lambda: dist.sendrecv("x", x, 0, 0), TypeError, "sendrecv on group"),
    "no output": (lambda: dist.sendrecv(x, None, 0, 0), TypeError, "sendrecv on group"),
    "shared memory": (lambda: dist.sendrecv(x, x[:1], 0, 0), ValueError, "send and recv share memory"),
    "read-only": (
        lambda: dist.sendrecv(x, np.broadcast_to(np.zeros(1), 2), 0, 0),
        ValueError,
        "sendrecv on group .*read-only",
    ),
    "no receiver": (lambda: dist.sendrecv(x, x.copy(), src=0), ValueError, "pass dst .*or group_dst "),
    "no such rank": (lambda: dist.sendrecv(x, x.copy(), 5, 0), ValueError, "dst must be a rank in the group"),
    "both sources": (lambda: dist.sendrecv(x, x.copy(), 0, 0, group_src=0), ValueError, "pass src .*, not both"),
    "negative tag": (lambda: dist.sendrecv(x, x.copy(), 0, 0, tag=-1), ValueError, "tag must not be negative"),
    "wrong tag": (lambda: dist.sendrecv(x, x.copy(), 0, 0, recv_tag="a"), TypeError, "tag must be an integer"),
    "probe: no such rank": (lambda: dist.probe(7), ValueError, "probe on group .*src must be a rank in the group"),
    "probe: text": (lambda: dist.iprobe("a"), TypeError, "src must be an integer"),
    "probe: negative tag": (lambda: dist.probe(tag=-2), ValueError, "tag must not be negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, kind, words = WRONG[name]

    def main():
        with pytest.raises(kind, match=words):
            call()
        dist.barrier()

    dist.run(main, 2)


def test_in_dry_runs_accounts_and_profiles():
    with dist.dry_run(8, 3), dist.profile() as profile:
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        y = np.ones(4)
        with mesh.account() as account:
            assert mesh["tp"].sendrecv(np.ones(4), y, 0, 2) == 2
            assert y.tolist() == [0] * 4  # nobody sends in a dry run
            assert dist.sendrecv(np.arange(4.0), y, 3, 3) == 3
            assert y.tolist() == [0, 1, 2, 3]
        assert account.as_dict()["tp"]["sendrecv"]["nbytes"] == 32
        assert dist.probe(5, tag=2) == (5, 2, 0, None, None)
        assert dist.iprobe() == (4, 0, 0, None, None)
        work = dist.irecv(y, 3)
        dist.send(np.full(4, 5.0), 3)
        assert work.wait()
        assert y.tolist() == [5] * 4
    assert [event.name for event in profile.events] == ["sendrecv", "sendrecv", "irecv", "send"]


def test_a_profile_of_ranks_matches_the_messages():
    def main():
        with dist.profile() as profile:
            around_the_ring((4,))
        (exchange,) = profile.events
        return exchange.name, [(message.name, message.peer) for message in exchange.parts]

    assert dist.run(main, 3)[1] == ("sendrecv", [("isend", 2), ("irecv", 0)])


def test_in_a_coalescing_manager():
    def main():
        rank, taken = dist.get_rank(), np.zeros(1)
        with dist.coalescing_manager() as calls:
            dist.sendrecv(np.array([rank + 0.5]), taken, 1 - rank, 1 - rank)
        return taken.item(), len(calls.works)

    assert dist.run(main, 2) == [(1.5, 2), (0.5, 2)]


def test_a_rank_that_fails_ends_a_probe():
    def main():
        if dist.get_rank() == 1:
            raise KeyError("spam")
        with pytest.raises(dist.DistBackendError, match="probe on group 'world' .*rank 1"):
            dist.probe(1)

    with pytest.raises(KeyError, match="spam"):
        dist.run(main, 2)


def test_a_probe_times_out():
    def main():
        if dist.get_rank() == 0:
            group = dist.new_group(timeout=0.05)
            with pytest.raises(dist.DistTimeoutError, match="probe on .*waiting for a message from rank 1 with tag 3"):
                group.probe(1, tag=3)
        dist.barrier()

    dist.run(main, 2)


def test_a_probe_in_the_flight_recorder():
    def main():
        if dist.get_rank() == 0:
            dist.send(np.zeros(1), 1, tag=4)
            return None
        dist.probe(0, tag=4)
        dist.probe(tag=None)
        texts = [record["text"] for record in dist.flight_recorder()["records"]]
        dist.recv(np.zeros(1), tag=4)
        return texts

    assert dist.run(main, 2)[1] == ["probe(from rank 0, tag=4)", "probe(from any rank, any tag)"]


def test_a_backend_without_probes_says_so():
    with pytest.raises(dist.DistBackendError, match="cannot look for a message without receiving it"):
        Engine().probe(0, 0)
