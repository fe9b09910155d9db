"""What a measurement was made on."""

from __future__ import annotations

from meshdist.system.versions import versions as versions_here
from sidebyside.libraries import Library


def describe(versions: dict[Library, str]) -> dict[str, str]:
    """Return processor, cores, kernel, and the versions of Python, NumPy and the libraries."""
    here = versions_here()
    del here["meshdist"]  # which is among the libraries, if it is measured
    return here | {library.title: version for library, version in versions.items()}
