"""What a vLLM request asks of kvtier, in `kv_transfer_params`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace

from vllm.v1.request import Request

from kvtier.errors import ConfigError
from kvtier_connectors.contract import KVOptions

__all__ = ["RequestOptions"]

logger = logging.getLogger("kvtier.vllm")

KEY = "kvtier"
NAMES = frozenset(field.name for field in fields(KVOptions)) - {"priority"}
MAX_WARNINGS = 64
MAX_WORDS = 300


class RequestOptions:
    """Reads `kv_transfer_params: {"kvtier": {...}}`: the fields of KVOptions but for `priority`, which is vLLM's.

    A request that asks for what means nothing is served as if it had asked for nothing, with a warning: each text once,
    and no more than MAX_WARNINGS.
    """

    def __init__(self, *, by_priority: bool) -> None:
        """by_priority: vLLM schedules by the priority of requests."""
        self._by_priority = by_priority
        self._told: set[str] = set()

    def of(self, request: Request) -> KVOptions:
        try:
            options = _parse((request.kv_transfer_params or {}).get(KEY, {}))
        except ConfigError as error:
            self._warn(request.request_id, str(error)[:MAX_WORDS])
            options = KVOptions()
        if getattr(request, "skip_reading_prefix_cache", False):
            options = replace(options, restore=False)
        return replace(options, priority=request.priority) if self._by_priority else options

    def _warn(self, request_id: str, words: str) -> None:
        if words not in self._told and len(self._told) < MAX_WARNINGS:
            self._told.add(words)
            logger.warning("request %s is served with the default options: kv_transfer_params: %s", request_id, words)


def _parse(asked: object) -> KVOptions:
    if not isinstance(asked, Mapping):
        raise ConfigError(f"{KEY} must be an object, such as {{'restore': false}}, not {asked!r:.100}")
    if unknown := sorted(map(str, asked.keys() - NAMES)):
        raise ConfigError(f"{KEY} has {unknown!r:.100}; it may have {', '.join(sorted(NAMES))}")
    try:
        return KVOptions(**asked)
    except ConfigError as error:
        raise ConfigError(str(error).replace("KVOptions", KEY)) from None
