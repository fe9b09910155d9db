"""Environment variables that begin as those of meshdist do, and that it does not have."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshdist as dist
from meshdist.cluster import is_first_rank
from meshdist.doctor import machine
from meshdist.doctor.finding import WARNING, run_checks
from meshdist.system.variables import VARIABLES, unknown_variables

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bMESHDIST_[A-Z_]*[A-Z]\b")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MESHDIST_DEBGU", "MESHDIST_DEBUG"),
        ("MESHDIST_SECERT", "MESHDIST_SECRET"),
        ("MESHDIST_SECRETFILE", "MESHDIST_SECRET_FILE"),
        ("MESHDIST_CAHCE_DIR", "MESHDIST_CACHE_DIR"),
        ("MESHDIST_TIMEOUT", "init_process_group(timeout=...)"),
    ],
)
def test_what_was_meant(name, meant):
    assert unknown_variables({name: "1", "MESHDIST_CORE": "auto", "PATH": ""}) == {name: meant}


def test_nothing_is_meant_by_other_names():
    assert unknown_variables({"MESHDIST_BACKEND": "mpi", "OTHER": ""}) == {"MESHDIST_BACKEND": None}


def test_all_names_of_the_tests_and_of_ci_are_known():
    files = [ROOT / ".ci" / "run", *(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))]
    set_there = {name for path in files for name in NAME.findall(path.read_text())}
    assert {"MESHDIST_CI_RUN", "MESHDIST_MPI_WORLDS"} < set_there
    assert unknown_variables(dict.fromkeys([*VARIABLES, *set_there], "1")) == {}


def test_what_kubernetes_sets_for_a_service_is_no_mistake():
    of_services = [
        f"MESHDIST_{service}{name}"
        for service in ("", "STORE_")
        for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_STORE", "PORT", "PORT_29500_TCP_ADDR")
    ]
    assert unknown_variables(dict.fromkeys(of_services, "1")) == {}
    assert unknown_variables({"MESHDIST_PORT": "29500"}) == {"MESHDIST_PORT": None}


@pytest.mark.parametrize(("rank", "records"), [(None, 1), ("0", 1), ("1", 0)])
def test_one_rank_warns_at_init(monkeypatch, caplog, rank, records):
    monkeypatch.setenv("MESHDIST_DEBGU", "INFO")
    monkeypatch.setenv("MESHDIST_FOO", "1")
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.WARNING, "meshdist"):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
    hints = {"MESHDIST_DEBGU": "did you mean MESHDIST_DEBUG?", "MESHDIST_FOO": "see docs/variables.md"}
    words = [f"the environment variable {name} is unknown, and ignored; {hint}" for name, hint in hints.items()]
    assert [record.getMessage() for record in caplog.records] == words * records


def test_it_is_told_before_the_rank_fails_to_join():
    code = "import meshdist; meshdist.init_process_group(init_method='tcp://0.0.0.0:0', rank=0, world_size=2)"
    environment = {name: value for name, value in os.environ.items() if name != "MESHDIST_SECRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "MESHDIST_SECERT": "x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, *_ = done.stderr.splitlines()
    assert first.startswith("meshdist: the environment variable MESHDIST_SECERT is unknown")
    assert done.returncode == 1


def test_the_doctor_finds_them(monkeypatch):
    monkeypatch.setenv("MESHDIST_DEBGU", "INFO")
    monkeypatch.setenv("MESHDIST_FOO", "1")
    found = [(one.status, one.remedy) for one in run_checks([machine.variables])]
    assert found == [(WARNING, "did you mean MESHDIST_DEBUG?"), (WARNING, "see docs/variables.md")]


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "3"}, False),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"}, True),
        ({"SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "1"}, False),
    ],
)
def test_who_speaks_for_a_job(variables, is_first):
    assert is_first_rank(variables) is is_first
