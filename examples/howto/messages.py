"""Messages between two ranks: blocking, asynchronous, in both directions, from any rank, and of unknown size."""

from typing import Any

import numpy as np

import meshdist as dist

DTYPES = ("float16", "float32", "float64")


def pass_on(rank: int, size: int) -> float:
    """Add up the ranks with a message that goes from each rank to the next, and back to rank 0."""
    total = np.zeros(1)
    if rank > 0:
        dist.recv(total, src=rank - 1)  # waits for the message
    total += rank
    dist.send(total, dst=(rank + 1) % size)
    if rank == 0:
        dist.recv(total, src=size - 1)
    return float(total[0])


def compute_meanwhile(rank: int, size: int) -> float:
    """Compute with an array while it travels to the next rank, and receive the array of the previous rank."""
    mine, theirs = np.full(1000, float(rank)), np.empty(1000)
    works = [dist.irecv(theirs, src=(rank - 1) % size), dist.isend(mine, dst=(rank + 1) % size)]
    own = mine.mean()  # reads `mine`: neither array may be changed before the waits have returned
    for work in works:
        work.wait()
    return float(theirs.mean() - own)


def exchange(rank: int, size: int) -> tuple[int, int]:
    """Send to one rank and receive from one, at the same time: with a partner, then around a ring."""
    mine, theirs = np.array([rank]), np.empty(1, int)
    partner = min(rank ^ 1, size - 1)  # 0 and 1, 2 and 3; with an odd number of ranks, the last is its own partner
    dist.sendrecv(mine, theirs, dst=partner, src=partner)
    ring = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("ring",))
    return int(theirs[0]), int(ring.shift(mine)[0])  # the array of the previous rank


def take_first_come(rank: int, size: int) -> list[float]:
    """Receive an array from every other rank on rank 0, which computes with each one as soon as it has arrived."""
    if rank > 0:
        dist.send(np.full(1000, float(rank)), dst=0)
        return []
    arrays = [np.empty(1000) for _ in range(1, size)]
    works = [dist.irecv(array, src=source) for source, array in enumerate(arrays, start=1)]
    means = [0.0] * len(works)
    for _ in arrays:
        number = dist.wait_any(works)  # the index of a receive that has ended, and has not been waited for
        works[number].wait()  # returns at once, or raises the error of this receive
        means[number] = float(arrays[number].mean())
    return means


def take_all(rank: int, size: int) -> list[str]:
    """Receive an array from every other rank on rank 0, which knows neither length, dtype nor tag of any."""
    if rank > 0:
        dist.send(np.zeros(10 * rank, DTYPES[rank % 3]), dst=0, tag=100 + rank)
        return []
    taken = []
    for source in range(1, size):
        info = dist.probe(source, tag=None)  # waits for the next message, with any tag, and leaves it there
        x = np.empty(info.count(), info.dtype)
        dist.recv(x, src=info.source, tag=info.tag)
        taken.append(f"{x.dtype}[{x.size}] from rank {info.source} with tag {info.tag}")
    return taken


def send_objects(rank: int) -> list[Any]:
    """Send a list of objects from rank 1 to rank 0, which passes a list of the same length."""
    objects: list[Any] = [{"lr": 0.1, "layers": [64, 10]}, "digits"] if rank == 1 else [None, None]
    if rank == 1:
        dist.send_object_list(objects, dst=0)
    if rank == 0:
        dist.recv_object_list(objects, src=1)
    return objects


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        raise SystemExit("start at least two ranks: meshrun -n 2 messages.py")
    total, difference, received = pass_on(rank, size), compute_meanwhile(rank, size), exchange(rank, size)
    means, taken, objects = take_first_come(rank, size), take_all(rank, size), send_objects(rank)
    if rank == 0:
        print(f"send and recv: the sum of the ranks is {total:.0f}")
        print(f"isend and irecv: mean received minus own mean: {difference:.0f}")
        print(f"sendrecv and shift: received from ranks {received[0]} and {received[1]}")
        print(f"wait_any: the means of the arrays of the other ranks are {means}")
        print(f"probe: {', '.join(taken)}")
        print(f"objects: {objects}")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
