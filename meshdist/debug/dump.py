"""flight_recorder and the dumps: the state of a rank as JSON, on request or after a failed call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdist.groups.world import current_world
from meshdist.runtime.flight_recorder import DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from meshdist.groups.world import World


def flight_recorder(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return the last 2,000 calls of this rank, and what it does now; recording is always on.

    `python -m meshdist.debug report DIR` reads the files of all ranks and reports what went wrong. Files are also
    written to the directory named by MESHDIST_FLIGHT_RECORDER_DIR when a call fails, and when the process gets
    SIGUSR1, unless the script handles that signal.

    Args:
        directory: Where to write the state as well, as `rank_<rank>.json`; made if missing. None writes nothing.

    Returns:
        Plain data: `rank`, `world_size`, `host`, `pid`, `time_s`; `shrunk`, how often the world was shrunk;
        `groups` by name with `label`, `ranks` and the number of `calls`; `stack`, the lines of the rank's
        thread, `place`, the innermost line of your code, and `in_call`, whether it waits for this package; and
        `records`, the oldest first. Each has: `group`, its `label`, `sequence` (1 for the group's first
        collective; messages have their own numbers), `call`, `kind` (collective or message), `text`, `sent`
        and `received` (dtype and shape of each array), `root` (a rank of the group), `tag`, `created_s`,
        `started_s` and `completed_s` (seconds since 1970; None for not yet), `timeout_s`, `state` (queued,
        started, completed or failed), `site` (file and line of the user's call, as train.py:12), `function` and,
        if it failed, `error`.

    Raises:
        ValueError: There is no world.
        OSError: The file cannot be written.

    Example:
        >>> import meshdist as dist
        >>> def main():
        ...     dist.barrier()
        ...     return [record["text"] for record in dist.flight_recorder()["records"]]
        >>> dist.run(main, 2)
        [['barrier()'], ['barrier()']]
    """
    from meshdist.debug.rank_state import rank_state

    world = current_world()
    state = rank_state(world, "asked for by flight_recorder()")
    if directory is not None:
        write_state(state, Path(directory))
    return state


def write_state(state: dict[str, Any], directory: Path) -> Path:
    """Write a rank's state into `directory` atomically; return the file."""
    import tempfile

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank_{state['rank']}.json"
    # Another thread of the rank may write the same file.
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=directory)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(state, file)
            file.write("\n")
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


def dump_fault(world: World, reason: str) -> None:
    """Write the state of a rank whose call failed to the environment's directory; never raise."""
    from meshdist.debug.rank_state import rank_state

    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    try:
        path = write_state(rank_state(world, reason), Path(directory))
    except OSError as error:
        world.log.warning("the flight recorder's file cannot be written to %s: %s", directory, error)
    else:
        world.log.info("the flight recorder's last calls are in %s", path)
