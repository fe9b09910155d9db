"""Functions of the arrays and the backends that need no ranks."""

import numpy as np
import pytest

import meshdist as dist
from meshdist.arrays.device_types import cuda_number, device_type_of
from meshdist.arrays.overlap import repeats_elements, shared_pair
from meshdist.arrays.reduce_op import quiet_runner
from meshdist.backends.base import cut
from meshdist.backends.device_backends import check_rank_kind
from meshdist.backends.fake import of_equal_arrays
from meshdist.backends.mpi.aborting import exit_status
from meshdist.backends.mpi.environment import started_as
from meshdist.backends.mpi.precheck import merged, word_of
from meshdist.backends.nccl.comm_setup import spelled
from meshdist.backends.nccl.dtypes import Reduction, reduction_of
from meshdist.backends.threads import ThreadStore
from meshdist.runtime.call import Signature
from meshdist.runtime.peer_monitor import PeerMonitor


def test_device_types():
    assert device_type_of(np.zeros(3)) == "cpu"
    assert [cuda_number(device) for device in ("cuda:1", 2, "cpu")] == [1, 2, None]


def test_overlap_of_elements_and_of_arrays():
    assert repeats_elements(np.broadcast_to(np.zeros(1), (2,)))
    assert not repeats_elements(np.zeros((2, 3)).T[::-1])
    x = np.zeros((4, 2))
    assert shared_pair([x[0], x[2:], x[3]]) == (1, 2)
    assert shared_pair([x[:, 0], x[:, 1]]) is None


def test_quiet_runner_suppresses_overflow():
    largest = np.array([3e38], np.float32)
    with np.errstate(all="raise"):
        assert quiet_runner()(np.add, largest, largest) == np.array([np.inf], np.float32)


def test_buckets_hold_at_most_so_many_bytes():
    assert cut([3, 4, 5, 20, 1], most=10) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]


def test_backend_threads_is_for_threads():
    assert check_rank_kind("gloo", ranks_are_threads=False) is None
    refusal = "the 'threads' backend is for ranks that are threads of meshdist.run; for processes use 'gloo'"
    assert check_rank_kind("threads", ranks_are_threads=False) == refusal


def test_reduction_of_equal_arrays():
    assert of_equal_arrays(dist.ReduceOp.SUM, np.array([1, 2]), 5).tolist() == [5, 10]


def test_exit_status():
    assert [exit_status(code) for code in (None, 0, 3, 259, True, "it failed")] == [0, 0, 3, 3, 1, 1]


def test_mpi_launcher_of_several_ranks():
    started = started_as({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert started == ("the mpiexec of MPICH or Intel MPI (PMI_SIZE=2)", "mpich", 2)
    assert started_as({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None


def test_precheck_words_are_combined():
    here, there = (word_of(Signature("barrier()"), may_block) for may_block in (True, False))
    assert merged(here, there) == there


def test_nccl_versions_and_datatypes():
    assert spelled(22703) == "2.27.3"
    assert reduction_of(np.dtype("complex64"), dist.ReduceOp.SUM) == Reduction(dtype=7, op=0, parts=2)
    assert reduction_of(np.dtype("complex64"), dist.ReduceOp.PRODUCT) is None, "it is not that of the parts"
    assert reduction_of(np.dtype("int32"), dist.ReduceOp.BXOR) is None


def test_peer_monitor_checks_some_ranks_in_turn():
    monitor = PeerMonitor()
    assert [monitor.is_due(), monitor.is_due()] == [True, False]
    assert monitor.turn(range(20)) == [*range(16)]
    assert monitor.turn(range(20)) == [*range(16, 20), *range(12)]


@pytest.mark.parametrize("ranks", [(0, 1)])
def test_a_group_has_one_room(ranks):
    store = ThreadStore()
    assert store.room("a group", ranks) is store.room("a group", ranks)
