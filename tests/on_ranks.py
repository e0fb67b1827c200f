"""Tests whose body runs on every rank.

    @on_two_ranks
    def test_it(case: str) -> None:      pytest sees test_it(two_ranks, case);
        ...                              each of the two ranks runs the body with that case
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def _on(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that stands right above ``def``. Parameters of the test go to the ranks by pickle."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            given.pop(fixture).run(_run_body, body.__module__, body.__name__, given)

        ranks = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(body)
        test.__dict__["__signature__"] = signature.replace(parameters=[ranks, *signature.parameters.values()])
        return test

    return decorate


def _run_body(module: str, test: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(**given)


on_two_ranks, on_three_ranks, on_four_ranks = (_on(f"{number}_ranks") for number in ("two", "three", "four"))
