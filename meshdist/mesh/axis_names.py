"""The names of a mesh's axes: what may be one, and what an unknown one raises."""

from __future__ import annotations

from collections.abc import Sequence


class UnknownAxisError(KeyError, ValueError):
    """Report an axis that a mesh does not have, naming those it has.

    Example:
        >>> print(UnknownAxisError("unknown axis 'pp': this mesh is (tp=2), its axes are 'tp'"))
        unknown axis 'pp': this mesh is (tp=2), its axes are 'tp'
    """

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError alone would show the sentence in quotes


def checked_names(names: Sequence[str], shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return `names` as a tuple after checking that each axis of `shape` has one of its own.

    Raises:
        ValueError: Not as many names as axes, one repeated, or one empty.
        TypeError: A string in place of a sequence of them, or names that are not strings.
    """
    if isinstance(names, str):
        raise TypeError(f"mesh_dim_names: expected a tuple of names, got the string {names!r}; write ({names!r},)")
    checked = tuple(names)
    for name in checked:
        if not isinstance(name, str):
            raise TypeError(f"mesh_dim_names: expected strings, got {name!r} ({type(name).__name__}) in {checked}")
        if not name:
            raise ValueError(f"mesh_dim_names: a name must not be empty, got {checked}")
    if len(checked) != len(shape):
        raise ValueError(
            f"mesh_dim_names: expected {len(shape)} names, one per axis of the mesh of shape {shape},"
            f" got {len(checked)}: {checked}"
        )
    repeated = sorted({name for name in checked if checked.count(name) > 1})
    if repeated:
        raise ValueError(f"mesh_dim_names: every name may be used once, {repeated[0]!r} is repeated in {checked}")
    return checked
