"""What a machine may lack or forbid, and what is logged of it."""

import logging
import os

from worlds import worker_rank


def without_memfd():
    del os.memfd_create


def with_one_rank_that_does_not_read():
    if worker_rank() == 1:
        os.environ["MESHDIST_SINGLE_COPY"] = "0"


def logged():
    """Return a list that grows by the text of every record of meshdist."""
    records = Texts()
    logging.getLogger("meshdist").addHandler(records)
    return records.texts


class Texts(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())
