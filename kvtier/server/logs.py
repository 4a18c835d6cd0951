"""The daemon's log: lines for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO

from kvtier.config import DaemonSettings

__all__ = ["JsonFormatter", "set_level", "set_up_logs"]

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[\w.:/\[\]@%+-]+", re.ASCII)
"""What stands in a line as it is; else a certificate's name could look like several fields, or another line."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, whatever fields the caller added, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value if isinstance(value, bool | int | float | str) or value is None else str(value)
            for name, value in vars(record).items()
            if name not in _OWN_FIELDS
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line, with the fields that the caller added behind it."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = " ".join(
            f"{name}={_shown(str(value))}"
            for name, value in vars(record).items()
            if name not in _OWN_FIELDS and value not in (None, "")
        )
        first, newline, rest = text.partition("\n")
        return f"{first} ({fields}){newline}{rest}" if fields else text


def _shown(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else ascii(text)


def set_up_logs(settings: DaemonSettings, stream: IO[str] | None = None) -> logging.Handler:
    """Send the log to `stream`, stderr if not given, from now on; what was set up before is replaced. For a process
    that is nothing but the daemon."""
    handler = logging.StreamHandler(stream or sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(settings)
    return handler


def set_level(settings: DaemonSettings) -> None:
    """`daemon.log_level`, for everything of ours; of others what warns. The audit log is never cut."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("kvtier").setLevel(_LEVELS[settings.log_level])
    logging.getLogger("kvtier.audit").setLevel(min(logging.INFO, _LEVELS[settings.log_level]))
