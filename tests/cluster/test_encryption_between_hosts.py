"""What can be read on the cable between two hosts, which are network namespaces."""

import sys

import pytest

pytestmark = pytest.mark.timeout(120)

LISTENER = """
import select, socket, sys
marker = b"who reads this?!"
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
print("listening", flush=True)
heard = total = 0
while True:
    ready, _, _ = select.select([packets, sys.stdin], [], [], 60)
    if packets in ready:
        packet = packets.recv(1 << 17)
        total, heard = total + len(packet), heard + (marker in packet)
    elif sys.stdin in ready:
        break
print(int(total > 10_000), heard > 0)
"""

RANK = """
import numpy as np
import meshdist as dist
marker = b"who reads this?!"
dist.init_process_group("gloo", timeout=30)
rank = dist.get_rank()
if rank == 0:
    dist.send(np.frombuffer(marker * 64, np.uint8), 1)
else:
    got = np.zeros(len(marker) * 64, np.uint8)
    dist.recv(got, 0)
    assert got.tobytes() == marker * 64
x = np.frombuffer(marker * 2_000, np.uint8).copy()
dist.broadcast(x, 0)
objects = [marker * 8]
dist.broadcast_object_list(objects, 0)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("setting", "can_be_read"), [("", False), ("off", True)])
def test_arrays_and_objects_cannot_be_read_on_the_cable(two_hosts, tmp_path, setting, can_be_read):
    (tmp_path / "rank.py").write_text(RANK)
    listener = two_hosts.start(1, [sys.executable, "-c", LISTENER], tmp_path)
    assert listener.stdout.readline() == "listening\n"
    ranks = [
        two_hosts.start(
            rank,
            [sys.executable, "rank.py"],
            tmp_path,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR=two_hosts.addresses[0],
            MASTER_PORT="29512",
            MESHDIST_SECRET="s",
            MESHDIST_ENCRYPTION=setting,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        assert ("connections between hosts are not encrypted" in err) == (can_be_read and rank is ranks[0])
    out, _ = listener.communicate("\n", timeout=30)
    assert out.split() == ["1", str(can_be_read)]
