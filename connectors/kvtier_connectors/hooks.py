"""What a contract method does with an exception: it lets none out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from kvtier_connectors.faults import CAUGHT

__all__ = ["hook"]

P = ParamSpec("P")
R = TypeVar("R")


class Reporter(Protocol):
    """Counts and logs what was caught."""

    def _report(self, where: str, error: BaseException) -> None: ...


S = TypeVar("S", bound=Reporter)


def hook(
    fallback: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """A method that lets no exception out: logged, counted by type, and answered with `fallback()`."""

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except CAUGHT as error:  # an exception in a hook kills an engine; a miss is right
                self._report(method.__name__, error)
                return fallback()

        return cast("Callable[Concatenate[S, P], R]", call)

    return wrap
