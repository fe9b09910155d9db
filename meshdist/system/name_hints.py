"""What errors say about names that meshdist does not have: of modules, of arguments, and of other libraries.

The names themselves are in `_torch_names`, which is imported when such an error is raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = "meshdist"
_FEW_RANKS = 8
# The function that methods with a root are, in `collectives.definition`.
_OF_METHODS = "rooted"
# The parameter `group` of methods: no keyword has this name.
OWN_GROUP = "<group>"
# The parameters before the peer of a message, and before the first of two.
_SENT = ("tensor", "obj", "object_list", "recv")


class MissingModules:
    """A finder that comes last on `sys.meta_path`: it finds nothing, and raises where it knows what is meant.

    Python asks it for `import meshdist.rpc`, and for `from meshdist import rpc` once the package has no such attribute:
    an AttributeError of the package would be replaced by Python's own error.
    """

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] != _PACKAGE or name.startswith("_"):
            return
        from meshdist._torch_names import instead, no_command

        owner, prefix = sys.modules[package], f"{package}."[len(_PACKAGE) + 1 :]
        words = None if name in dir(owner) else instead(owner, prefix, name)
        command = no_command(name) if package == _PACKAGE else None
        # Without `name=` in the errors: `from meshdist import rpc` would drop one that has it.
        if command is not None and (words is None or sys.argv[:1] == ["-m"]):  # so while `python -m` finds the module
            raise ModuleNotFoundError(f"{_PACKAGE} has no module {name!r}: {command}")
        if words is not None:
            raise ModuleNotFoundError(f"cannot import name {name!r} from {package!r}{words}")


def explain_missing_modules() -> None:
    """Have the import of such a module explained, in this process."""
    if MissingModules not in sys.meta_path:
        sys.meta_path.append(MissingModules)


class NamesExplained(type):
    """Has errors say what to write instead of an attribute that a class lacks; a metaclass."""

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(cls, name: str) -> object:
            raise missing_attribute(cls, name)


def missing_attribute(
    owner: object, name: str, cls: type | None = None, known: Sequence[str] | None = None, *, otherwise: str = ""
) -> AttributeError:
    """Return the error for an attribute that a class, or an object of one, lacks; it says what to write instead.

    Args:
        owner: The class or the object, in whose `__getattr__` this is.
        name: The attribute.
        cls: The class whose name the error has; that of `owner` if None.
        known: The attributes that are meant to be used; all public ones if None.
        otherwise: The end of the error if no other name is meant.

    Raises:
        AttributeError: `owner` has the attribute, a property, which raises this error.
    """
    if cls is None:
        cls = owner if isinstance(owner, type) else type(owner)
    if name.startswith("_"):
        return AttributeError(f"{cls.__name__} has no attribute {name!r}", name=name)
    if any(name in vars(base) for base in type(owner).__mro__) and not isinstance(owner, type):
        object.__getattribute__(owner, name)
    from meshdist._torch_names import no_attribute_of_class

    return no_attribute_of_class(owner, cls, name, known, otherwise=otherwise)


def not_a_group(group: object) -> TypeError:
    """Return the error about the `group` argument of the function that the user has called; it says what to write."""
    got, hint = type(group).__name__, ""
    if isinstance(group, str):
        import json

        got, hint = repr(group), f"; for an axis of a mesh, write mesh[{json.dumps(group)}]"
    elif isinstance(group, (list, tuple, range)) and all(isinstance(rank, int) for rank in group):
        ranks = str(list(group)) if len(group) <= _FEW_RANKS else "ranks"
        hint = f"; to create a group of these ranks, call new_group({ranks})"
    elif _is_integer(group) and any("tag" in frame.f_code.co_varnames for frame in _frames_of_call()):
        hint = f"; for a tag, write tag={group}"
    name = _called_function()
    prefix = f"{name}: " if name else ""
    return TypeError(f"{prefix}group must be a ProcessGroup, a DeviceMesh or None, got {got}{hint}")


def hint_at_swap(peer: str, value: object) -> str:
    """Return a question if the user's call has an array or list as `peer`, src or dst, and an integer as the array."""
    for frame in _frames_of_call():
        for name in _SENT:
            if hasattr(value, "__len__") and _is_integer(frame.f_locals.get(name)):
                return f"; did you swap {name} and {peer}?"
    return ""


def is_method_call() -> bool:
    """Return whether the user's call is one of a method of a group or a mesh, whose roots are ranks in the group."""
    return any(frame.f_code.co_name == _OF_METHODS for frame in _frames_of_call())


def _is_integer(value: object) -> bool:
    from numbers import Integral

    return isinstance(value, Integral) and not isinstance(value, bool)


def _called_function() -> str:
    """Return the name of the function of this package that the user's code has called."""
    name = _frames_of_call()[-1].f_code.co_name
    return name if name.isidentifier() and not name.startswith("_") else ""


def _frames_of_call() -> list[FrameType]:
    """Return the frames of this package, up to that of the function that the user's code has called."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frames.append(frame)
        frame = frame.f_back
    return frames


def explain(function: Callable[..., Any], error: TypeError) -> None:
    """Add to an error which argument was meant, if `function` was called with one that it does not have."""
    from meshdist._torch_names import explain_call

    explain_call(function, error, has_own_group=_has_own_group(function))


def _has_own_group(function: Callable[..., Any] | None) -> bool:
    """Return whether a function is a method of a group or a mesh, which is bound to that and has no such argument."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and (code.co_name == _OF_METHODS or OWN_GROUP in code.co_varnames):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def explaining(function: Callable[P, R]) -> Callable[P, R]:
    """Have a TypeError say which argument was meant, where a call has a misspelt one or another library's; a decorator.

    For functions that are called now and then: it costs a call of Python.
    """

    @wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            explain(function, error)
            if never_began(error):
                wrong_arguments = error.with_traceback(None)
                raise wrong_arguments
            raise

    return named_as(function, explained)


def never_began(error: TypeError) -> bool:
    """Return whether the call that this frame has made raised `error` since its arguments do not fit."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def named_as(function: Callable[..., Any], wrapper: F) -> F:
    """Have tracebacks name the frames of a wrapper as the function."""
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    return wrapper


def naming_methods(cls: C) -> C:
    """Have errors call the methods of a class by its name, not by that of the base class that has them; a decorator."""
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] != _PACKAGE:
            continue
        for name in vars(base):
            method = getattr(base, name)
            while isinstance(method, FunctionType) and not name.startswith("_"):
                method.__qualname__ = f"{cls.__name__}.{name}"
                method = getattr(method, "__wrapped__", None)
    return cls
