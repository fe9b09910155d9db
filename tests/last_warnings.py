"""What a rank warns of at the end of a group."""

import logging

import meshdist as dist


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
    logging.getLogger("meshdist").addHandler(kept)
    try:
        if ranks is None or dist.get_rank() in ranks:
            use(group)
            end(group)
    finally:
        logging.getLogger("meshdist").removeHandler(kept)
    return kept.warnings
