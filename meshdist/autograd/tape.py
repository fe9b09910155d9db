"""The tape of a differentiated function: its operations in order, and the backward pass through them.

The backward pass runs the operations in exactly the reverse order of the calls. So where ranks ran other operations
than each other, they still meet in every collective and message: if the calls of the function do not deadlock, those of
its backward pass do not either. Collectives of whose result nothing depends have a gradient of zeros, and take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import numpy as np
from autograd import tracer
from autograd.core import add_outgrads, primitive_vjps
from autograd.extend import VJPNode, vspace

from meshdist.autograd.array_vjps import maker_for_arrays
from meshdist.autograd.device_arrays import is_device_array, register


class _Traces:
    """Numbers for differentiated functions, larger for those that begin later.

    HIPS autograd numbers them by their depth in the process, which ranks that are threads disturb for each other.
    """

    def __init__(self) -> None:
        self._numbers = count()

    @contextmanager
    def new_trace(self) -> Iterator[int]:
        yield next(self._numbers)


tracer.trace_stack = _Traces()

# Primitives whose backward pass communicates: it runs on all ranks, whether or not the result is used.
communicating: set[Any] = set()

_current: ContextVar[Tape | None] = ContextVar("meshdist_autograd_tape", default=None)


def current_tape() -> Tape | None:
    """Return the tape of the innermost function that this rank differentiates now, or None."""
    return _current.get()


class Tape:
    """The operations of one differentiated function.

    Attributes:
        trace: The number that its boxes carry.
        calls: The operations that communicate in the backward pass, in order.
        anchor: A box of zero, for operations on no array that is differentiated.
        has_inputs: Whether some roots are inputs.

    `box(value, is_input=True)` makes an input. The backward pass can then go to the inputs first, and to the other
    roots later: see `backward`.
    """

    def __init__(self, trace: int) -> None:
        self.trace = trace
        self.numbers = count(1)
        self.calls: list[TapeNode] = []
        self.has_inputs = False
        self.anchor = self.box(0.0)

    def box(self, value: Any, is_input: bool = False) -> Any:
        """Return a box of a value that the function is differentiated by."""
        register(value)
        root = TapeNode.new_root(self)
        root.is_input = is_input
        self.has_inputs = self.has_inputs or is_input
        return tracer.new_box(value, self.trace, root)


class TapeNode(VJPNode):  # type: ignore[misc]
    """An operation on a tape.

    Attributes:
        number: Its place; 0 for what the function is differentiated by.
        is_input: Whether it is an input, or depends on one.
        parents: The operations whose results it takes; of an operation that depends on an input, those that do.
        vjp: Returns the gradients of these from that of its own result.
        others: The other parents and the function to their gradients, or None.
        space: The vector space of its result, where this may be unused.
    """

    __slots__ = ("is_input", "name", "number", "others", "space", "tape")

    parents: Any
    vjp: Any
    others: tuple[Any, Any] | None

    def __init__(
        self, value: Any, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any, parents: Any
    ) -> None:
        self.tape: Tape = parents[0].tape
        self.number = next(self.tape.numbers)
        self.name = getattr(fun, "__name__", str(fun))
        self.space = None
        self.others = None
        self.is_input = self.tape.has_inputs and any(parent.is_input for parent in parents)
        if self.is_input and not all(parent.is_input for parent in parents):
            inputs, others = (
                [place for place, parent in enumerate(parents) if parent.is_input is wanted] for wanted in (True, False)
            )
            vjp = _made_vjp(self.name, fun, tuple(argnums[place] for place in others), value, args, kwargs)
            self.others = [parents[place] for place in others], vjp
            parents, argnums = (tuple(each[place] for place in inputs) for each in (parents, argnums))
        self.parents = parents
        self.vjp = _made_vjp(self.name, fun, argnums, value, args, kwargs)
        if fun in communicating:
            self.space = vspace(value)
            self.tape.calls.append(self)

    def initialize_root(self, tape: Tape) -> None:
        """Make it what the function is differentiated by."""
        self.parents, self.vjp, self.others, self.is_input = (), lambda g: (), None, False
        self.tape, self.number, self.name, self.space = tape, 0, "", None


tracer.notrace_primitives[TapeNode] = tracer.notrace_primitives[VJPNode]


def _made_vjp(
    name: str, fun: Any, argnums: Any, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], Any]:
    # Of types: a group, which is an argument of collectives, looks for similar names before it lacks one.
    placed = any(hasattr(type(x), "placements") for x in (value, *args))
    is_of_numpy = not placed and not any(is_device_array(x) for x in (value, *args))
    maker = primitive_vjps.get(fun) if is_of_numpy else maker_for_arrays(fun)
    why: Exception | None = None
    if maker is not None:
        try:
            made: Callable[[Any], Any] = maker(argnums, value, args, kwargs)
            return made if hasattr(value, "placements") else _of_plain(made)
        except NotImplementedError as error:
            why = error
    advice = "use meshdist.autograd.local_map" if placed else "give it one, with autograd.extend.primitive and defvjp"
    said = f" for these arguments ({why})" if why else ""
    raise TypeError(f"{name} has no gradient{said}; {advice}") from why


def _of_plain(vjp: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the product of an operation whose result is a plain array, which may be used beside DTensors."""
    return lambda g: vjp(g.full() if hasattr(g, "placements") else g)


@contextmanager
def recording() -> Iterator[Tape]:
    """Make a new tape the current one until the block ends."""
    with tracer.trace_stack.new_trace() as trace:
        tape = Tape(trace)
        token = _current.set(tape)
        try:
            yield tape
        finally:
            _current.reset(token)


def pullback(fun: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, Callable[[Any], Sequence[Any]]]:
    """Return `fun(*values)`, and the function from the gradient of its result to those of the values.

    A result may be a list or tuple of arrays. The gradient of what is no floating or complex array is None.
    """
    with recording() as tape:
        boxes = [tape.box(x) if is_differentiable(x) else None for x in values]
        result = fun(*[x if box is None else box for x, box in zip(values, boxes, strict=True)])
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    plain = [x._value if is_on(tape, x) else x for x in results]
    whole = type(result)(plain) if isinstance(result, (list, tuple)) else plain[0]

    def pull(gradient: Any) -> list[Any]:
        gradients = gradient if isinstance(result, (list, tuple)) else [gradient]
        found: dict[TapeNode, Any] = {}
        ends = [(x._node, g) for x, g in zip(results, gradients, strict=True) if is_on(tape, x)]
        backward(tape, ends, found.__setitem__)
        return [
            None if box is None else found[box._node] if box._node in found else vspace(x).zeros()
            for x, box in zip(values, boxes, strict=True)
        ]

    return whole, pull


def is_on(tape: Tape, x: Any) -> bool:
    """Return whether `x` is a box of this tape."""
    return bool(tracer.isbox(x) and x._trace == tape.trace)


def is_differentiable(x: Any) -> bool:
    """Return whether `x` is an array or a number that a function may be differentiated by."""
    return type(x) in (float, complex) or (hasattr(x, "dtype") and np.dtype(x.dtype).kind in "fc")


def backward(
    tape: Tape,
    ends: Sequence[tuple[TapeNode, Any]],
    finished: Callable[[TapeNode, Any], None],
    is_input: bool | None = None,
) -> list[tuple[TapeNode, Any]]:
    """Run the tape backwards, once.

    Args:
        tape: The tape.
        ends: The operations whose results are differentiated, with the gradients of these.
        finished: Called with each root and its gradient as soon as that is complete; not for unused roots.
        is_input: On a tape with inputs, True for the first half, of the operations that depend on an input, and False
            for the second half, of the others. `ends` are those of that half.

    Returns:
        From the first half, the operations that have parents in the second one, with the gradients of their results.
    """
    nodes, uses = _reached(
        [*(call for call in tape.calls if is_input in (None, call.is_input)), *(node for node, _ in ends)]
    )
    unfinished: list[tuple[TapeNode, Any]] = []
    gradients: dict[TapeNode, Any] = {}
    for node, gradient in ends:
        gradients[node] = add_outgrads(gradients.get(node), gradient)
    for node in [node for node in gradients if not node.number and node not in uses]:
        finished(node, gradients.pop(node)[0])
    for node in nodes:
        found = gradients.pop(node, None)
        outgoing = node.space.zeros() if found is None and node.space is not None else found[0]
        if node.others is not None:
            unfinished.append((node, outgoing))
        incoming_gradients = node.vjp(outgoing)
        node.vjp = None  # frees the arrays that it kept
        for parent, incoming in zip(node.parents, incoming_gradients, strict=True):
            gradients[parent] = add_outgrads(gradients.get(parent), incoming)
            if parent.number == 0:
                uses[parent] -= 1
                if not uses[parent]:
                    finished(parent, gradients.pop(parent)[0])
    return unfinished


def _reached(ends: Sequence[TapeNode]) -> tuple[list[TapeNode], dict[TapeNode, int]]:
    """Return the operations that `ends` depend on, the last first, and how many of them use each root."""
    seen: set[TapeNode] = set()
    uses: dict[TapeNode, int] = {}
    left = [node for node in ends if node.number]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        for parent in node.parents:
            if parent.number == 0:
                uses[parent] = uses.get(parent, 0) + 1
            else:
                left.append(parent)
    return sorted(seen, key=lambda node: -node.number), uses
