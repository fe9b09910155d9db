"""Parts of the rendezvous, and of the clusters' launchers, that need no ranks."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from until import until

from meshdist.backends.backend_options import set_up_key, set_up_wait_of
from meshdist.bootstrap.from_environment import EnvPlace, place_from_environment
from meshdist.bootstrap.join import join, see_off_late, shortfall
from meshdist.bootstrap.multicast import Beacon, Discovery, sign, verify
from meshdist.bootstrap.multicast_socket import MulticastSocket, is_multicast
from meshdist.bootstrap.rank_assignment import Arrival, RankAssignment
from meshdist.bootstrap.spawned import callers_address, check_common_secret, exceeds_spawn, spawn_variables
from meshdist.bootstrap.url import NOT_GIVEN, ImpossibleRankError, parse_init_url, with_group_name
from meshdist.cluster import expand_nodelist, find_launcher, find_place, local_rank_here
from meshdist.errors import DistTimeoutError
from meshdist.runtime.host_identity import my_card
from meshdist.store import HashStore
from meshdist.system.deadline import Deadline


def test_place_from_the_environment(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    place = place_from_environment(rank=1, world_size=NOT_GIVEN)
    assert place == EnvPlace(rank=1, world_size=2, host="::1", port=29500)


def become_a_spawned_rank(monkeypatch, new_secret, **caller):
    for name, value in spawn_variables(2, new_secret, caller).items():
        monkeypatch.setenv(name, value)


def test_a_world_of_several_spawns_meets_where_their_caller_says(monkeypatch):
    become_a_spawned_rank(monkeypatch, "", MASTER_ADDR="[::1]", MASTER_PORT="29500")
    assert [exceeds_spawn(size) for size in (1, 2, 3)] == [False, False, True]
    assert callers_address("env://", 4) == ("::1", 29500)
    check_common_secret("env://", 4)


@pytest.mark.parametrize(
    "caller",
    [
        {"MASTER_ADDR": "node1"},
        {"MASTER_PORT": "29500"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "MESHDIST_AGENT_STORE": "node1:29500"},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_an_incomplete_address_and_that_of_a_launcher_are_not_the_callers(monkeypatch, caller):
    become_a_spawned_rank(monkeypatch, "", **caller)
    with pytest.raises(ValueError, match=r"spawn started 2 ranks; .* set MASTER_ADDR and MASTER_PORT"):
        callers_address("env://", 4)


def test_a_secret_that_spawn_created_is_of_its_ranks_alone(monkeypatch):
    become_a_spawned_rank(monkeypatch, "created")
    monkeypatch.setenv("MESHDIST_SECRET", "created")
    check_common_secret("env://", 2)
    with pytest.raises(ValueError, match="with its own secret"):
        check_common_secret("env://", 3)
    monkeypatch.setenv("MESHDIST_SECRET", "given to the rank since")
    check_common_secret("env://", 3)


def test_shortfall_names_the_missing_rank():
    words = "3 of 4 ranks joined within 2 s; rank 1 is missing: was it started with this store?"
    assert shortfall(HashStore(), 4, [1], "within 2 s") == words


def test_shortfall_of_ranks_that_are_all_there_blames_nobody_while_they_go_on():
    words = "all 4 ranks have arrived, and are about to go on (timeout in 2 s)"
    assert shortfall(HashStore(), 4, [], "(timeout in 2 s)", is_waiting=True) == words
    assert "some gave up before the others arrived" in shortfall(HashStore(), 4, [], "within 2 s")


@pytest.mark.parametrize("comes_again", [False, True])
def test_the_store_stays_until_all_who_came_have_seen_who_is_missing(comes_again):
    store, card = HashStore(), my_card("")

    def come(rank, timeout_s):
        with pytest.raises(DistTimeoutError, match="rank 1 is missing|ranks 0, 1 are missing"):
            join(store, rank, 3, card, Deadline(timeout_s), "gloo")

    if comes_again:
        come(2, 0.1)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(come, 2, 2.0)
        until(lambda: store.check(["world/0/card/2"]) and not store.check(["world/0/told/2"]), "rank 2 is there")
        come(0, 0.2)
        see_off_late(store, 3, 30.0)
        assert store.check(["world/0/told/2"])
        late.result(timeout=30)


def test_the_store_does_not_stay_for_a_rank_that_has_ended():
    store = HashStore()
    store.set("world/0/card/2", my_card("")._replace(pid=2**30).encode())
    began = time.monotonic()
    see_off_late(store, 3, 60.0)
    assert time.monotonic() - began < 30.0


def test_discovery_of_one_process():
    with MulticastSocket("239.255.77.1", 45672, this_host_only=True) as channel:
        assert Discovery(channel, "job", b"", this_host_only=True).find(1, Deadline(5.0)) is None


def test_beacons_are_signed():
    beacon = Beacon("0123456789abcdef", "job", "a host", 0, ())
    assert verify(sign(beacon, b"secret"), b"secret") == beacon
    assert verify(sign(beacon, b"secret"), b"other") is None


def test_multicast_addresses_and_sockets():
    assert [is_multicast(host) for host in ("239.1.2.3", "ff15::1", "10.0.0.1")] == [True, True, False]
    with MulticastSocket("239.255.77.1", 45671, this_host_only=True) as mine:
        mine.send(b"hello")
        assert mine.receive(1.0)[0] == b"hello"


def test_free_ranks_are_assigned():
    assert Arrival.here(NOT_GIVEN, 4).world_size == 4
    assignment = RankAssignment()
    for token, rank in (("a", NOT_GIVEN), ("b", 0)):
        assignment.arrive(Arrival(token, rank, 2, "host", "pid 1"))
    assert assignment.ranks == {"b": 0, "a": 1}


def test_urls():
    url = parse_init_url("tcp://localhost:29500?rank=1", NOT_GIVEN, 2)
    assert (url.rank, url.world_size, url.host_and_port()) == (1, 2, ("localhost", 29500))
    assert with_group_name("file:///tmp/meet", "job 1") == "file:///tmp/meet?group_name=job%201"
    assert issubclass(ImpossibleRankError, ValueError)


def test_launchers_and_places():
    assert find_launcher({"OMPI_COMM_WORLD_RANK": "3"}).name == "mpirun (Open MPI)"
    nodes = ["node1", "node2", "node3", "node7", "gpu-05", "r1n08", "r1n09", "r2n08", "r2n09"]
    assert expand_nodelist("node[1-3,7],gpu-05,r[1-2]n[08-09]") == nodes
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    place = find_place(variables)
    assert (place.rank, place.world_size, place.address) == (1, 2, "127.0.0.1")
    assert local_rank_here({"SLURM_STEP_NODELIST": "a", "SLURM_LOCALID": "3"}) == 3


def test_a_report_that_is_withdrawn_while_it_is_read_is_none():
    class Deleting(HashStore):
        """Loses a key as soon as it was seen to be there."""

        def check(self, keys):
            found = super().check(keys)
            for key in keys:
                self.delete_key(key)
            return found

    store = Deleting()
    store.set_timeout(1.0)
    store.set(set_up_key(3), json.dumps(["g", "group 'g'", [0, 3]]))
    assert set_up_wait_of(3, store) == ("g", "group 'g'", (0, 3))
    store.delete_key(set_up_key(3))
    assert set_up_wait_of(3, store) is None
