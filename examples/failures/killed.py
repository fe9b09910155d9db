"""Rank 1 is killed, as the kernel does when memory runs out: meshrun -n 3 killed.py"""

import os
import signal

import numpy as np

import meshdist as dist


def main():
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(np.ones(4))
    dist.destroy_process_group()


main()
