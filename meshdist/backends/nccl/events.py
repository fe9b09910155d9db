"""Whether the device has come to an event."""

from __future__ import annotations

from typing import Any

from meshdist.errors import DistBackendError

# cudaErrorNotReady
_NOT_READY = 600


def has_come(cuda: Any, event: Any) -> bool:
    """Return whether the device has come to an event.

    CuPy's `Event.done` is False where the device is broken, as where it is busy.

    Args:
        cuda: The module cupy.cuda.
        event: One of its events.

    Raises:
        DistBackendError: The device is broken: an earlier kernel did what it must not; in CUDA's words.
    """
    status = int(cuda.runtime.eventQuery(event.ptr))
    if status in (0, _NOT_READY):
        return status == 0
    raise DistBackendError(
        f"the GPU cannot be used any more, CUDA says: {cuda.runtime.CUDARuntimeError(status)}; something that was"
        " enqueued before has failed, perhaps a kernel of the program: CUDA_LAUNCH_BLOCKING=1 shows which"
    )
