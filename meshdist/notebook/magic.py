"""The cell magic `%%mesh` and the line magic `%mesh` of IPython."""

from __future__ import annotations

import atexit
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from meshdist.errors import DistError
from meshdist.notebook.options import CellOptions, parse_options
from meshdist.notebook.pool import Outcome, Pool

_NO_CLOUDPICKLE = '%%mesh needs the package cloudpickle: pip install "meshdist[notebook]"'


class MeshCellError(RuntimeError):
    """A cell went wrong on a worker; what it says is all there is to show."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of the frames of this package."""
        return str(self).splitlines()


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class MeshMagics:
    """Runs cells on workers; one for each notebook.

    Args:
        shell: The IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pool: Pool | None = None
        self._options: CellOptions | None = None

    def cell(self, line: str, cell: str) -> None:
        """Run a cell on all workers: what is behind `%%mesh`.

        Raises:
            UsageError: The options make no sense, or a package is missing.
            MeshCellError: The cell went wrong.
        """
        try:
            options = parse_options(line, self._options)
        except ValueError as error:
            raise self._usage_error(str(error)) from None
        if find_spec("cloudpickle") is None:
            raise self._usage_error(_NO_CLOUDPICKLE)
        sent = self._pickled(options.send)
        try:
            outcome = self._pool_for(options).run(cell, options.axes, sent, options.get)
        except DistError as error:
            raise MeshCellError(f"%%mesh: {str(error).removeprefix('%%mesh: ')}") from None
        if not outcome.is_good:
            raise _error_of(outcome)
        if options.get:
            self._shell.push(outcome.values())

    def line(self, line: str) -> None:
        """Say which workers there are; `%mesh stop` ends them."""
        if line.strip() == "stop":
            self.stop()
        elif line.strip():
            raise self._usage_error(f"%mesh says which workers there are, %mesh stop ends them; got {line.strip()!r}")
        if self._pool is None or self._options is None:
            print("no workers")
        else:
            axes = ", ".join(f"{name}={size}" for name, size in self._options.axes) or "none"
            print(f"{self._pool.size} workers, backend {self._pool.backend}, mesh: {axes}; pids {self._pool.pids}")

    def stop(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            atexit.unregister(self.stop)

    def _pool_for(self, options: CellOptions) -> Pool:
        before = self._options
        fits = before is not None and (options.num_ranks, options.backend, options.timeout_s) == (
            before.num_ranks,
            before.backend,
            before.timeout_s,
        )
        if self._pool is not None and (options.restart or not fits):
            print(f"new workers take the place of {self._pool.size}, whose variables are gone")
            self.stop()
        if self._pool is None:
            self._pool = Pool(options.num_ranks, options.backend, options.timeout_s, _show)
            atexit.register(self.stop)
        self._options = replace(options, send=(), get=(), restart=False)
        return self._pool

    def _pickled(self, names: tuple[str, ...]) -> bytes | None:
        if not names:
            return None
        import cloudpickle

        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise self._usage_error(f"%%mesh --send: the notebook has no variable {', '.join(missing)}")
        try:
            pickled: bytes = cloudpickle.dumps({name: self._shell.user_ns[name] for name in names})
        except Exception as error:  # whatever an object's own code raises
            raise self._usage_error(f"%%mesh --send {','.join(names)}: cannot be pickled: {error}") from None
        return pickled

    def _usage_error(self, message: str) -> Exception:
        from IPython.core.error import UsageError

        error: Exception = UsageError(message)
        return error


def _show(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


def _error_of(outcome: Outcome) -> BaseException:
    lines: list[str] = []
    failed = {rank: answer for rank, answer in outcome.answers.items() if answer.status == "raised"}
    first = min(failed, key=lambda rank: (failed[rank].is_consequence, rank), default=None)
    if first is not None and not (failed[first].is_consequence and (outcome.ended or outcome.interrupted)):
        lines += [f"[{first}] {line}" for line in failed[first].text.rstrip().splitlines()]
    others = sorted(rank for rank in failed if rank != first and not failed[rank].is_consequence)
    lines += [f"[{rank}] {failed[rank].summary}" for rank in others]
    lines += [
        f"rank {rank} ended in the cell ({how}); a new process takes its place, without the variables of the old one"
        for rank, how in sorted(outcome.ended.items())
    ]
    lines.append("The workers keep their variables and meet in a new world; make groups and meshes anew.")
    if outcome.interrupted:
        return CellInterrupted("\n".join(["The cell was interrupted.", *lines]))
    return MeshCellError("\n".join(lines))


def load_ipython_extension(shell: Any) -> None:
    """Define `%%mesh` and `%mesh`: what `%load_ext meshdist` calls.

    Args:
        shell: The IPython shell.
    """
    magics = MeshMagics(shell)
    shell.register_magic_function(magics.cell, "cell", "mesh")
    shell.register_magic_function(magics.line, "line", "mesh")
