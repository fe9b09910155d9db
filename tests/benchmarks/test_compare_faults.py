"""The comparison of what libraries do about faults: it sees what there is to see, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "what-it-survives.md"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only"),
]


@pytest.fixture
def compare(tmp_path):
    """Run some faults with meshdist alone; return what was seen, by name, and the page that was written."""

    def run(*names):
        page, found, mark = tmp_path / "page.md", tmp_path / "seen.json", uuid.uuid4().hex
        page.write_text("before\n<!-- faults: begin -->\nold\n<!-- faults: end -->\nafter\n")
        command = [sys.executable, str(BENCHMARKS / "compare_faults.py"), "--libraries", "meshdist", "--faults"]
        done = subprocess.run(
            [*command, ",".join(names), "--page", str(page), "--json", str(found)],
            env={**os.environ, "BENCHMARK_TEST": mark},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert processes_with(mark) == []
        return {name: seen["meshdist"] for name, seen in json.loads(found.read_text()).items()}, page.read_text()

    return run


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # a process may end while it is looked at
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
    return found


def test_faults_are_seen_as_they_are(compare):
    seen, page = compare("killed", "strided", "other_dtype")
    killed, strided = seen["killed"], seen["strided"]
    assert re.search(
        r"the ranks disagree: rank 0 calls all_reduce\(float32\S+ op=sum\) at \S+; rank 1 calls",
        seen["other_dtype"]["cell"],
    )
    for rank in (0, 2, 3):
        assert "rank 1 (pid " in killed["ranks"][rank]["error"]
        assert killed["ranks"][rank]["ended_s"] - killed["ranks"][rank]["began_s"] < 2.0
    assert killed["ranks"][1]["status"] == -9
    assert killed["ranks"][1]["ended_s"] is None
    assert killed["cell"].startswith("error a")  # at once, or after a moment
    assert re.search(r"rank 1 \(pid 4711 on node1\) (was killed by SIGKILL|has died); this is call 2", killed["cell"])
    assert strided["cell"] == "right"
    assert page.startswith("before\n<!-- faults: begin -->\n")
    assert page.endswith("<!-- faults: end -->\nafter\n")
    assert f"| all_reduce of every second element, in place | {strided['cell']} |" in page


@pytest.fixture
def story(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from faults_compared import story

    return story


@pytest.fixture
def job(story):
    """Ranks of which two are looked at, at the times after the fault that are given."""
    from faults_compared.fault import Fault
    from faults_compared.jobs import Job, Seen

    def tell(*seen, **fault):
        made = Fault("a title", lambda lib, witness: None, len(seen), **fault)
        told = Job("meshdist", made, Path("/nowhere"))
        told.fault_s, told.seen = 100.0, [Seen(**each) for each in seen]
        return story.tell(told, made)

    return tell


def test_ranks_that_fare_alike_are_told_of_together(job):
    first = {"ended_s": 100.2, "error": "E: recv on group 'w' (rank 0 of 3): rank 2 (pid 17 on here) has died"}
    passed_on = {
        "ended_s": 104.0,
        "error": "E: recv on group 'w' (rank 1 of 3): rank 0 failed: ... rank 2 (pid 17 on here) has died",
    }
    said = "error after 0.2 to 4.0 s: `E: recv on group 'w' (rank 0 of 3): rank 2 (pid 4711 on node1) has died`"
    assert job(first, passed_on) == said
    assert job(first, {}) == f"rank 0: {said.replace(' to 4.0', '')}; rank 1: hangs (ended from outside after 12 s)"
    assert job({"ended_s": 100.05, "error": "E: x"}) == "error at once: `E: x`"
    assert job({"gone_s": 100.5, "status": -6}) == "the process is gone after 0.5 s (SIGABRT)"
    assert job({"ended_s": 101.0, "right": False}) == "**no error**"
    assert job({"ended_s": 101.0, "right": False}, has_answer=True) == "**wrong values**"
    assert job({"ended_s": 101.0, "right": True}, {"notes": ["ignored"]}, watched=(0,)) == "right"


def test_what_changes_from_run_to_run_is_not_shown(story):
    assert (
        story.general("[/pytorch/gloo/tcp/pair.cc:553] from [127.0.0.1]:46321")
        == "[pair.cc:553] from [127.0.0.1]:29500"
    )
    assert story.general("pid 77 on host-1.lan, /tmp/x/faults-ab_c12/meet") == "pid 4711 on node1, /tmp/job/meet"
    assert story.code("a|b`c") == "`a\\|b'c`"


def test_every_fault_is_on_the_page(story):
    from faults_compared.faults import SECTIONS

    page = PAGE.read_text()
    for section, faults in SECTIONS.items():
        assert f"## {section}\n" in page
        for fault in faults:
            [row] = [line for line in page.splitlines() if line.startswith(f"| {fault.title} |")]
            assert row.count(" | ") == 3, row
