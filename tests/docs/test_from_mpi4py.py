"""docs/from-mpi4py.md: every name of mpi4py's tutorial has a row, and every name of meshdist in a row exists."""

import re
from pathlib import Path

import meshdist

PAGE = (Path(__file__).parents[2] / "docs" / "from-mpi4py.md").read_text()
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
# What https://mpi4py.readthedocs.io/en/stable/tutorial.html calls, and the overview before it.
TUTORIAL = """
COMM_WORLD Get_rank Get_size send recv isend irecv wait Send Recv Isend Irecv Wait ANY_SOURCE ANY_TAG Status
Probe Iprobe bcast Bcast scatter Scatter Scatterv gather Gather Gatherv Allgather Allgatherv allgather Reduce
reduce Allreduce allreduce Alltoall Alltoallv Scan Exscan Barrier Reduce_scatter Sendrecv Sendrecv_replace
Send_init Split Dup Create_cart Sub Shift Get_coords PROC_NULL IN_PLACE DOUBLE Create_vector File Write_at_all
Spawn Get_parent Disconnect Win Put Get Fence SUM Op Waitall Test Split_type Compute_dims Get_processor_name
Wtime Abort Finalize Neighbor_alltoall MPIPoolExecutor Allocate Lock Unlock Set_view Write_all Commit Close ROOT
Get_size to_numpy_dtype py2f test
"""


def test_every_name_of_the_tutorial_has_a_row():
    named = {name for theirs, _ in ROWS for name in re.findall(r"\w+", theirs)}
    assert sorted(set(re.findall(r"\w+", TUTORIAL)) - named) == []


def test_every_name_of_meshdist_exists():
    names = {name for _, ours in ROWS for name in re.findall(r"\bdist\.(\w+)", ours)}
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(meshdist, name)] == []
    methods = {name for _, ours in ROWS for name in re.findall(r"\bmesh(?:\[[^]]*\])?\.(\w+)", ours)}
    assert {name for name in methods if not hasattr(meshdist.DeviceMesh, name)} <= {"mesh"}
