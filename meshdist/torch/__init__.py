"""The `meshdist` backend of torch.distributed: its collectives of CPU tensors, by meshdist.

    import meshdist.torch

    torch.distributed.init_process_group("meshdist")

Importing this module registers the backend. The script runs under torchrun or meshrun; DistributedDataParallel, FSDP2,
DTensor and functional collectives use it like any other backend.

Raises:
    ImportError: torch is missing, or a version that the backend does not support.
"""

from __future__ import annotations

from meshdist.torch.requirements import check_torch

check_torch()

from meshdist.torch.conversion import from_torch, to_torch  # noqa: E402
from meshdist.torch.group_creation import register, use_launchers_store  # noqa: E402 - needs a torch that was checked

register()
use_launchers_store()

__all__ = ["from_torch", "to_torch"]


def __dir__() -> list[str]:
    return sorted(__all__)
