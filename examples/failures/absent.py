"""Rank 1 is still loading its data while the others wait for it: meshrun -n 3 absent.py"""

import time

import numpy as np

import meshdist as dist


def load_data():
    time.sleep(8.0)


def main():
    dist.init_process_group(timeout=3.0)
    dist.barrier()
    if dist.get_rank() == 1:
        load_data()
    dist.all_reduce(np.ones(4))
    dist.destroy_process_group()


main()
