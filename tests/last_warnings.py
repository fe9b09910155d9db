"""What a rank warns of at the end of a group."""

import logging
import threading

import meshdist as dist

_LOGGER, _changing = logging.getLogger("meshdist"), threading.Lock()


class Kept(logging.Handler):
    """Keeps the warnings of this rank: ranks that are threads share the logger."""

    def __init__(self):
        super().__init__()
        self.rank, self.warnings = dist.get_rank(), []

    def emit(self, record):
        if record.levelno >= logging.WARNING and record.rank == self.rank:
            self.warnings.append(record.getMessage())


def warnings_at_the_end(use, ranks=None, end=dist.destroy_process_group):
    """Return what this rank warns of at the end of a group of `ranks`, or of all, after `use` of it."""
    group, kept = dist.new_group(ranks, group_desc="pair"), Kept()
    # A new list: while a thread goes through the handlers, one behind another that is removed is passed over.
    with _changing:
        _LOGGER.handlers = [*_LOGGER.handlers, kept]
    try:
        if ranks is None or dist.get_rank() in ranks:
            use(group)
            end(group)
    finally:
        with _changing:
            _LOGGER.handlers = [handler for handler in _LOGGER.handlers if handler is not kept]
    return kept.warnings
