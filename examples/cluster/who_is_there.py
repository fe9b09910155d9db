"""Show the ranks of a job and their hosts: run this first on a new cluster.

    meshrun -n 4 examples/cluster/who_is_there.py

It needs no backend that reaches beyond a host: the ranks meet at the store, and tell each other where they are.
"""

import os
import socket
import sys

from meshdist.bootstrap.rendezvous import rendezvous


def main() -> None:
    """Meet the other ranks; rank 0 prints a line for each host."""
    store, rank, world_size = rendezvous("env://", timeout=120)
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{other}").decode() for other in range(world_size)]
    if rank == 0:
        print(f"{world_size} ranks, restart {os.environ.get('RESTART_COUNT', '0')}, Python {sys.version.split()[0]}")
        for host in dict.fromkeys(hosts):
            print(f"{host}: ranks {', '.join(str(other) for other in range(world_size) if hosts[other] == host)}")
        for other in range(1, world_size):  # rank 0 may keep the store, which the others still ask
            store.get(f"done/{other}")
    else:
        store.set(f"done/{rank}", "")
    store.close()


if __name__ == "__main__":
    main()
