"""A backend of Ray Train: its workers are the ranks of a world."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

from meshdist.ray.meeting import DEFAULT_JOIN_TIMEOUT_S
from meshdist.ray.rank_task import Place, enter, leave, local_ranks, my_seat
from meshdist.system.deadline import DEFAULT_TIMEOUT_S, Timeout, seconds

# Ray ends the workers next, whether they have left or not.
_LEAVE_S = 10.0

logger = logging.getLogger(__name__)


@dataclass
class MeshdistConfig(BackendConfig):  # type: ignore[misc]
    """The workers of a trainer of Ray Train are the ranks of a world: `backend_config=MeshdistConfig()`.

    The training function runs with an initialized process group, whose ranks are Train's world ranks. When Train starts
    failed workers again, they have a new world. A worker has the GPUs that Ray has assigned to it alone.

    Attributes:
        timeout: How long a call may wait for the other ranks: a timedelta or seconds. 30 minutes if None.
        join_timeout: How long the workers wait for each other at the start. Three minutes if None.

    Example:
        ::

            def train_fn():
                total = dist.all_reduce(np.array(dist.get_rank())).item()
                ray.train.report({"total": total})

            trainer = DataParallelTrainer(
                train_fn,
                backend_config=meshdist.ray.MeshdistConfig(timeout=60),
                scaling_config=ScalingConfig(num_workers=4),
            )
            trainer.fit()
    """

    timeout: Timeout | None = None
    join_timeout: Timeout | None = None

    def __post_init__(self) -> None:
        seconds(self.timeout)
        seconds(self.join_timeout)

    @property
    def backend_cls(self) -> type[MeshdistBackend]:
        """What Train calls when workers have started, and before they end."""
        return MeshdistBackend

    def to_dict(self) -> dict[str, Any]:
        """Return the timeouts in seconds, for Train's records."""
        return {
            "timeout": seconds(self.timeout, DEFAULT_TIMEOUT_S),
            "join_timeout": seconds(self.join_timeout, DEFAULT_JOIN_TIMEOUT_S),
        }


class MeshdistBackend(Backend):  # type: ignore[misc]
    """Makes the world of a group of workers, and ends it."""

    def on_start(self, worker_group: Any, backend_config: MeshdistConfig) -> None:
        size, name = len(worker_group), f"train {secrets.token_hex(8)}"
        local = local_ranks([seat.node_id for seat in worker_group.execute(my_seat)])
        timeouts = backend_config.to_dict()
        places = [
            Place(name, rank, size, local[rank], timeouts["join_timeout"], timeouts["timeout"]) for rank in range(size)
        ]
        ray.get([worker_group.execute_single_async(place.rank, enter, place, "MeshdistConfig") for place in places])

    def on_shutdown(self, worker_group: Any, backend_config: MeshdistConfig) -> None:
        try:
            ray.get(worker_group.execute_async(leave), timeout=_LEAVE_S)
        except GetTimeoutError:
            logger.warning("MeshdistConfig: some of the workers have not left their world within %g s", _LEAVE_S)
