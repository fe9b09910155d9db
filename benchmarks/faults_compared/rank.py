"""One rank: python -m faults_compared.rank LIBRARY FAULT FOLDER URL [RANK]; else its launcher says which."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

from faults_compared.fault import TIMEOUT_S
from faults_compared.faults import FAULTS
from faults_compared.witness import Witness


def main() -> None:
    """Run the fault; then be there until the driver ends this process, so that the end is no news to the others."""
    name, fault_name, folder, url, *rest = sys.argv[1:]
    fault = FAULTS[fault_name]
    library = importlib.import_module(f"faults_compared.with_{name}").library()
    rank = int(rest[0]) if rest else int(os.environ["RANK"]) if name != "openmpi" else library.rank
    witness = Witness(Path(folder), rank, url)
    library.rank, library.size = rank, fault.ranks
    if fault.joins:
        library.join(rank, fault.ranks, TIMEOUT_S, url)
        library.barrier()
    fault.body(library, witness)
    time.sleep(120)


if __name__ == "__main__":
    main()
