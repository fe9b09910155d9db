"""Calls of a Dask client, in its event loop; they end if the client is closed meanwhile.

`Client.sync`, by which the client's own methods wait, may wait for ever if another thread closes the client: what it
has scheduled is lost once the loop has been told to stop. And `distributed.wait` is for the futures of the default
client, whose event loop is another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import wait as wait_for_calls
from inspect import isawaitable
from typing import Any

from distributed import Client, Future

# How often a call looks whether the event loop has ended.
_LOOK_S = 0.5


def called(client: Client, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `function` returns in the client's event loop, where methods of Dask return awaitables.

    Raises:
        ConnectionError: The client was closed.
        TimeoutError: That of the function.
    """

    async def call() -> Any:
        found = function(*args, **kwargs)
        return await found if isawaitable(found) else found

    check_open(client)
    calls = call()
    try:
        loop = client.loop.asyncio_loop
        calling = asyncio.run_coroutine_threadsafe(calls, loop)
    except RuntimeError:  # there is no loop any more
        calls.close()
        raise _closed() from None
    try:
        while not wait_for_calls([calling], _LOOK_S).done:
            if not loop.is_running():
                calls.close()
                raise _closed()
        return calling.result()
    except KeyboardInterrupt:
        calling.cancel()
        raise
    except asyncio.TimeoutError as error:  # TimeoutError itself since Python 3.11
        raise TimeoutError(*error.args) from error
    except Exception:
        check_open(client)  # else it may be anything
        raise


def settle(client: Client, futures: Iterable[Future], longest_s: float | None = None, *, first: bool = False) -> None:
    """Wait until all of some futures, or the `first` of them, are done or have failed; at most for so long.

    Raises:
        ConnectionError: The client was closed.
    """

    async def wait() -> None:
        # Which does not fetch the result.
        waiting = [asyncio.ensure_future(_awaited(future)) for future in futures]
        if waiting:
            until = asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED
            _, pending = await asyncio.wait(waiting, timeout=longest_s, return_when=until)
            for each in pending:
                each.cancel()

    called(client, wait)
    check_open(client)


async def _awaited(future: Future) -> Any:
    found: Any = future.exception()  # awaitable in the event loop
    return await found


def check_open(client: Client) -> None:
    """Raise a ConnectionError if the client was closed."""
    if client.status in ("closing", "closed"):
        raise _closed()


def _closed() -> ConnectionError:
    return ConnectionError("run: the client was closed")
