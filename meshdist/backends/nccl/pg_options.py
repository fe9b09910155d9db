"""The options of the nccl backend: by argument, and by torch's environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Torch's variables for it, that of today and that of old versions."""


class ProcessGroupNCCL:
    """Holds `Options`, as torch's class of this name does; groups of the nccl backend are made by `new_group`.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        ...     return dist.new_group(pg_options=options).pg_options is options  # other backends ignore them
        >>> dist.run(main, 2)
        [True, True]
    """

    def __init__(self) -> None:
        raise TypeError("ProcessGroupNCCL has only Options here; make a group with new_group(backend='nccl')")

    @dataclass(slots=True)
    class Options:
        """The `pg_options` of the nccl backend.

        Attributes:
            is_high_priority_stream: Run the group's calls on a stream of high priority, before kernels that wait for
                the GPU on other streams.

        Example:
            >>> from meshdist import ProcessGroupNCCL
            >>> ProcessGroupNCCL.Options()
            ProcessGroupNCCL.Options(is_high_priority_stream=False)
        """

        is_high_priority_stream: bool = False


def waits_on_host() -> bool:
    """Return whether the environment asks the host to wait for every call, as TORCH_NCCL_BLOCKING_WAIT=1 does."""
    for variable in _BLOCKING_WAIT:
        value = os.environ.get(variable, "").lower()
        if value:
            if value not in _TRUTH:
                raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
            return _TRUTH[value]
    return False


_TRUTH = {
    **dict.fromkeys(("1", "y", "yes", "t", "true"), True),
    **dict.fromkeys(("0", "n", "no", "f", "false"), False),
}
