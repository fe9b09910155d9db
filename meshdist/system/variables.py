"""The names of meshdist's environment variables, and those that are set under another name."""

from __future__ import annotations

import os
from collections.abc import Mapping

_PREFIX = "MESHDIST_"
VARIABLES = (
    "MESHDIST_AGENT_STORE",
    "MESHDIST_CACHE_DIR",
    "MESHDIST_CORE",
    "MESHDIST_DEBUG",
    "MESHDIST_DISABLE_SHM",
    "MESHDIST_EAGER_LIMIT",
    "MESHDIST_ENCRYPTION",
    "MESHDIST_ERROR_FILE",
    "MESHDIST_FLIGHT_RECORDER_DIR",
    "MESHDIST_HOST_ID",
    "MESHDIST_INSECURE",
    "MESHDIST_MPI_CUDA",
    "MESHDIST_SECRET",
    "MESHDIST_SECRET_FILE",
    "MESHDIST_SINGLE_COPY",
    "MESHDIST_SOCKET_IFNAME",
    "MESHDIST_SPAWN_ADDRESS",
    "MESHDIST_SPAWN_OWN_SECRET",
    "MESHDIST_SPAWN_SIZE",
    "MESHDIST_SPREADING",
    "MESHDIST_TLS_CA",
    "MESHDIST_TLS_CERT",
    "MESHDIST_TLS_KEY",
    "MESHDIST_TUNING",
)
"""All that the package reads; docs/variables.md describes each."""
# Those that are arguments of a function, by their names without the prefix.
_ARGUMENTS = {"TIMEOUT": "init_process_group(timeout=...)"}
# Those of its tests and of CI, which may be set where they start ranks.
_OF_TESTS = (
    "MESHDIST_CI_RUN",
    "MESHDIST_CUPY",
    "MESHDIST_FUZZ_EXAMPLES",
    "MESHDIST_MPI_ENVIRONMENTS",
    "MESHDIST_MPI_WORLDS",
    "MESHDIST_TEST_CLUSTER",
    "MESHDIST_TORCH_SUITE_PART",
)
# Kubernetes sets variables for each service of a namespace: this one, and more that begin in these ways.
_OF_SERVICE, _OF_SERVICES = "_SERVICE_HOST", ("_SERVICE_", "_PORT")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the variables that are set and that meshdist does not read, each with what was meant, if that is known.

    That is a variable with a similar name, or an argument.
    """
    unknown = [name for name in environment if name.startswith(_PREFIX) and name not in (*VARIABLES, *_OF_TESTS)]
    services = [name.removesuffix(_OF_SERVICE) for name in unknown if name.endswith(_OF_SERVICE)]
    unknown = [name for name in unknown if not name.startswith(tuple(a + b for a in services for b in _OF_SERVICES))]
    if not unknown:
        return {}
    from meshdist._spelling import spelt  # with modules that are not needed otherwise

    # Without the prefix, which would make all of them similar.
    known = {**{name.removeprefix(_PREFIX): name for name in VARIABLES}, **_ARGUMENTS}
    meant = {name: spelt(name.removeprefix(_PREFIX), known) for name in unknown}
    return {name: None if other is None else known[other] for name, other in meant.items()}
