"""python -m meshdist: say which commands there are."""

from __future__ import annotations

import sys

COMMANDS = "bench, checkpoint, debug, doctor, launch and topology"

if __name__ == "__main__":
    print(f"start ranks with `meshrun`; other commands: python -m meshdist.NAME, with NAME one of {COMMANDS}")
    sys.exit(2 if sys.argv[1:] else 0)
