"""One fault at a random moment of random programs, and what the ranks have to say about it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

import meshdist as dist
from soaking.kinds import Side
from soaking.player import Player
from soaking.program import Step

FAULTS = ("kill", "stop", "raise", "exit", "mismatch", "interrupt")
LUCKLESS = "out of luck"
# Calls of a whole group, which compare what the ranks pass.
_COMPARED = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter_tensor", "all_gather_into_tensor")
_KINDS = ("DistBackendError", "DistTimeoutError", "DistNetworkError", "DistStoreError", "PeerConnectionError")
_UNDER_WAY_S = 60.0
_LONGEST_PAUSE_S = 0.02
_AGAIN_S = 0.01  # until a Ctrl-C that was dropped is repeated
_SHOWN_S = 1.0  # until the stacks of a rank that noticed nothing are on its stderr


@dataclass(frozen=True)
class Trial:
    """One world and its fault.

    Attributes:
        number: What all of it follows from, with the seed; also the number of its first program.
        fault: One of FAULTS.
        victim: The rank that it befalls.
        at: After how many calls of that rank.
        size: Of the world.
        timeout_s: Of its groups.
    """

    seed: int
    number: int
    fault: str
    victim: int
    at: int
    size: int
    timeout_s: float

    @property
    def bound_s(self) -> float:
        """Within how long the others have to know."""
        return self.timeout_s + 1.0 if self.fault == "stop" else 1.0


@dataclass(frozen=True)
class End:
    """How the calls of a rank ended; `at_s` is of time.monotonic(), which all processes of a host share."""

    at_s: float
    kind: str
    message: str


def draw(seed: int, number: int, size: int, timeout_s: float, faults: list[str]) -> Trial:
    """Return the trial of a number."""
    rng = np.random.default_rng([seed, number, 1])
    return Trial(
        seed,
        number,
        faults[number % len(faults)],
        int(rng.integers(size)),
        int(rng.integers(1, 60)),
        size,
        timeout_s,
    )


def play(trial: Trial, rank: int, port: int, variables: dict[str, str], line: Connection) -> None:
    """Be one rank of a trial: play until it fails, say how, and end with that."""
    os.environ.update(variables)
    faulthandler.register(signal.SIGUSR2)  # shows the stacks of all threads
    sys.unraisablehook = _interrupt_again
    # In the group of a shell that ends meanwhile, the kernel would continue a stopped rank.
    os.setpgrp()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_UNDER_WAY_S)
    left = trial.at

    def start() -> None:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.size, timeout=trial.timeout_s)

    def around(step: Step, side: Side) -> Side:
        nonlocal left
        left -= 1
        if rank != trial.victim or left > 0:
            return side
        return _befall(trial, step, side, line) if left == 0 or trial.fault == "mismatch" else side

    try:
        start()
        player = Player(trial.seed, start, around)
        number = trial.number
        while True:
            player.play(number)
            number += 1
    except BaseException as error:
        line.send(End(time.monotonic(), type(error).__name__, str(error)))
        raise


def _interrupt_again(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that Python has dropped, as it does in callbacks of its own, such as those of weak references."""
    sys.__unraisablehook__(lost)
    if isinstance(lost.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def _befall(trial: Trial, step: Step, side: Side, line: Connection) -> Side:
    if trial.fault == "mismatch":
        # The first call that is compared, and that others take part in.
        is_first_turn = side.key[-1] == 0  # its arrays are those of the later ones
        if step.kind not in _COMPARED or len(side.members) == 1 or not is_first_turn:
            return side
        line.send(time.monotonic())
        other = (*step.shape, 3) if 0 not in step.shape else (5,)  # no elements are none in any shape
        return replace(side, step=replace(step, shape=other, rounds=1))
    line.send(time.monotonic())
    if trial.fault == "raise":
        raise RuntimeError(LUCKLESS)
    if trial.fault == "exit":
        sys.exit(0)
    return side


class Ranks:
    """The processes of a trial, seen from outside."""

    def __init__(self, trial: Trial, variables: Callable[[int], dict[str, str]]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["numpy", "meshdist.backends.gloo.backend", "soaking.faults"])
        self.trial = trial
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Any] = []
        self._lines: list[Connection] = []
        for rank in range(trial.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=play, args=(trial, rank, self._store.port, variables(rank), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._lines.append(ours)

    def run(self) -> tuple[float, dict[int, End]]:
        """Have the fault happen; return when it did, and how the ranks ended that did so in time."""
        trial = self.trial
        first = wait([self._lines[trial.victim]], _UNDER_WAY_S)
        told = self._lines[trial.victim].recv() if first else None
        if not isinstance(told, float):
            return 0.0, {trial.victim: told} if isinstance(told, End) else {}
        rng = np.random.default_rng([trial.seed, trial.number, 2])
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
        if trial.fault in signals:
            time.sleep(float(rng.random()) * _LONGEST_PAUSE_S)
            told = time.monotonic()
            os.kill(self.processes[trial.victim].pid, signals[trial.fault])
        return told, self._ends(told + trial.bound_s + 20.0)

    def _ends(self, until_s: float) -> dict[int, End]:
        ends: dict[int, End] = {}
        silent = dict(enumerate(self._lines))
        if self.trial.fault in ("kill", "stop"):
            del silent[self.trial.victim]
        while silent:
            ready = wait(list(silent.values()), max(0.0, until_s - time.monotonic()))
            if not ready:
                self._show(silent)
                return ends
            for rank in [rank for rank, line in silent.items() if line in ready]:
                try:
                    told = silent[rank].recv()
                except EOFError:
                    told = End(time.monotonic(), "no word", "the process ended without one")
                if isinstance(told, End):
                    ends[rank] = told
                    del silent[rank]
        return ends

    def _show(self, ranks: Collection[int]) -> None:
        """Have ranks write to their stderr what they are doing."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR2)
        if ranks:
            time.sleep(_SHOWN_S)

    def close(self, timeout_s: float) -> list[int]:
        """End what has not ended; return the ranks that did not end by themselves."""
        victim = self.processes[self.trial.victim]
        if self.trial.fault == "stop":
            victim.kill()
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        left = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self._show(left)
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for line in self._lines:
            line.close()
        self._store.close()
        return left


def _bound_s(trial: Trial, end: End) -> float:
    """Return within how long a rank has to know; one that has begun the next world waits for the others to come."""
    begins = end.message.startswith("init_process_group")
    return trial.timeout_s + 1.0 if begins else trial.bound_s


def verdict(trial: Trial, pids: list[int], began_s: float, ends: dict[int, End], slack_s: float) -> list[str]:
    """Return what is not as it has to be, a sentence each."""
    if not began_s:
        return [f"the fault never happened: {ends}"]
    wrong = []
    for rank in range(trial.size):
        if rank == trial.victim and trial.fault in ("kill", "stop", "raise", "exit"):
            continue
        end = ends.get(rank)
        if end is None:
            wrong.append(f"rank {rank} did not notice within {trial.bound_s + 20:g} s")
        elif end.at_s - began_s > _bound_s(trial, end) + slack_s:
            wrong.append(f"rank {rank} noticed after {end.at_s - began_s:.2f} s: {end}")
        elif rank == trial.victim and trial.fault == "interrupt":
            if end.kind != "KeyboardInterrupt":
                wrong.append(f"rank {rank} was interrupted, but raised {end}")
        elif end.kind not in _KINDS:
            wrong.append(f"rank {rank} raised {end}")
        elif trial.fault == "mismatch" and "the ranks disagree" in end.message:
            continue  # which names all calls; ranks are those of the group
        elif rank != trial.victim and not names(end.message, trial.victim, pids[trial.victim]):
            wrong.append(f"rank {rank} does not name rank {trial.victim} (pid {pids[trial.victim]}): {end}")
    return wrong


def names(message: str, rank: int, pid: int) -> bool:
    """Return whether a message speaks of a rank, and not only of the one that it comes from."""
    others = re.sub(r"on group '[^']*' \(rank \d+ of \d+\)", "", message)
    return bool(re.search(rf"\bpid {pid}\b|\brank {rank}\b|\branks [\d, ]*(and )?\b{rank}\b", others))
