"""Code that runs inside a worker, around the user's code.

meshrun starts this file by its path, not as a module of the package, so that a script without meshdist does not pay
for importing it. So it uses the standard library alone, and imports modules for failures when a failure occurs.
"""

from __future__ import annotations

import io
import os
import sys

TYPE_CHECKING = False  # as typing's, without loading typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType

ERROR_FILE_VARIABLE = "MESHDIST_ERROR_FILE"
INTERRUPTED_STATUS = 130
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process as soon as its parent ends (Linux only).

    The parent must have started this process from its main thread, since the kernel watches the thread. On other
    systems the launcher's reaper process does the same.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    # If the parent ended before the line above took effect, no signal will ever come.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), _SIGKILL)


def write_whole_lines() -> None:
    """Flush each printed line at once: lines of ranks stay whole, and a killed rank loses no output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def unblock_ctrl_c() -> None:
    """Unblock SIGINT, which launchers block until it leads to a clean exit instead of a traceback per rank."""
    import signal

    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def guarded(body: Callable[[], object]) -> None:
    """Run `body` with Ctrl-C unblocked; if it raises, exit with status 1 and leave the report to the launcher.

    The launcher shows the exception from the error file, once. SystemExit keeps its meaning. KeyboardInterrupt exits
    with 130 without output, as the launcher reports a Ctrl-C once. A `sys.excepthook` of the user's code is called as
    usual, and may take as long as the launcher waits for ranks that it terminates.

    Raises:
        SystemExit: `body` did not return.
    """
    reported: list[BaseException] = []

    def quiet_hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # A user's hook may call this one: do not print an exception that the launcher prints.
        if not any(error is one for one in reported):
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = quiet_hook
    try:
        unblock_ctrl_c()
        _run_to_the_end(body)
    except SystemExit as error:
        if error.code not in (None, 0):
            write_error_file(error)
            _note_last(error)
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        with _TerminatedLater():
            if interrupted or write_error_file(error):
                reported.append(error)
            _note_last(error)
            sys.excepthook(type(error), error, _user_frames(error.__traceback__))
        sys.exit(INTERRUPTED_STATUS if interrupted else 1)


class _TerminatedLater:
    """Act on SIGTERM at the end of this block: the launcher sends it to all ranks as soon as it finds an error file."""

    def __enter__(self) -> None:
        import signal

        self._came = False
        self._known = signal.getsignal(signal.SIGTERM)
        if self._known is not None:  # it was set in Python, or is the default
            signal.signal(signal.SIGTERM, self._note)

    def __exit__(self, *_: object) -> None:
        import signal

        if self._known is not None:
            signal.signal(signal.SIGTERM, self._known)
        if self._came:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, *_: object) -> None:
        self._came = True


def _run_to_the_end(body: Callable[[], object]) -> None:
    """Run `body`, and then wait for what it has left in progress, such as a save of a checkpoint, which may raise.

    If `body` raises, wait for a limited time: the launcher terminates all ranks as soon as one has reported its error.
    """
    ending = None
    try:
        body()
    except SystemExit as error:
        if error.code not in (None, 0):
            _finish_world(has_failed=True)
            raise
        ending = error
    except Exception:
        _finish_world(has_failed=True)
        raise
    _finish_world(has_failed=False)
    if ending is not None:
        raise ending


def _finish_world(has_failed: bool) -> None:
    """Wait for what this rank has left in progress; if the rank has failed, for a limited time."""
    if "meshdist.groups.world" not in sys.modules:  # which the user's code loads
        return
    from meshdist.groups.world import world_in
    from meshdist.runtime.context import current_slot

    world = world_in(current_slot())
    if world is not None:
        world.finish_after_error() if has_failed else world.finish()


def _note_last(error: BaseException) -> None:
    """Let exit handlers look up the exception that ends the process, as the interpreter does for most."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def write_error_file(error: BaseException) -> bool:
    """Describe `error` as JSON in the file named by MESHDIST_ERROR_FILE; return False if it cannot be written.

    The first rank that fails makes the directory, so a job without failures never touches the disk.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return False
    import json

    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path + ".part", "w", encoding="utf-8", opener=_private) as file:
            json.dump(_describe(error), file)
        os.replace(path + ".part", path)  # the launcher never sees a partial file
    except OSError as problem:
        print(f"meshdist: cannot write {path} ({problem}); the error follows", file=sys.stderr)
        return False
    return True


def _describe(error: BaseException) -> dict[str, object]:
    """Describe the error for the launcher: rank, time, exception, and whether another rank's end caused it."""
    import socket
    import time

    quits = isinstance(error, SystemExit)
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time_s": time.time(),
        "monotonic_s": time.monotonic(),
        "status": _exit_status(error),
        "type": type(error).__qualname__,
        "message": "" if quits else _text(error),
        "traceback": "" if quits else _traceback_of(error),
        **_relations(error),
    }


def _traceback_of(error: BaseException) -> str:
    """Return the traceback: where meshdist raised on purpose, without its frames below the call of the user."""
    import traceback

    frames = _user_frames(error.__traceback__)
    try:
        from meshdist.debug.user_traceback import traceback_text

        return traceback_text(error, frames)
    except Exception:  # descriptors or memory may have run out, or a file of the user has the name of a module
        pass
    return "".join(traceback.format_exception(type(error), error, frames))


def _relations(error: BaseException) -> dict[str, bool]:
    """Return what Failure says of its relations to other exceptions: secondary, handled, shared."""
    if "meshdist.errors" not in sys.modules:  # meshdist has raised nothing
        return {"secondary": False, "handled": False, "shared": False}
    from meshdist.errors import DistError
    from meshdist.launch.failures import came_while_handling, follows_from_peer

    return {
        "secondary": follows_from_peer(error),
        "handled": came_while_handling(error),
        "shared": isinstance(error, DistError),
    }


def _exit_status(error: BaseException) -> int:
    """Return the status with which the interpreter exits because of `error`."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code & 0xFF if isinstance(code, int) else 1


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its message cannot be shown: {type(problem).__qualname__}>"


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of the launcher, which the user did not write."""
    here = os.path.dirname(__file__)
    while traceback is not None and os.path.dirname(traceback.tb_frame.f_code.co_filename) == here:
        traceback = traceback.tb_next
    return traceback


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _load_script(path: str) -> tuple[CodeType, dict[str, object]]:
    """Compile a script, or the `__main__` of a directory or zip file, as the interpreter itself would."""
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _set_first_path(path, always=True)
        code, about = _load_module("__main__")
        return code, {**about, "__package__": ""}
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    with open(absolute, "rb") as file:
        return compile(file.read(), absolute, "exec", dont_inherit=True), {"__file__": absolute, "__package__": None}


def _load_module(name: str) -> tuple[CodeType, dict[str, object]]:
    """Find the module `name`, or the `__main__` of the package `name`, and compile it."""
    import importlib.util

    if name == "__main__":
        del sys.modules[name]  # it is this file
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    get_code: Callable[[str], CodeType | None] | None = getattr(spec and spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    return code, {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec, "__loader__": spec.loader}


def _set_first_path(path: str, always: bool = False) -> None:
    """Replace the directory of this file, which the interpreter put first, unless it was told to put none there."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = path
    elif always:
        sys.path.insert(0, path)


def _run(kind: str, command: list[str]) -> None:
    """Become the script, module or program that `command` starts with."""
    if kind == "program":
        os.execvp(command[0], command)
    sys.argv[:] = command
    if kind == "module":
        _set_first_path(os.getcwd())
        code, about = _load_module(command[0])
        sys.argv[0] = str(about["__file__"])
    else:
        code, about = _load_script(command[0])
    main = type(sys)("__main__")
    vars(main).update(about)
    sys.modules["__main__"] = main
    exec(code, vars(main))


def main() -> None:
    """Run `worker.py PARENT_PID script|module|program COMMAND...`, as the launcher starts it."""
    _, parent_pid, kind, *command = sys.argv
    die_with_parent(int(parent_pid))
    write_whole_lines()
    guarded(lambda: _run(kind, command))


if __name__ == "__main__":
    main()
