"""A group that is given a device meets for it at once, and not at its first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdist.backends.device_backends import by_device
from meshdist.backends.registry import entry_of
from meshdist.devices import cuda_number

if TYPE_CHECKING:
    from meshdist.process_group import ProcessGroup


def connect_to_device(group: ProcessGroup, of: str) -> None:
    """Have all ranks of a group meet now, if it was given a GPU by `device_id` and carries arrays there by itself.

    Args:
        group: The group.
        of: The function that the user called.

    Raises:
        DistBackendError: The device is not there, or the ranks cannot meet.
        DistTimeoutError: Some ranks did not come.
    """
    backend = by_device(group.backend_name).get("cuda")
    if cuda_number(group.device_id) is None or backend is None or "cuda" not in entry_of(backend).devices:
        return
    calls = group.device_calls(of)
    if calls is not None:
        calls.connect(group.where(of))
