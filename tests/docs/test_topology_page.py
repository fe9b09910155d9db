"""The files of docs/topology.md are topologies."""

import re
import sys
from pathlib import Path

import pytest

import meshdist

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "topology.md").read_text()
FILES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("text", "hosts"), [*zip(FILES, ({"node0": 8, "node1": 8, "node2": 8, "big": 4}, {"box": 2}), strict=True)]
)
def test_file_is_a_topology(text, hosts, tmp_path):
    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli", reason="Python 3.10 reads TOML by tomli")
    path = tmp_path / "machine.toml"
    path.write_text(text)
    found = meshdist.Topology.load(path)
    assert {host: len(ranks) for host, ranks in found.hosts.items()} == hosts
