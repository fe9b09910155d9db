"""What a measurement was made on."""

from __future__ import annotations

import os

from meshdist.system.versions import versions as versions_here
from sidebyside.libraries import Library


def give_arrays_pages_of_their_own() -> None:
    """Let arrays in processes begun from now on be memory of their own, as those that a program makes once.

    glibc would give arrays of some MiB the small pages that earlier ones, and the checks of their results, have left:
    on those they take up to twice as long as on large pages.
    """
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")


def describe(versions: dict[Library, str]) -> dict[str, str]:
    """Return processor, cores, kernel, and the versions of Python, NumPy and the libraries."""
    here = versions_here()
    del here["meshdist"]  # which is among the libraries, if it is measured
    return here | {library.title: version for library, version in versions.items()}
