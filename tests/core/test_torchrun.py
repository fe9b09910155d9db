"""Ranks of torchrun, whose launcher keeps the port of the environment for a store of torch."""

import os
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshdist as dist
from meshdist.bootstrap.rendezvous import rendezvous
from meshdist.bootstrap.torchrun import meeting_file

pytestmark = pytest.mark.timeout(60)
VARIABLES = {
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


@pytest.fixture
def torchrun(monkeypatch, tmp_path):
    """The environment of a rank that torchrun started, all but its number; whoever listens at the port is silent."""
    for name in ("MESHDIST_AGENT_STORE", "MESHDIST_SECRET", "RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as torch_store:
        for name, value in {**VARIABLES, "MASTER_PORT": str(torch_store.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        yield tmp_path / f"meshdist-torchrun-{os.getuid()}"


def met():
    """Return the stores of two ranks, after they have used them."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: rendezvous("env://", rank, 2, 20), (0, 1)))
    assert [place for _, *place in found] == [[0, 2], [1, 2]]
    stores = [store for store, *_ in found]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    return stores


def test_ranks_of_a_host_meet_in_a_private_file_and_leave_nothing(torchrun):
    for _ in range(2):
        stores = met()
        assert stat.S_IMODE(torchrun.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in torchrun.iterdir()] == [0o600]
        for store in stores:
            store.close()
        assert list(torchrun.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("TORCHELASTIC_RUN_ID", "another"),
        ("MASTER_PORT", "1"),
    ],
)
def test_another_start_or_run_meets_in_another_file(torchrun, monkeypatch, name, value):
    first = meeting_file()
    assert meeting_file() == first
    monkeypatch.setenv(name, value)
    assert meeting_file() != first


def test_ranks_have_error_files_of_their_own_and_meet(torchrun, monkeypatch):
    def file_of(run, rank):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/{run}/attempt_0/{rank}/error.json")
        return meeting_file()

    assert file_of("run", 0) == file_of("run", 1) != file_of("another", 0)


def test_files_of_runs_long_past_are_removed(torchrun):
    torchrun.mkdir(0o700)
    old, young = torchrun / "old", torchrun / "young"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, time.time() - 48 * 3600))
    for store in met():
        store.close()
    assert list(torchrun.iterdir()) == [young]


def test_a_directory_that_others_may_use_is_refused(torchrun):
    torchrun.mkdir()
    torchrun.chmod(0o755)
    with pytest.raises(dist.DistStoreError, match=r"must be a directory of this user .*got drwxr-xr-x.*TMPDIR"):
        rendezvous("env://", 0, 2, 20)
    torchrun.rmdir()
    torchrun.symlink_to(torchrun.parent)
    with pytest.raises(dist.DistStoreError, match="must be a directory of this user"):
        rendezvous("env://", 0, 2, 20)


@pytest.mark.parametrize("num_hosts", ["2", ""])
def test_on_several_hosts_the_way_out_is_said_at_once(torchrun, monkeypatch, num_hosts):
    monkeypatch.setenv("GROUP_WORLD_SIZE", num_hosts)
    with pytest.raises(ValueError, match=r"torchrun .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*meshrun"):
        dist.init_process_group(rank=0, world_size=2)
    assert not dist.is_initialized()


def test_a_store_of_the_launcher_is_used(torchrun, monkeypatch):
    with dist.TCPStore("127.0.0.1", 0, is_master=True) as agent:
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        monkeypatch.setenv("MESHDIST_AGENT_STORE", f"127.0.0.1:{agent.port}")
        for store in met():
            store.close()
    assert not torchrun.exists()
