"""What may change while a daemon runs, and what is said of the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.config import Settings
from kvtier.config.sources import setting_fields
from kvtier.errors import ConfigError
from kvtier.server.gate import Gate
from kvtier.server.hub import Hub
from kvtier.server.listening import tls_context
from kvtier.server.logs import set_level
from kvtier.server.opening import credentials_of
from kvtier.server.tenants import Tenant

__all__ = ["RELOADABLE", "apply_settings"]

logger = logging.getLogger("kvtier.server")

RELOADABLE = frozenset(
    {
        "daemon.credentials",
        "daemon.log_level",
        "daemon.tls_cert_file",
        "daemon.tls_key_file",
        "daemon.tls_client_ca_file",
        "disk.max_write_rate",
        "redis.max_write_rate",
    }
)
"""Settings that `apply_settings` brings into effect. Files with tokens and certificates are read again in any case."""


def apply_settings(old: Settings, new: Settings, hub: Hub, gate: Gate, tenants: Sequence[Tenant]) -> Settings:
    """Bring what may change into effect, for connections to come, and log what changed and cannot.

    Returns the settings in effect. Raises ConfigError, and nothing has changed then. Reads files: some milliseconds.
    """
    new.daemon.check()
    if new.daemon.tenant_names != old.daemon.tenant_names:  # credentials of tenants that are none here yet
        raise ConfigError(
            f"daemon.tenants: {', '.join(new.daemon.tenant_names)} in place of {', '.join(old.daemon.tenant_names)} "
            "needs a restart, and so does all else that changed with it"
        )
    tls = tls_context(new.daemon)
    if (tls is None) != (gate.tls is None) and new.daemon.listen != "off":
        raise ConfigError("daemon.tls_cert_file: turning TLS on or off needs a restart")
    hub.tenants.reload(credentials_of(new))
    gate.tls = tls
    set_level(new.daemon)
    changed = [name for name in setting_fields() if _value(old, name) != _value(new, name)]
    stuck = [name for name in changed if name not in RELOADABLE]
    stuck += [f"{tier}.max_write_rate" for tier in ("disk", "redis") if not _set_rate(tier, old, new, tenants)]
    applied = [name for name in changed if name not in stuck]
    logger.info("settings read again; changed: %s", ", ".join(applied) or "none; files of tokens were read")
    if stuck:
        logger.warning("changed, and in effect after a restart only: %s", ", ".join(stuck))
    return _merged(old, new, applied)


def _value(settings: Settings, name: str) -> object:
    section, _, leaf = name.partition(".")
    return getattr(getattr(settings, section), leaf)


def _merged(old: Settings, new: Settings, names: Sequence[str]) -> Settings:
    changes: dict[str, dict[str, object]] = {}
    for name in names:
        section, _, leaf = name.partition(".")
        changes.setdefault(section, {})[leaf] = _value(new, name)
    return old.model_copy(
        update={section: getattr(old, section).model_copy(update=update) for section, update in changes.items()}
    )


def _set_rate(tier: str, old: Settings, new: Settings, tenants: Sequence[Tenant]) -> bool:
    """Whether the tier's rate is in effect; one that had none when it was opened cannot be given one."""
    name = f"{tier}.max_write_rate"
    rate = _value(new, name)
    if rate == _value(old, name):
        return True
    assert rate == "off" or isinstance(rate, int)
    lower = [lower for tenant in tenants for lower in tenant.store.lower if lower.name == tier]
    done = [each.set_max_write_rate(rate) for each in lower]
    return all(done)
