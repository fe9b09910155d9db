"""Ranks on two hosts, which are network namespaces, and between them the link with faults of tests/cluster."""

from __future__ import annotations

import contextlib
import random
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_PORT = 29513
FAULTS = ("delay", "loss", "reordering", "cut", "one-way cut", "reset")
# The ranks have to survive every fault: of the 8 s after which a silent host is given up, each is only a part, and
# before the next one the kernel sends again what was lost.
_LONGEST_FAULT_S = 4.0
_PAUSES_S = (1.5, 3.0)


@contextlib.contextmanager
def faulty_hosts() -> Iterator[Any]:
    """Make two hosts whose only connection is a link with faults, and remove them at the end of the block.

    Raises:
        PermissionError: Namespaces or tun devices cannot be made here.
    """
    sys.path.insert(0, str(_ROOT / "tests" / "cluster"))
    from faulty_link import FaultyHosts

    hosts = FaultyHosts()
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


def play_over(hosts: Any, rank_arguments: list[str], ranks: int, seed: int) -> tuple[int, Counter[str]]:
    """Start ranks, half of them on each host, and spoil the link until they end.

    Args:
        hosts: Of `faulty_hosts`.
        rank_arguments: Of soaking.rank, after the rank.
        ranks: How many.
        seed: Of the faults.

    Returns:
        How many ranks failed, and how often there was each fault.
    """
    from two_hosts import clean_environment

    secret = secrets.token_hex(16)
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": hosts.addresses[0]}
        environment = clean_environment(**place, MASTER_PORT=str(_PORT), MESHDIST_SECRET=secret)
        command = [sys.executable, "-m", "soaking.rank", str(rank), *rank_arguments]
        within = ["ip", "netns", "exec", hosts.names[2 * rank // ranks]]
        processes.append(subprocess.Popen([*within, *command], cwd=_ROOT / "benchmarks", env=environment))
    ended = threading.Event()
    faults: Counter[str] = Counter()
    spoiler = threading.Thread(target=_spoil, args=(hosts.link, random.Random(seed), ended, faults))
    hosts.link.spared_ports = {_PORT}
    spoiler.start()
    try:
        num_failed = sum(process.wait() != 0 for process in processes)
    finally:
        ended.set()
        spoiler.join()
        for process in processes:
            process.kill()
            process.wait()
    return num_failed, faults


def _spoil(link: Any, choice: random.Random, ended: threading.Event, faults: Counter[str]) -> None:
    number = 0
    while not ended.wait(choice.uniform(*_PAUSES_S)):
        fault = FAULTS[number % len(FAULTS)]
        number += 1
        if fault == "delay":
            link.delay_s = 0.1 * choice.random()
        elif fault == "loss":
            link.loss = 0.1 * choice.random()
        elif fault == "reordering":
            link.jitter_s = 0.02 * choice.random()
        elif fault == "cut":
            link.cut()
        elif fault == "one-way cut":
            link.cut(choice.randrange(2))
        else:
            link.reset(*choice.choice([(), (0,), (1,)]))
        ended.wait(choice.random() * _LONGEST_FAULT_S)
        link.mend()
        faults[fault] += 1
