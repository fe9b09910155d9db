"""meshrun --launcher mpi: what mpirun cannot keep to is an error, never dropped."""

import re

import pytest

from meshdist.launch.meshrun import main

VALUES = {"--node-rank": "0", "--rdzv-endpoint": "node1:29400", "--redirects": "0", "--tee": "3", "--master-addr": "a"}
# These say how many ranks there are and what they run, or what is so anyway.
KEPT = {"--nproc-per-node", "--launcher", "--module", "--no-python", "--use-env", "--standalone", "--nnodes", "--help"}


@pytest.fixture
def refused(tmp_path, capsys):
    """Run meshrun with an MPI launcher and some options; return what it says as it refuses them."""
    script = tmp_path / "script.py"
    script.touch()

    def run(*options):
        with pytest.raises(SystemExit) as error:
            main(["--launcher", "mpi", *options, str(script)])
        assert error.value.code == 2
        return capsys.readouterr().err

    return run


def options_of_meshrun(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    options = re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    return {*options} - {"--version"}


def test_every_option_that_would_be_dropped_is_refused(refused, capsys):
    dropped = options_of_meshrun(capsys) - KEPT
    assert len(dropped) == 16, dropped
    for option in sorted(dropped):
        values = [VALUES.get(option, "static" if option == "--rdzv-backend" else "1")]
        spellings = [[option, *values], [f"{option.replace('-', '_').replace('__', '--', 1)}={values[0]}"]]
        for words in [[option]] if option == "--dashboard" else spellings:
            said = refused(*words)
            assert said.startswith(f"meshrun: {option} does not work with --launcher mpi: "), said
            # What to do, and not only that it does not work.
            assert re.search("mpirun (-n|has options)|leave it out|start the job again", said), said


def test_several_hosts_are_those_of_mpiruns_host_file(refused):
    said = refused("--nnodes", "2", "--nproc-per-node", "2")
    assert "--nnodes 2 does not work" in said
    assert "mpirun -n RANKS --hostfile FILE" in said
    assert "--rdzv-id does not work" in refused("--nnodes", "1", "--rdzv-id", "x")
    assert "--nproc-per-node 2:4: MPI cannot restart with fewer ranks" in refused("--nproc-per-node", "2:4")
