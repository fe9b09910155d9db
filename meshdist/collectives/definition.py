"""Collective: the type of a collective's definition.

A definition is a function that names the input and output and submits them to a group. The decorator makes it the flat
function of the API and, on a ProcessGroup or a DeviceMesh, a method. Backends read from it the name of their native
form, the default algorithm, and the checks, which run once per plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, overload

from meshdist import core
from meshdist.collectives.dataflow import Dataflow
from meshdist.runtime.call import Algorithm, Call, CollectiveSpec, CompositionSpec
from meshdist.system.name_hints import OWN_GROUP, explain, explaining, never_began

if TYPE_CHECKING:
    from meshdist.runtime.interfaces import Group, HasGroup

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound="GroupFunction[Any, Any]")

_ROOTS = ("src", "dst")


# Called from C: a Python method that forwards *args and **kwargs would dominate the cost of a call.
if TYPE_CHECKING:

    class _Calling:
        def __new__(cls, function: Any, *args: Any, **kwargs: Any) -> Any: ...
        def __init__(self, function: Any) -> None: ...
else:
    _Calling = core.Function


core.explain_type_errors(explain)


def _explained(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose errors name the argument that was meant, where the core does not see to that."""
    return explaining(function) if core.module is None else function


class GroupFunction(_Calling, Generic[P, R]):
    """A function with a `group` parameter that is also a method of groups and meshes.

    As a flat function, `src` and `dst` are global ranks. As a method of a ProcessGroup or a DeviceMesh it is bound to
    that group, and `src` and `dst` are ranks in it.
    """

    # The default of `src` in methods.
    absent_root: int | None = None
    # None for functions that make other calls.
    dataflow: Dataflow | None = None

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Call the flat function."""

    else:

        def __new__(cls, function, *args, **kwargs):
            return super().__new__(cls, _explained(cls.flat(function)))

    def __init__(self, function: Callable[P, R]) -> None:
        update_wrapper(self, function)
        self.definition = function
        self.name = function.__name__
        self.tag_place = _tag_place(_parameters(function))

    @staticmethod
    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the flat function does: what `function` does, but in subclasses."""
        return function

    def __reduce__(self) -> str:
        return self.name  # found in its module

    def __repr__(self) -> str:
        return f"<meshdist.{self.name}>"

    @overload
    def __get__(self: Self, owner: None, cls: type) -> Self: ...
    @overload
    def __get__(self, owner: HasGroup, cls: type) -> Callable[P, R]: ...
    def __get__(self, owner: HasGroup | None, cls: type) -> Any:
        if owner is None:
            return self
        method = _bind(self.definition, owner, self.absent_root)
        # Found in the instance from now on: binding costs once.
        owner.__dict__[self.name] = method
        return method


def _bind(function: Callable[..., R], owner: HasGroup, absent_root: int | None) -> Callable[..., R]:
    call = _with_group(function, owner.collective_group)
    names = [name for name in _parameters(function) if name != "group"]
    roots = [name for name in _ROOTS if name in names]
    if not roots:
        return known_to_core(call)

    def rooted(*args: Any, **kwargs: Any) -> R:
        kwargs.update(zip(names, args, strict=False))
        for root in roots:
            if root in kwargs:
                kwargs[f"group_{root}"] = kwargs.pop(root)
            elif absent_root is not None and root == "src":
                kwargs.setdefault(f"group_{root}", absent_root)
        try:
            return call(**kwargs)
        except TypeError as error:
            if never_began(error):
                wrong_arguments = error.with_traceback(None)
                raise wrong_arguments
            raise

    return known_to_core(update_wrapper(rooted, function), _tag_place(names))


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]


def _tag_place(names: Sequence[str]) -> int:
    # Where the tag of a message may be passed without its name; -1 if there is none.
    return names.index("tag") if "tag" in names else -1


class BoundFunction(_Calling):
    """A function bound to a group, where the core calls it."""

    if not TYPE_CHECKING:

        def __new__(cls, function):
            return super().__new__(cls, function, is_bound=True)


def known_to_core(method: Callable[..., R], tag_place: int = -1) -> Callable[..., R]:
    """Return a function bound to a group whose calls the core makes again, if they were made before.

    Messages that differ in the tag alone are alike; it may be passed at `tag_place`.
    """
    if core.module is None:
        return _explained(method)
    bound: Any = BoundFunction(method)
    bound.tag_place = tag_place
    return cast("Callable[..., R]", update_wrapper(bound, method))


def _with_group(function: Callable[..., R], group: Group) -> Callable[..., R]:
    """Return a copy of a function with `group` as default, which is faster to call than a partial.

    The copy has no keyword `group`.

    The copy runs the definition's own code and globals, so it behaves as the definition does. It is bound once per
    group, as any method bound in `__init__` would be: patch a collective on its class before the first call, or on the
    instance. To observe or replace all calls, of methods and flat functions alike, use the group's call hooks: both end
    in `submit`.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = list(function.__defaults__ or ())
    defaults[names.index("group") - len(names)] = group
    code = code.replace(co_varnames=_renamed(code.co_varnames), co_cellvars=_renamed(code.co_cellvars))
    bound = FunctionType(code, function.__globals__, function.__name__, tuple(defaults), function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(bound, function)


def _renamed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(OWN_GROUP if name == "group" else name for name in names)


def written_everywhere(call: Call) -> bool:
    return True


class Collective(GroupFunction[P, R]):
    """A collective operation.

    Attributes:
        name: The name of native forms in backends.
        names: The parameters of the input and output, for messages.
        check: Raises for arguments that are wrong on this rank alone.
        agreed: The values that must be equal on all ranks, besides op and root.
        default: The algorithm over send and recv.
        writes: Whether the output is written on this rank.
        native: The backend method that carries it out; differs from `name` for a collective under another name.
        lists: Which of the sides `send` and `recv` are lists of arrays.
        in_place: Input and output are the same buffer.
        dataflow: What it moves; if not declared, what the default algorithm sends.
        composition: How another collective carries it out; None if it is independent.
        is_size_exchange: The ranks exchange the sizes of objects; a second call of the same name exchanges the objects.
        meets: The ranks meet before they begin it, so that a timeout leaves the group usable.
    """

    dataflow: Dataflow
    composition: CompositionSpec | None = None
    is_size_exchange: bool = False
    meets: bool = False

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
        dataflow: Dataflow | None = None,
    ) -> None:
        super().__init__(function)
        self.names = names
        self.check = check
        self.agreed = agreed
        self.default = default
        self.writes = writes
        self.native = native or self.name
        self.lists = lists
        self.dataflow = dataflow or Dataflow(self.name)
        self.in_place = names[0] == names[1]

    def under(
        self, name: str, agreed: Callable[[Call], tuple[Any, ...]], *, is_size_exchange: bool = False
    ) -> Collective[P, R]:
        """Return this collective under the name of the user's function, for errors and comparisons of ranks."""
        renamed: Collective[P, R] = type(self).__new__(type(self), self.definition)
        renamed.__dict__.update(self.__dict__)
        renamed.name = name
        renamed.agreed = agreed
        renamed.is_size_exchange = is_size_exchange
        return renamed


def collective(
    *,
    names: tuple[str, str] = ("tensor", "tensor"),
    check: Callable[[Call], None],
    agreed: Callable[[Call], tuple[Any, ...]],
    default: Algorithm,
    writes: Callable[[Call], bool] = written_everywhere,
    native: str | None = None,
    lists: tuple[str, ...] = (),
    dataflow: Dataflow | None = None,
) -> Callable[[Callable[P, R]], Collective[P, R]]:
    """Make the decorated function a Collective; see there for the arguments."""
    return lambda function: Collective(function, names, check, agreed, default, writes, native, lists, dataflow)


def definition_of(collective: CollectiveSpec) -> Collective[..., Any]:
    """Return the definition behind a CollectiveSpec."""
    return cast("Collective[..., Any]", collective)
