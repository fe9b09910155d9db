"""Read a file on several ranks: each reads its own rows, in a different order in each epoch."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import meshdist as dist


def batches(rows: np.ndarray, epoch: int, size: int, group: dist.DeviceMesh) -> Iterator[np.ndarray]:
    """Yield this rank's batches; all ranks yield the same number, and a remainder of rows is left out."""
    order = np.random.default_rng(seed=epoch).permutation(len(rows))  # the same on every rank
    num_batches = len(rows) // (size * group.size())
    for batch in order[: num_batches * size * group.size()].reshape(num_batches, group.size(), size):
        yield rows[np.sort(batch[group.get_local_rank()])]  # reads these rows from the file, and no others


def main() -> None:
    dp = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    path = [None]
    if dp.get_rank() == 0:  # a file for this example
        path = [str(Path(tempfile.mkdtemp()) / "rows.npy")]
        np.save(path[0], np.arange(300.0).reshape(100, 3))
    dp.broadcast_object_list(path, src=0)  # no rank continues until the file exists

    rows = np.load(path[0], mmap_mode="r")  # maps the file and reads nothing yet
    for epoch in range(2):
        num_rows, total = 0, np.zeros(3)
        for batch in batches(rows, epoch, 8, dp):
            num_rows += len(batch)
            total += batch.sum(axis=0)
        count = dp.all_reduce(np.array(num_rows))
        mean = dp.all_reduce(total) / count
        if dp.get_rank() == 0:
            print(f"epoch {epoch}: {num_rows} of {count} rows here, mean {mean.round(1)}")
    dp.barrier()  # all ranks have read
    if dp.get_rank() == 0:
        Path(path[0]).unlink()
        Path(path[0]).parent.rmdir()


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
