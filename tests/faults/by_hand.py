"""Ranks that are started by hand: nobody ends them when one fails."""

from __future__ import annotations

import os
import subprocess
import sys

# What is said of a rank that was killed: of one of another host, or after its parent has asked on a kernel before 6.15,
# nobody knows more than that it is dead.
# A connection with unread data is reset.
KILLED = "(was killed by SIGKILL|has died(, or its connection was reset)?)"


def run_ranks(script, arguments, size, **variables):
    """Run a script on ranks that are started by hand; return each one's exit status, stdout and stderr."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        texts = [rank.communicate(timeout=40) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]
