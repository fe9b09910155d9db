"""Two ranks call two groups in different orders: meshrun -n 2 deadlock.py"""

import numpy as np

import meshdist as dist


def main():
    dist.init_process_group()
    rows = dist.new_group([0, 1], timeout=3.0, group_desc="rows")
    columns = dist.new_group([0, 1], timeout=3.0, group_desc="columns")
    first, second = (rows, columns) if dist.get_rank() == 0 else (columns, rows)
    dist.barrier()
    first.all_reduce(np.ones(4))
    second.all_reduce(np.ones(4))
    dist.destroy_process_group()


main()
