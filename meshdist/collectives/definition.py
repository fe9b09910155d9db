"""Collective: what the one definition of a collective becomes.

The definition is a function that says what is sent, what is received, and submits it to a group. The decorator makes
it the flat function of the API and, found on a ProcessGroup or a DeviceMesh, the method. A backend finds in it the
name to look for, the default algorithm, and the checks, which run once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend
    from meshdist.call import Buffers, Call
    from meshdist.collectives.methods import CollectiveMethods
    from meshdist.collectives.staging import Staging
    from meshdist.process_group import ProcessGroup

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound="GroupFunction[Any, Any]")

# The algorithm that a backend without a native form runs: (backend, call, send, recv) -> what to wait for.
Algorithm = Callable[["Backend", "Call", "Buffers", "Buffers"], Iterator[Waitable]]

_ROOTS = ("src", "dst")


# Called by C code: a Python method that hands on *args and **kwargs would take longer than the rest of the way.
if TYPE_CHECKING:

    class _Calling:
        def __new__(cls, function: Any, *args: Any, **kwargs: Any) -> Any: ...
        def __init__(self, function: Any) -> None: ...
else:
    _Calling = partial


class GroupFunction(_Calling, Generic[P, R]):
    """A function with a `group` parameter that is a method of groups and meshes as well.

    Called, it is the flat function: `src` and `dst` are global ranks. Found on a ProcessGroup or a DeviceMesh it is
    bound to that group, and `src` and `dst` are ranks in it.
    """

    # What a method passes for a rank of the group that is not given.
    absent_root: int | None = None

    if TYPE_CHECKING:
        func: Callable[P, R]

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the flat function."""

    else:

        def __new__(cls, function, *args, **kwargs):  # noqa: D102 - the arguments of __init__
            return super().__new__(cls, function)

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self.name = function.__name__

    def __reduce__(self) -> str:
        return self.name  # found in its module

    def __repr__(self) -> str:
        return f"<meshdist.{self.name}>"

    @overload
    def __get__(self: Self, owner: None, cls: type) -> Self: ...
    @overload
    def __get__(self, owner: CollectiveMethods, cls: type) -> Callable[P, R]: ...
    def __get__(self, owner: CollectiveMethods | None, cls: type) -> Any:
        if owner is None:
            return self
        method = _bind(self.func, owner, self.absent_root)
        # From now on found in the instance, before the class: binding costs once.
        owner.__dict__[self.name] = method
        return method


def _bind(function: Callable[..., R], owner: CollectiveMethods, absent_root: int | None) -> Callable[..., R]:
    call = _with_group(function, owner.collective_group)
    code = function.__code__
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "group"]
    root = next((name for name in _ROOTS if name in names), None)
    if root is None:
        return call

    def rooted(*args: Any, **kwargs: Any) -> R:
        kwargs.update(zip(names, args, strict=False))
        if root in kwargs:
            kwargs[f"group_{root}"] = kwargs.pop(root)
        elif absent_root is not None:
            kwargs.setdefault(f"group_{root}", absent_root)
        return call(**kwargs)

    return update_wrapper(rooted, function)


def _with_group(function: Callable[..., R], group: ProcessGroup) -> Callable[..., R]:
    """Return a function with another default for its group: called faster than a partial that names the group."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = list(function.__defaults__ or ())
    defaults[names.index("group") - len(names)] = group
    bound = FunctionType(code, function.__globals__, function.__name__, tuple(defaults), function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(bound, function)


def written_everywhere(call: Call) -> bool:
    """Return True: this collective writes its output on every rank."""
    return True


class Collective(GroupFunction[P, R]):
    """A collective operation.

    Attributes:
        name: What backends name their native form.
        names: The parameters that are sent and received, for messages.
        check: Raises for arguments that are wrong on this rank alone.
        agreed: What of a call must be equal on all ranks, besides the op and the root.
        default: The algorithm over send and recv.
        writes: Whether the output is written on this rank.
        native: The method of a backend that carries it out; its name, unless it is another collective in disguise.
        lists: Which of the two, `send` and `recv`, are lists of arrays.
        in_place: What is received takes the place of what is sent.
        staging: How it is carried out by another collective; None where it is one by itself.
        is_prelude: It is the first part of a call that another one of the same name completes.
    """

    staging: Staging | None = None
    is_prelude: bool = False

    def __init__(
        self,
        function: Callable[P, R],
        names: tuple[str, str],
        check: Callable[[Call], None],
        agreed: Callable[[Call], tuple[Any, ...]],
        default: Algorithm,
        writes: Callable[[Call], bool],
        native: str | None = None,
        lists: tuple[str, ...] = (),
    ) -> None:
        super().__init__(function)
        self.names = names
        self.check = check
        self.agreed = agreed
        self.default = default
        self.writes = writes
        self.native = native or self.name
        self.lists = lists
        self.in_place = names[0] == names[1]

    def under(
        self, name: str, agreed: Callable[[Call], tuple[Any, ...]], *, is_prelude: bool = False
    ) -> Collective[P, R]:
        """Return this collective under another name: what a function that is built on it submits.

        Messages, and what the ranks compare, then speak of the function that the user called.
        """
        disguised: Collective[P, R] = type(self).__new__(type(self), self.func)
        disguised.__dict__.update(self.__dict__)
        disguised.name = name
        disguised.agreed = agreed
        disguised.is_prelude = is_prelude
        return disguised


def collective(
    *,
    names: tuple[str, str] = ("tensor", "tensor"),
    check: Callable[[Call], None],
    agreed: Callable[[Call], tuple[Any, ...]],
    default: Algorithm,
    writes: Callable[[Call], bool] = written_everywhere,
    native: str | None = None,
    lists: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Collective[P, R]]:
    """Make the decorated function a Collective; see there for the arguments."""
    return lambda function: Collective(function, names, check, agreed, default, writes, native, lists)
