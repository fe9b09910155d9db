"""Calls that consist of messages, and fail as one: sendrecv, and the exchanges of shift and halo_exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import Array, as_array, check_dtype, check_writable, pack
from meshdist.arrays.interchange import hint_of_input, hint_of_output
from meshdist.errors import DistError
from meshdist.groups.tags_and_probes import MessageGroup, Probes
from meshdist.groups.unposted_messages import PersistentRequest
from meshdist.runtime.device_calls import DeviceCalls
from meshdist.runtime.work import Work

# How long a message of a broken group may take to fail.
_FAILING_S = 1.0


class Exchanges(Probes):
    """Sends and receives in one call, whose errors and records name the function that the user called."""

    def __init__(self, group: MessageGroup) -> None:
        super().__init__(group)
        # By the user's function: requests whose arguments have been checked, by peer, tag, dtype and shape.
        self._isends: defaultdict[str, dict[Any, PersistentRequest]] = defaultdict(dict)
        self._ireceives: defaultdict[str, dict[Any, PersistentRequest]] = defaultdict(dict)
        # The DeviceCalls that hold back messages until the end of a block; None outside of a block.
        self._batches: list[DeviceCalls] | None = None

    @abstractmethod
    def isend(self, tensor: Any, dst: int, tag: int, of: str = "isend") -> Work: ...
    @abstractmethod
    def irecv(self, tensor: Any, src: int | None, tag: int, of: str = "irecv") -> Work: ...

    def sendrecv(self, send: Any, recv: Any, dst: int, src: int | None, tags: tuple[int, int]) -> int:
        """Send a message and receive one; return the sender. Observers see an isend and an irecv."""
        of = "sendrecv"
        error_prefix = self._group.error_prefix(of)
        # Arrays of kinds that were sent and received before are plain, and recv can be written.
        is_known = (
            known_request(self._isends[of], send, dst, tags[0]) is not None
            and known_request(self._ireceives[of], recv, src, tags[1]) is not None
            and not np.may_share_memory(send, recv)
        )
        on_cpu = is_known or self._check_exchange(error_prefix, send, recv, tags)
        works: list[Work] = []
        try:
            with nullcontext() if on_cpu else self.batched(of):
                # The receive comes first, so that a message to this rank itself finds it.
                works.append(self.irecv(recv, src, tags[1], of))
                works.append(self.isend(send, dst, tags[0], of))
            taken, given = works
            given.wait()
            taken.wait()
        except DistError as error:
            raise _first_error(works, error) from None
        return self._group.ranks.index(taken.source_rank()) if src is None else src

    def exchange(
        self, of: str, receives: Sequence[tuple[Any, int]], sends: Sequence[tuple[Any, int]], tag: int, agree: str
    ) -> None:
        """Receive and send arrays, each from or to a rank, and wait for all; the user called the function `of`.

        Where a message does not fit, the error ends with `agree`: what of the arrays all ranks must agree on.
        """
        arrays = [array for array, _ in (*receives, *sends)]
        on_cpu = all(type(array) is np.ndarray or device_type_of(array) == "cpu" for array in arrays)
        works: list[Work] = []
        try:
            with nullcontext() if on_cpu else self.batched(of):
                for array, src in receives:
                    works.append(self.irecv(array, src, tag, of))
                for array, dst in sends:
                    works.append(self.isend(array, dst, tag, of))
            for work in works:
                work.wait()
        except DistError as error:
            first = _first_error(works, error)
            if first.is_misfit:
                first.add(f"; {agree}")
            raise first from None

    @contextmanager
    def batched(self, of: str) -> Iterator[None]:
        """Post the messages on GPUs that are begun in the block together at its end; `of` is the user's function."""
        batches: list[DeviceCalls] = []
        self._batches = batches
        try:
            yield
        except BaseException:
            for calls in batches:
                calls.end_batch(self._group, None)
            raise
        finally:
            self._batches = None
        for calls in batches:
            calls.end_batch(self._group, self._group.error_prefix(of))

    def _in_batch(self, calls: DeviceCalls) -> DeviceCalls:
        if self._batches is not None and calls not in self._batches:
            calls.begin_batch()
            self._batches.append(calls)
        return calls

    def _check_exchange(self, error_prefix: str, send: Any, recv: Any, tags: tuple[int, int]) -> bool:
        """Check the arguments of sendrecv; return whether the arrays are on the CPU."""
        self._group.usable_backend(error_prefix, send, recv)
        for array in (send, recv):
            if type(array) is not np.ndarray and device_type_of(array) != "cpu":
                return False
        given, (taken, _) = self._array(error_prefix, send, tags[0]), self._output(error_prefix, recv, tags[1])
        if np.may_share_memory(given, taken):
            raise ValueError(f"{error_prefix}: send and recv share memory, and recv is written; pass send.copy()")
        return True

    def _array(
        self, error_prefix: str, tensor: Any, tag: int, hint: Callable[[Any, str], str] = hint_of_input
    ) -> Array:
        self._check_tag(error_prefix, tag)
        array = self._group.named(error_prefix, as_array, tensor, "tensor", hint)
        self._group.named(error_prefix, check_dtype, array, "tensor")
        return array

    def _output(self, error_prefix: str, tensor: Any, tag: int) -> tuple[Array, Array]:
        array = self._array(error_prefix, tensor, tag, hint_of_output)
        self._group.named(error_prefix, check_writable, array, "tensor")
        return array, pack(array, keep=False)


def known_request(
    requests: dict[Any, PersistentRequest], tensor: Any, peer: int | None, tag: Any
) -> PersistentRequest | None:
    """Return the request of messages like this one, if their arguments were checked before."""
    if type(tensor) is np.ndarray and type(tag) is int and tensor.flags.carray:
        return requests.get((peer, tag, tensor.dtype, tensor.shape))
    return None


def _first_error(works: Sequence[Work], error: DistError) -> DistError:
    """Return the error of the message that failed first of one call, if another one made `error` by that."""
    if error.is_earlier:  # the progress thread, which broke the group, may be about to complete the work that failed
        for work in works:
            with suppress(DistError):
                work.wait(_FAILING_S)
    errors = [failed for work in works if isinstance(failed := work.exception(), DistError)]
    return next((failed for failed in errors if not failed.is_earlier), error)
