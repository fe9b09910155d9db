"""Plans of calls in the steps of a group; those of few bytes take one step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from meshdist import core
from meshdist.arrays.host import Array
from meshdist.backends.base import Backend, Plain, Plan
from meshdist.backends.gloo.shm.flag_barrier import ALL, Awaited, BarrierWait, EarlyReturn, FlagBarrier
from meshdist.backends.gloo.shm.shared_region import CALL_TEXT_BYTES, Slots
from meshdist.backends.gloo.shm.single_copy import address_of
from meshdist.runtime.call import Buffers, Call, Signature, hasher

if TYPE_CHECKING:
    from meshdist.backends.gloo.shm.heap import Heap
    from meshdist.core import Chunks, Countdown, Step


class NextCalls(NamedTuple):
    """What carries out the next calls of a plan in the core, and for how long; see `core.Chosen`."""

    run: Any  # a Step, Chunks or a SingleCopy
    calls: Countdown | None = None  # the last one, and those after it, are the plan's
    looks: Countdown | None = None  # bytes until the ranks look where they are, and what a call counts as
    cost: int = 0
    # If arrays may be shared: what tells whether this rank has such, the barrier, and which of its words tell, in each
    # phase, whether the arrays of a call are.
    shared: tuple[Heap, FlagBarrier, tuple[tuple[int, ...], ...]] | None = None


class BarrierPlan(Plan):
    def __init__(self, barrier: FlagBarrier, backend: Backend, call: Call) -> None:
        super().__init__(backend, call)
        self.barrier = barrier
        self.fingerprint = self.signature.fingerprint

    @abstractmethod
    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        """Carry out the call, yielding a wait at each step."""

    @property
    def runner(self) -> Callable[[Any, Any], object]:
        return self.run if core.module is None else core.Chosen(self, self.run)

    def next_calls(self) -> NextCalls | None:
        """Return what carries out the next calls in the core; None if they are to go through `run`."""
        return None

    def adopt_signature(self, signature: Signature) -> None:
        """Carry out a part of another call: signal and report that call's signature."""
        self.signature, self.fingerprint = signature, signature.fingerprint

    def run(self, send: Buffers, recv: Buffers) -> None:
        await_others = self.barrier.await_others
        for wait in self.steps(send, recv):
            await_others(wait.word, self)

    def first_step(self, send: Buffers, recv: Buffers) -> Callable[[], object]:
        """Take the first step of a call; return what carries out the rest."""
        steps = self.steps(send, recv)
        self.barrier.await_others(next(steps).word, self)
        return partial(self._take_steps, steps)

    def _take_steps(self, steps: Iterator[BarrierWait]) -> None:
        for wait in steps:
            self.barrier.await_others(wait.word, self)

    def arrive(self) -> BarrierWait:
        return BarrierWait(self.barrier, self.barrier.signal(self.fingerprint), self.signature)

    def await_rest(self, word: int) -> None:
        """Go on with a wait that takes longer than a few polls."""
        await_rest(self.backend, self.error_prefix, self.barrier, self.signature, word)

    def compiled(self, copies: StepCopies | None) -> Step | None:
        """Return what carries out a call of one step; None if the core does not."""
        if core.module is None or copies is None:
            return None
        # Not of this plan, which holds the step.
        wait = partial(await_rest, self.backend, self.error_prefix, self.barrier, self.signature)
        return core.Step(self.barrier, self.fingerprint, wait, self._early_return(), *copies)

    def _early_return(self) -> tuple[Awaited, int, bytes]:
        """Return for whom this rank waits; if not for all: how far slots of two phases are apart, the call in words."""
        return ALL, 0, b""


class OneStep(BarrierPlan):
    """A call of few bytes: put them into the slot, step, take what the others put.

    The core does all of that, if it is there, as far as `step_copies` can describe it. Where `set_alike` tells of calls
    on arrays of other sizes, it makes their steps from that of the first.

    Args:
        early: How ranks return before the others have come, if they do.

    Attributes:
        phases: The phases of the slots, of which a call uses one.
        num_listed: For how many of them, from the first on, `step_copies` lists the copies.
    """

    copies = True
    _step: Step | None = None
    _is_compiled = False
    _alike: tuple[Any, ...] | None = None  # what `core.Step.set_alike` is told

    def __init__(self, barrier: FlagBarrier, backend: Backend, call: Call, early: EarlyReturn | None = None) -> None:
        super().__init__(barrier, backend, call)
        self._awaited, slots = early or (ALL, None)
        self._phase_bytes = 0 if slots is None else slots.phase_bytes
        self.phases, self.num_listed = (range(2), 2) if slots is None else (range(slots.num_slots), 1)
        self._text = self._encoded()

    @abstractmethod
    def put(self, send: Buffers, phase: int) -> None: ...

    @abstractmethod
    def take(self, recv: Buffers, phase: int) -> None: ...

    def step_copies(self) -> StepCopies | None:
        """Return what `put` and `take` do, for the core; None if they do more than that can describe."""
        return None

    def set_alike(self, call: Call, num_bytes: int, most_bytes: int, slots: Slots, reserved: int) -> None:
        """Note which calls on arrays of other sizes the core can carry out as it does this one.

        Their copies are at places in proportion to the number of bytes.

        Args:
            call: This one.
            num_bytes: The most that a rank puts into its slot.
            most_bytes: The most in a call that would have such a plan; of fewer bytes, calls that need as many bits for
                their number would have one.
            slots: Those of the call.
            reserved: How many bytes this rank may put into its own.
        """
        most = 1 << max(0, num_bytes - 1).bit_length()
        bounds = most // 2 + 1, min(most, most_bytes, reserved)
        if core.module is not None and bounds[0] <= num_bytes <= bounds[1]:
            form = call.signature_form(self.signature)
            self._alike = None if form is None else (num_bytes, bounds, slots.extent, form, hasher())

    @property
    def runner(self) -> Callable[[Any, Any], object]:
        return self._compile() or self.run

    @property
    def template(self) -> Step | None:
        return None if self._alike is None else self._compile()

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        self._text = self._encoded()
        self._step, self._is_compiled, self._alike = None, False, None

    def run(self, send: Buffers, recv: Buffers) -> None:
        step = self._compile()
        if step is not None and step(send, recv):
            return
        word, phase = self._begin(send)
        self.barrier.await_others(word, self)
        self.take(recv, phase)

    def next_calls(self) -> NextCalls | None:
        step = self._compile()
        return None if step is None else NextCalls(step)

    def run_strided(self, send: Buffers, recv: Buffers, plain: Plain) -> None:
        step = self._compile()
        if step is None or not step(send, recv):
            super().run_strided(send, recv, plain)

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[BarrierWait]:
        word, phase = self._begin(send)
        yield BarrierWait(self.barrier, word, self.signature)
        self.take(recv, phase)

    def _begin(self, send: Buffers) -> tuple[int, int]:
        barrier = self.barrier
        phase = barrier.flip() if self._awaited is ALL else barrier.record_call(self._text) % len(self.phases)
        self.put(send, phase)
        return barrier.signal(self.fingerprint, self._awaited), phase

    def rest(self, send: Buffers, recv: Buffers, word: int, phase: int) -> Iterator[BarrierWait]:
        yield BarrierWait(self.barrier, word, self.signature)
        assert self._step is not None, "the core has begun the call"
        self._step.finish(send, recv, phase)

    def _encoded(self) -> bytes:
        return self.signature.text.encode()[:CALL_TEXT_BYTES]

    def _early_return(self) -> tuple[Awaited, int, bytes]:
        return self._awaited, self._phase_bytes, self._text

    def _compile(self) -> Step | None:
        if not self._is_compiled:
            self._is_compiled = True
            self._step = self.compiled(self.step_copies())
            if self._step is not None and self._alike is not None:
                self._step.set_alike(*self._alike)
        return self._step


class Sizes(NamedTuple):
    """The sizes of blocks that no rank knows alone: each rank puts its own into a table, and sees all."""

    own: Array
    tables: Sequence[Array]  # for both phases, the rows of all ranks
    rank: int
    agreed: bytes  # the table as it was when the ranks compared it

    def compared(self, copies: StepCopies) -> StepCopies:
        """Return `copies` that put the sizes as well, and of which nothing is taken if the table is another one."""
        addresses = [address_of(table[self.rank]) for table in self.tables]
        num_bytes = self.own.nbytes
        return copies._replace(
            keeps=(copies.keeps, self),
            puts=[
                [SlotCopy(-1, 0, num_bytes, address), *puts]
                for address, puts in zip(addresses, copies.puts, strict=True)
            ],
            agreed=self.agreed,
            sizes=address_of(self.own),
            tables=(address_of(self.tables[0]), address_of(self.tables[1])),
        )


class Run(NamedTuple):
    """Chunks in a row whose steps are the same, at places that are a chunk further in every array.

    Attributes:
        copies: The step of the first chunk.
        second: A second step of each chunk; None for none.
        num_chunks: How many they are.
    """

    copies: StepCopies
    second: StepCopies | None
    num_chunks: int


class InChunks(BarrierPlan):
    """Many bytes: one step or two for each chunk. The core carries them out, if it is there and `runs` tells them."""

    chunk_bytes: int
    _compiled: Chunks | None = None
    _is_compiled = False

    @abstractmethod
    def runs(self) -> tuple[list[Run], tuple[int, int]] | None:
        """Return the chunks, and how many arrays are sent and received; None if the core cannot carry them out."""

    def run(self, send: Buffers, recv: Buffers) -> None:
        chunks = self._compile()
        if chunks is None or not chunks(send, recv):
            super().run(send, recv)

    def next_calls(self) -> NextCalls | None:
        chunks = self._compile()
        return None if chunks is None else NextCalls(chunks)

    def run_strided(self, send: Buffers, recv: Buffers, plain: Plain) -> None:
        chunks = self._compile()
        if chunks is None or not chunks(send, recv):
            super().run_strided(send, recv, plain)

    def first_step(self, send: Buffers, recv: Buffers) -> Callable[[], object]:
        chunks = self._compile()
        if chunks is None or not chunks.begin(send, recv):
            return super().first_step(send, recv)
        return partial(chunks.finish, send, recv)

    def adopt_signature(self, signature: Signature) -> None:
        super().adopt_signature(signature)
        self.recompile()

    def recompile(self) -> None:
        """Describe the chunks anew before the next call."""
        self._compiled, self._is_compiled = None, False

    def _compile(self) -> Chunks | None:
        if not self._is_compiled:
            self._is_compiled = True
            self._compiled = self.compiled_chunks()
        return self._compiled

    def compiled_chunks(self, sizes: Sizes | None = None) -> Chunks | None:
        """Return what carries out the chunks in the core; None if it does not.

        Args:
            sizes: What the ranks compare in the first step; None for nothing.
        """
        found = None if core.module is None else self.runs()
        if found is None:
            return None
        runs, num_arrays = found
        if sizes is not None:
            if not runs:
                return None
            whole, *rest = runs
            runs = [whole._replace(copies=sizes.compared(whole.copies), num_chunks=1), *rest]
            if whole.num_chunks > 1:
                runs.insert(1, whole._replace(num_chunks=whole.num_chunks - 1))
        compiled = []
        for run in runs:
            first = self.compiled(run.copies._replace(yields=True))
            if first is None:  # its reduction is NumPy's
                return None
            second = None if run.second is None else self.compiled(run.second._replace(yields=True))
            compiled.append((first, second, run.num_chunks))
        return core.Chunks(compiled, self.chunk_bytes, num_arrays)


def chunks_of_blocks(num_bytes: Sequence[int], longest: int, chunk_bytes: int) -> Iterator[tuple[int, list[int]]]:
    """Cut blocks into chunks, as many as the longest block of any rank has.

    Yield for chunks in a row that are equal how many they are, and how many bytes of each block.
    """
    ends = {-(-size // chunk_bytes) for size in (longest, *num_bytes)} | {size // chunk_bytes for size in num_bytes}
    for first, end in pairwise(sorted({0, *ends})):
        yield end - first, [max(0, min(chunk_bytes, size - first * chunk_bytes)) for size in num_bytes]


def await_rest(backend: Backend, error_prefix: str, barrier: FlagBarrier, signature: Signature, word: int) -> None:
    backend.wait(BarrierWait(barrier, word, signature), error_prefix)


class SlotCopy(NamedTuple):
    """A copy between an array of a call, or a part of it, and its place in a slot."""

    array: int  # -1 is the sizes
    offset: int
    num_bytes: int
    address: int


NO_ROW = -1, -1, 0  # for `StepCopies.own`


class StepCopies(NamedTuple):
    """What a call of one step copies, for the core."""

    keeps: Any  # the arrays in the slots; the addresses point into them
    num_sent: int  # arrays of the call
    num_received: int
    # For both phases, the copies into the slots and out of them. If ranks return early, for the first phase alone: the
    # slots of the others follow at equal distances.
    puts: Sequence[Sequence[SlotCopy]]
    takes: Sequence[Sequence[SlotCopy]]
    # What the rank keeps for itself, copied without the slots: the array and the offset that it is sent from, and those
    # that it is received into, bytes.
    kept: Sequence[tuple[int, int, int, int, int]] = ()
    op: str = ""  # the reduction; "" for none
    kind: str = "-"  # what dtype it is of
    itemsize: int = 0
    num_rows: int = 0
    rows: Sequence[Sequence[int]] = ()  # what is reduced: for the phases, as above, the address of each rank's elements
    num_elements: int = 0
    # For both phases, where the result is put together before `takes` copy it to the arrays; 0 if it is one array.
    totals: tuple[int, int] = (0, 0)
    # If no rank knows all sizes: the table of all ranks' sizes when they were last compared; the address of this rank's
    # own, which are array -1 of `puts`; and for both phases, the address of the table.
    agreed: bytes = b""
    sizes: int = 0
    tables: tuple[int, int] = (0, 0)
    # The row that is read from an array that is sent, not from a slot: its number, the array, and the offset. Array -1
    # stands for the parts of a list, if these are reduced one by one.
    own: tuple[int, int, int] = NO_ROW
    is_second: bool = False  # of two steps that have the same phase
    yields: bool = False  # other threads may run meanwhile
    streams: bool = False  # what is taken and kept is not left in the caches
