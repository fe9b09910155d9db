"""`meshrun --dashboard`: a live table of the ranks, their states, last calls and last lines of output, with rich."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from meshdist.errors import DistError
from meshdist.launch.job_status import JobStatus, duration, status_of
from meshdist.store import Store

_PERIOD_S = 1.0
_ANSWER_S = 0.5
_NUM_LINES = 3  # of output, for each rank
_MOST_CLAIMED = len("destroy_process_group()")  # by the states, of the width
_CALL_CLAIMS = 14
_STYLES = {"waiting": "yellow", "running": "green", "succeeded": "dim", "terminated": "dim", "in a call": "green"}
_FAILED = "bold red"


class Dashboard:
    """Shows a job on the terminal while it runs; a context manager. Needs rich.

    What else the launcher prints appears above the table.
    """

    def __init__(self) -> None:
        self._tails: dict[int, deque[str]] = {}
        self._calls: dict[int, str] = {}  # the last one seen of each rank, which is not asked once it has ended
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._address = ""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Any = None

    def __enter__(self) -> Dashboard:
        from rich.live import Live

        self._live = Live(auto_refresh=False, redirect_stdout=False)
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def begin(self, store: Store, address: str) -> None:
        """Show a start of the ranks, whose store this is, from now on."""
        self._store, self._address = store, address
        self._end.clear()
        self._thread = threading.Thread(target=self._refresh, name="meshrun-dashboard", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Show the last state of this start."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            self._tails.clear()
        self._calls.clear()

    def take(self, rank: int, lines: Sequence[bytes]) -> None:
        """Note lines of a rank's output."""
        with self._lock:
            tail = self._tails.setdefault(rank, deque(maxlen=_NUM_LINES))
            tail.extend(line.decode(errors="replace") for line in lines)

    def _refresh(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._end.wait(_PERIOD_S)
            try:
                assert self._store is not None
                status = status_of(self._store, self._address, _ANSWER_S)
            except DistError:
                return  # the store has ended with this start
            with self._lock:
                tails = {rank: list(tail) for rank, tail in self._tails.items()}
            self._live.update(render(self._with_last_calls(status), tails), refresh=True)

    def _with_last_calls(self, status: JobStatus) -> JobStatus:
        self._calls.update({rank.rank: rank.call for rank in status.ranks if rank.call})
        calls = [rank.call or self._calls.get(rank.rank, "") for rank in status.ranks]
        shown = [
            rank if rank.call or not call else rank._replace(call=f"last seen: {call}")
            for rank, call in zip(status.ranks, calls, strict=True)
        ]
        return status._replace(ranks=shown)


def render(status: JobStatus, tails: Mapping[int, Sequence[str]]) -> Any:
    """Return the state of a job, and the last lines of output of its ranks, for a console of rich."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ranks = Table(title=Text(status.headline()), title_justify="left", title_style="bold", box=SIMPLE_HEAD, expand=True)
    hosts = {rank.host for rank in status.ranks}
    ranks.add_column("rank", justify="right", no_wrap=True)
    if len(hosts) > 1:
        ranks.add_column("host", no_wrap=True)
    ranks.add_column("pid", no_wrap=True)
    # With a ratio, its width is the least one: no word of a state is cut.
    longest_word = max((len(word) for rank in status.ranks for word in rank.state.split()), default=1)
    ranks.add_column("state", ratio=3, width=min(longest_word, _MOST_CLAIMED), overflow="fold")
    ranks.add_column("for", justify="right", no_wrap=True)
    ranks.add_column("call, or the last one", ratio=4, width=_CALL_CLAIMS, overflow="fold")
    for rank in status.ranks:
        style = next((style for begin, style in _STYLES.items() if rank.state.startswith(begin)), _FAILED)
        lasts = "" if rank.seconds is None else duration(rank.seconds)
        host = [rank.host] if len(hosts) > 1 else []
        ranks.add_row(str(rank.rank), *host, rank.pid, Text(rank.state, style), lasts, Text(rank.call))
    output = [
        Text(f"[rank{rank}] {line}", overflow="ellipsis", no_wrap=True)
        for rank in sorted(tails)
        for line in tails[rank]
    ]
    return Group(ranks, *output)


def why_no_dashboard() -> str | None:
    """Return why there can be no dashboard; None if rich is there."""
    from importlib.util import find_spec

    if find_spec("rich") is None:
        return "--dashboard needs the package rich: pip install rich"
    return None
