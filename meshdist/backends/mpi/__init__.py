"""The `mpi` backend: the ranks of an MPI job, through mpi4py.

Collectives are those of the MPI library, on a communicator of the group. Before each one, the ranks compare their calls
by messages of a few bytes (the precheck), so that a rank that is missing, has failed or calls something else is an
error on all ranks and never a hang; the MPI call that follows may then block. Point-to-point messages carry a header of
ours, since MPI compares neither sizes nor dtypes and has a smaller range of tags.
"""
