"""`kvtier explain`: what engines told a kvtier-server of a request."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvtier.decisions import ADMITTED, FAILED, MAX_NAME
from kvtier.live_commands import AsRows, Socket, Tenant, ask, connect

__all__ = ["explain", "sentence"]

_UNKNOWN = 1


def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="As the engine calls it.")],
    socket: Socket = None,
    tenant: Tenant = "",
    as_json: AsRows = False,
) -> None:
    """Say what was restored for a request of an engine that uses this daemon, and why not the rest.

    Engines tell a daemon what they decide as they decide it; each tenant's last 8,192 decisions are kept, in memory.
    Exits with 1 when none of them is of a request with this name.
    """
    with connect(socket) as client:
        rows = [dict(row) for row in ask(client, "AskDecisions", request=request[:MAX_NAME], tenant=tenant)]
    for row in rows:
        row["served"] = dict(zip(row.pop("tiers"), row["served"], strict=True))
        del row["id"]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    elif rows:
        for row in rows:
            typer.echo(sentence(row))
    else:
        sys.stderr.write(
            f"kvtier: nothing is known of a request {request!r}: no engine told of it, or it was too long ago, or its "
            "engine does not use this daemon (then its own log says why)\n"
        )
    if not rows:
        raise typer.Exit(_UNKNOWN)


def sentence(row: Mapping[str, Any]) -> str:
    """One decision, for people."""
    from kvtier.live_tables import duration

    asked, served = row["asked"], row["served"]
    num_served = sum(served.values())
    if row["fate"] == ADMITTED:
        places = ", ".join(f"{count} from {tier}" for tier, count in served.items() if count)
        what = f"taken up: {num_served} of {asked} blocks restored" + (f" ({places})" if places else "")
        if num_served < asked:
            what += f", the rest computed: {row['reason'] or 'no reason was told'}"
    else:
        waited = f"waited {row['waited_s']:.3f} s of {row['limit_s']:.3f} s for {row['waited_for']}"
        end = "and the request fails" if row["fate"] == FAILED else "which are computed"
        what = f"restore given up: {asked} blocks, {end}: {row['reason']}; {waited}"
    return f"{duration(row['age_s'])} ago, {row['client']} (tenant {row['tenant']}): {what}"
