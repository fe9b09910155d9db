"""What the drivers share: they start a cluster in the directory of their first argument, and print JSON at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ray

NO_CLUSTER = 3  # the exit status if Ray could not start, for which it has 30 s


def drive(main: Callable[..., Any], **options: Any) -> None:
    """Print what `main` returns, called with the words after the directory, on a cluster with `options`."""
    directory, *words = sys.argv[1:]
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 << 20,
            _temp_dir=directory,
            **options,
        )
    except Exception as error:
        print(error)
        sys.exit(NO_CLUSTER)
    try:
        print(json.dumps(main(*words), default=repr))
    finally:
        ray.shutdown()


def outcome(function: Callable[[], Any]) -> Any:
    """Return what `function` returns, or the exception that it raises, in words."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_page(program: str) -> list[Any]:
    """Run a program of the page on this cluster; return what it prints."""
    printed: list[Any] = []
    began, ray.init = ray.init, lambda **_: None
    try:
        exec(program, {"__name__": "__main__", "print": printed.append})
    finally:
        ray.init = began
    return printed
