"""The script whose launch is timed, with mpi4py: a 2-d grid, one Allreduce along an axis, the end."""

import numpy as np
from mpi4py import MPI

grid = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.Get_size() // 2, 2])
tp = grid.Sub([False, True])
x = np.ones(1)
tp.Allreduce(MPI.IN_PLACE, x)
assert x[0] == 2
MPI.Finalize()
