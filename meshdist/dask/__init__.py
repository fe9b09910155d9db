"""Jobs of meshdist on the workers of a Dask cluster: one rank on each worker.

    results = meshdist.dask.run(client, train, x)

Raises:
    ImportError: `distributed` is missing.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("distributed") is None:
    raise ImportError(
        "meshdist.dask needs Dask's distributed; install it: pip install distributed 'dask[array]'", name="distributed"
    )

from meshdist.dask.dask_job import run
from meshdist.dask.job_errors import RankError, WorkerLostError
from meshdist.dask.partitions import from_dask

__all__ = ["RankError", "WorkerLostError", "from_dask", "run"]


def __dir__() -> list[str]:
    return sorted(__all__)
