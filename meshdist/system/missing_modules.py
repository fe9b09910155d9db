"""The import of a part of torch.distributed that meshdist lacks: the error says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

_PACKAGE = "meshdist"


class MissingModules:
    """A finder that comes last on `sys.meta_path`: it finds nothing, and raises for names of torch.distributed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        package, _, rest = name.partition(".")
        if package != _PACKAGE:
            return
        from meshdist._torch_names import reason_for_module  # loaded only when such a module is imported

        part = rest.partition(".")[0]
        reason = reason_for_module(part)
        if reason is not None:
            # Without `name=`: `from meshdist import rpc` would drop an error that has it.
            raise ModuleNotFoundError(
                f"{_PACKAGE} has no module {part!r} (torch has one): {reason}; see docs/migration.md"
            )


def explain_missing_modules() -> None:
    """Have the import of such a module explained, in this process."""
    if MissingModules not in sys.meta_path:
        sys.meta_path.append(MissingModules)
