"""The same programs under torch.distributed with Gloo and under meshdist: the same values, on every rank.

Each program runs once on torch and on every backend of meshdist. Where the two differ on purpose, `accepted.py` says
why. Without torch these tests are skipped.
"""

from __future__ import annotations

import re

import programs_alone
import programs_calls
import programs_errors
import programs_groups
import programs_movement
import programs_reductions
import pytest
from accepted import ACCEPTED, NOT_COMPARED, accepted, name_of
from agreement import disagreements
from both_sides import Outcomes, Program, record
from torch_worlds import TorchWorlds
from worlds import BACKENDS, WorkerSet, Worlds

import meshdist

pytest.importorskip("ml_dtypes")

SIZES = (2, 3, 4)
MODULES = (programs_movement, programs_reductions, programs_calls, programs_groups, programs_errors)
PROGRAMS = [program for module in MODULES for program in module.PROGRAMS]


@pytest.mark.filterwarnings("ignore")  # NumPy's of NaN, and those of calls from outside a group
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "gloo-hosts"])  # to save time
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_every_rank_gets_what_torch_gives(
    program: Program, backend: str, worlds: Worlds, torch_worlds: TorchWorlds
) -> None:
    found: dict[str, str] = {}
    for size in SIZES:
        theirs = torch_worlds.outcomes(program, size)
        ours = [outcomes for outcomes, _ in worlds.world(backend, size).run(record, "meshdist", program)]
        found = {**disagreements(ours, theirs), **found}
    _judge(program, found)


@pytest.mark.parametrize("program", programs_alone.PROGRAMS, ids=name_of)
def test_a_process_alone_gets_what_torch_gives(program: Program, worlds: Worlds, torch_worlds: TorchWorlds) -> None:
    with WorkerSet(worlds.nursery, 1) as workers:
        workers.start(record, "meshdist", program)
        ours: list[Outcomes] = [workers.gather()[0][0]]
    _judge(program, disagreements(ours, torch_worlds.alone(program)))


def _judge(program: Program, found: dict[str, str]) -> None:
    patterns = accepted(program)
    unexplained = {
        label: words for label, words in found.items() if not any(re.fullmatch(pattern, label) for pattern in patterns)
    }
    text = "\n".join(f"{label}: {words}" for label, words in list(unexplained.items())[:20])
    assert not unexplained, f"{len(unexplained)} cases of {name_of(program)} differ from torch:\n{text}"
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, label) for label in found)]
    assert not unused, f"{name_of(program)} agrees with torch now; take {unused} out of ACCEPTED"


def test_every_accepted_difference_is_of_a_program() -> None:
    programs = {name_of(program) for program in (*PROGRAMS, *programs_alone.PROGRAMS)}
    assert set(ACCEPTED) <= programs


def test_every_name_that_both_have_is_compared(torch_worlds: TorchWorlds) -> None:
    for program in PROGRAMS:
        torch_worlds.outcomes(program, 2)
    for program in programs_alone.PROGRAMS:
        torch_worlds.alone(program)
    (public,) = torch_worlds.run(1, _public_names)
    both = {name for name in public if hasattr(meshdist, name)}
    assert sorted(both - torch_worlds.names - set(NOT_COMPARED)) == []


def _public_names() -> list[str]:
    import torch.distributed

    return [name for name in dir(torch.distributed) if not name.startswith("_")]
