"""Rank 1 makes one step fewer than rank 0 and ends: meshrun -n 2 one_step_less.py"""

import numpy as np

import meshdist as dist


def main():
    dist.init_process_group()
    for _ in range(3 - dist.get_rank()):
        dist.all_reduce(np.ones(4))
    dist.destroy_process_group()


main()
