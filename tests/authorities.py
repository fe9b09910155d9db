"""Authorities that sign certificates for tests, made by the commands of docs/network.md."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TLS_VARIABLES = ("MESHDIST_TLS_CERT", "MESHDIST_TLS_KEY", "MESHDIST_TLS_CA")

_DOCUMENT = Path(__file__).resolve().parents[1] / "docs/network.md"


def documented(title):
    """Return the commands in the document behind the comment `title`."""
    found = re.search(rf"^# {title}\n(.*?)^(?:#|```)", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


class Authority:
    """Signs certificates, in a folder of its own."""

    def __init__(self, folder):
        if shutil.which("openssl") is None:
            pytest.skip("the command openssl, which makes certificates, is not installed")
        self.folder = folder
        self._run(documented("once, on a machine that you trust"))
        self._signed = set()

    def sign(self, name):
        """Return the variables for a host of this name."""
        if name not in self._signed:
            self._run(documented("for each host").replace("node1", name))
            self._signed.add(name)
        paths = (f"{name}.pem", f"{name}.key", "ca.pem")
        return {variable: str(self.folder / path) for variable, path in zip(TLS_VARIABLES, paths, strict=True)}

    def _run(self, commands):
        ran = subprocess.run(
            ["sh", "-ec", commands], cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stderr
