"""The cell magic `%%mesh` and the line magic `%mesh` of IPython."""

from __future__ import annotations

import atexit
import traceback
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from meshdist.backends.device_backends import usable_backend_name
from meshdist.debug.user_traceback import DELIBERATE, user_frames
from meshdist.errors import DistError
from meshdist.notebook.cell_worker import Answer
from meshdist.notebook.magic_options import CellOptions, asks_for_help, help_text, parse_options
from meshdist.notebook.pool import Completion, Pool
from meshdist.notebook.process import KILLED
from meshdist.notebook.rank_output import RankOutput, rank_label
from meshdist.runtime.rank_text import ranks_text, same_but_for_rank
from meshdist.system.plurals import counted
from meshdist.system.processes import hint_about_signal

_MOST_NAMED = 8
_REPLACED = "a new process takes its place, without the variables of the old one"
_OWN_GROUPS = "create your own groups and meshes again"
_NO_CLOUDPICKLE = (
    "%%mesh needs the package cloudpickle: pip install cloudpickle, or 'meshdist[notebook]' for all that notebooks need"
)


class MeshCellError(RuntimeError):
    """A cell failed on a worker; IPython shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        return str(self).splitlines()


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class MeshMagics:
    """Runs cells on workers; one instance for each notebook."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pool: Pool | None = None
        self._options: CellOptions | None = None
        self._output = RankOutput(_write)

    def cell(self, line: str, cell: str) -> None:
        """Run a cell on all workers: the implementation of `%%mesh`; with --help, print the options.

        Raises:
            UsageError: The options are wrong, or a package is missing.
            MeshCellError: The cell failed.
        """
        if asks_for_help(line):
            print(help_text())
            return
        try:
            options = parse_options(line, self._options)
        except ValueError as error:
            raise self._usage_error(str(error)) from None
        if find_spec("cloudpickle") is None:
            raise self._usage_error(_NO_CLOUDPICKLE)
        # Not `execution_count`, which newer versions of IPython have counted up already, and older ones have not.
        name = f"In [{len(self._shell.history_manager.input_hist_parsed) - 1}]"
        self._check(options.backend, cell, name)
        sent = self._pickled(options.send)
        try:
            outcome = self._pool_for(options).run(cell, options.axes, sent, options.get, name=name)
        except DistError as error:
            error.locate("%%mesh")
            raise MeshCellError(str(error)) from None
        finally:
            self._output.flush()
        if not outcome.is_good:
            raise _error_of(outcome)
        _show_results(outcome)
        if options.get:
            self._shell.push(outcome.values())

    def line(self, line: str) -> None:
        """List the workers; `%mesh stop` ends them, and `%mesh --help` prints the options of `%%mesh`."""
        if asks_for_help(line):  # IPython refuses a cell magic without a cell, and asks whether this one was meant
            print(help_text())
            return
        if line.strip() == "stop" and self._pool is not None:
            stopped = self._pool.size
            self.stop()
            print(f"stopped {stopped} worker{'s' * (stopped != 1)}")
            return
        if line.strip() not in ("", "stop"):
            raise self._usage_error(f"%mesh lists the workers, %mesh stop ends them; got {line.strip()!r}")
        if self._pool is None or self._options is None:
            print("no workers")
            return
        axes = ", ".join(f"{name}={size}" for name, size in self._options.axes) or "none"
        pids, size = self._pool.pids, self._pool.size
        workers = f"{'' if len(pids) == size else f'{len(pids)} of '}{counted(size, 'worker')}"
        print(f"{workers}, backend {self._pool.backend}, mesh: {axes}; pids {pids}")
        for rank, how in sorted(self._pool.ended.items()):
            print(f"rank {rank} has ended ({how}); a new process takes its place before the next cell")
        if self._pool.replaced:
            print("replaced before: " + ", ".join(f"rank {rank} ({how})" for rank, how in self._pool.replaced))

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            atexit.unregister(self.stop)

    def _check(self, backend: str, cell: str, name: str) -> None:
        """Reject an unusable backend or invalid Python before any worker gets the cell, which messages call `name`."""
        try:
            usable_backend_name(backend)
        except (ValueError, DistError) as error:
            raise self._usage_error(f"%%mesh --backend {backend}: {error}") from None
        try:
            compile(cell, name, "exec")
        except SyntaxError as error:
            raise MeshCellError(_syntax_error(error, cell)) from None

    def _pool_for(self, options: CellOptions) -> Pool:
        before, pool = self._options, self._pool
        if pool is None or before is None or options.restart or options.num_ranks != before.num_ranks:
            pool = self._new_pool(options)
            if before is not None and before.axes and not options.axes:
                print(f"`mesh` is no longer defined in cells; pass --axes, as in --axes dp={options.num_ranks}")
        elif (options.backend, options.timeout_s) != (before.backend, before.timeout_s):
            pool.join_new_world(options.backend, options.timeout_s)
            print(
                f"the workers are joining a new world (backend {options.backend}, timeout {options.timeout_s:g} s); "
                f"variables are kept, but {_OWN_GROUPS}"
            )
        self._options = replace(options, send=(), get=(), restart=False)
        return pool

    def _new_pool(self, options: CellOptions) -> Pool:
        pool = Pool(
            options.num_ranks,
            options.backend,
            options.timeout_s,
            self._output.add,
            on_replaced=_report_replaced,
            on_tick=self._output.flush_if_due,
        )
        try:
            pool.start()  # keep the old workers until the new ones run
        except BaseException:
            pool.close()
            raise
        if self._pool is not None:
            print(f"new workers have replaced the previous {self._pool.size}; their variables are lost")
            self.stop()
        self._pool = pool
        atexit.register(self.stop)
        return pool

    def _pickled(self, names: tuple[str, ...]) -> bytes | None:
        if not names:
            return None
        import cloudpickle

        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            raise self._usage_error(f"%%mesh --send: the notebook has no variable {', '.join(map(repr, missing))}")
        try:
            pickled: bytes = cloudpickle.dumps({name: self._shell.user_ns[name] for name in names})
        except Exception as error:  # pickling may run any code of the objects
            raise self._usage_error(f"%%mesh --send {','.join(names)}: cannot be pickled: {error}") from None
        return pickled

    def _usage_error(self, message: str) -> Exception:
        from IPython.core.error import UsageError

        error: Exception = UsageError(message)
        return error


def _write(line: str) -> None:
    print(line, flush=True)


def _report_replaced(rank: int, how: str) -> None:
    print(f"rank {rank} had ended between two cells ({how}); {_REPLACED}; {_OWN_GROUPS}", flush=True)


def _show_results(outcome: Completion) -> None:
    """Show the last expressions that are more than text, and the pictures."""
    from IPython.display import Image, display

    for forms, ranks in outcome.shown():
        print(f"{rank_label(ranks)}:", flush=True)
        display(forms, raw=True)
    for ranks, pictures in groupby(outcome.pictures().items(), key=lambda item: item[1]):
        data = [picture for picture, _ in pictures]
        print(f"{rank_label(ranks)}: {counted(len(data), 'figure')}", flush=True)
        for picture in data:
            display(Image(data=picture, format="png"))


def _syntax_error(error: SyntaxError, cell: str) -> str:
    """Describe a syntax error; for a magic, explain that workers have none."""
    line = (cell.splitlines()[error.lineno - 1 :] or [""])[0].strip() if error.lineno else ""
    if line.startswith(("%", "!")):
        return (
            f"%%mesh: line {error.lineno} is {line!r}: magics need IPython, and workers run plain Python; "
            "put it in a separate cell"
        )
    return "".join(traceback.format_exception_only(error)).rstrip()


def _error_of(outcome: Completion) -> BaseException:
    lines: list[str] = []
    failed = {rank: answer for rank, answer in outcome.answers.items() if answer.status == "raised"}
    first = min(failed, key=lambda rank: (failed[rank].is_consequence, rank), default=None)
    if first is not None and not (failed[first].is_consequence and (outcome.ended or outcome.interrupted)):
        lines += [f"[{first}] {line}" for line in failed[first].text.rstrip().splitlines()]
    others = sorted(rank for rank in failed if rank != first and not failed[rank].is_consequence)
    lines += _summaries(failed, first, others)
    for rank, how in sorted(outcome.ended.items()):
        when = "had ended before it began the cell" if rank in outcome.not_begun else "ended in the cell"
        lines.append(f"rank {rank} {when} ({how}); {_REPLACED}")
    if not outcome.interrupted:  # else the pool has killed what did not react
        hints = dict.fromkeys(hint_about_signal(how.removeprefix(KILLED)) for how in outcome.ended.values())
        lines += filter(None, hints)
    lines += _what_is_left(outcome)
    if outcome.interrupted:
        return CellInterrupted("\n".join(["The cell was interrupted.", *outcome.hang_report, *lines]))
    return MeshCellError("\n".join(lines))


def _what_is_left(outcome: Completion) -> list[str]:
    """Return the sentence that says which variables stay, and which belong to the world that the failure ended.

    None if all stay on all workers: the next cell finds `mesh` and the variables as if nothing had happened.
    """
    if outcome.keeps_world:
        return []
    lost = outcome.of_the_world()
    if lost:
        named = ", ".join(f"`{name}`" for name in lost[:_MOST_NAMED]) + (", ..." if len(lost) > _MOST_NAMED else "")
        kept = "the other variables stay" if outcome.answers else "no variables stay"
        who = "the others" if outcome.ended else "The workers"
        words = f"{who} are joining a new world: create {named} again; {kept}."
        return [words[0].upper() + words[1:]]
    return ["The other workers keep their variables."] if outcome.ended and outcome.answers else []


def _summaries(failed: dict[int, Answer], first: int | None, others: list[int]) -> list[str]:
    """Return the errors of other ranks than the `first`, whose traceback is shown; the same error once."""
    groups: list[list[int]] = []
    for rank in [*([] if first is None else [first]), *others]:
        said = failed[rank].summary
        alike = (group for group in groups if same_but_for_rank(said, rank, failed[group[0]].summary, group[0]))
        group = next(alike, None)
        groups.append([rank]) if group is None else group.append(rank)
    lines = []
    for shown, *rest in groups:
        lines += [] if shown == first else [f"[{shown}] {failed[shown].summary}"]
        lines += [f"{ranks_text(rest)}: the same"] if rest else []
    return lines


def _show_from_the_user(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: int | None = None) -> None:
    """Show the traceback of an exception without the frames of this package below the user's; a handler of IPython."""
    shell.showtraceback((kind, error, user_frames(error)), tb_offset=tb_offset)


def load_ipython_extension(shell: Any) -> None:
    """Define `%%mesh` and `%mesh` in the IPython shell; called by `%load_ext meshdist`.

    From then on, tracebacks in the shell's own cells end at the user's line, too.
    """
    magics = MeshMagics(shell)
    shell.register_magic_function(magics.cell, "cell", "mesh")
    shell.register_magic_function(magics.line, "line", "mesh")
    if not shell.custom_exceptions:  # else the user has a handler
        shell.set_custom_exc(DELIBERATE, _show_from_the_user)
