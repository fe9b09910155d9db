"""Backend `mpi`: the ranks of an MPI job, through mpi4py.

Collectives are those of the MPI library, on a communicator of the group's own. Before each, the ranks of the group meet
by messages of a few bytes and compare their calls: so a rank that does not come, fails, or calls something else is an
error on all of them and never a hang, and the MPI library may then block as it likes. Messages carry a header of ours,
since MPI compares neither sizes nor dtypes and has smaller tags.
"""
