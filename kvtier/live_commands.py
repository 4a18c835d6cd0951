"""`kvtier ping`, `stat`, `top`, `ls`, `flush` and `verify` of a kvtier-server that runs, over its admin socket."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier import __version__, disk_commands
from kvtier.errors import ConfigError, KVTierError

if TYPE_CHECKING:
    from kvtier.protocol.admin import AdminAnswer
    from kvtier.server.admin_client import AdminClient

__all__ = ["AsRows", "Socket", "Tenant", "ask", "connect", "flush", "ls", "ping", "stat", "top", "verify"]

Socket = Annotated[
    str | None,
    typer.Option(
        "--socket", metavar="PATH", help="The daemon's admin socket; without it that of the settings (daemon.*)."
    ),
]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Of this tenant alone.")]
Tier = Annotated[str, typer.Option("--tier", metavar="NAME", help="Of this tier alone: host, disk, redis.")]
Disk = Annotated[
    Path | None,
    typer.Option(
        "--disk", metavar="DIR", help="In place of a daemon: a directory of `disk.path` that no process is using."
    ),
]
AsObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsRows = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]

DEFAULT_BLOCKS = 1000
_TIERS = ("host", "disk", "redis")
"""That a daemon may have."""
MAX_WAIT_S = 600.0
_NOT_READY = 1
_UNWRITTEN = 1
_DAMAGED = 1


# ---- how it is -------------------------------------------------------------------------------------------------------


def ping(socket: Socket = None, as_json: AsObject = False) -> None:
    """Ask a daemon whether it is there and serves. Exits with 1 when it is not there, or does not."""
    from kvtier.live_tables import duration

    report: dict[str, Any] = {"ready": False, "command": __version__}
    try:
        with connect(socket) as client:
            begun_at = time.perf_counter()
            (health,) = ask(client, "AskHealth")
            report |= {
                "ready": health["is_ready"],
                "state": health["state"],
                "reason": health["reason"],
                "round_trip_ms": round(1000 * (time.perf_counter() - begun_at), 3),
                "uptime_s": health["uptime_s"],
                "daemon": client.daemon.software.removeprefix("kvtier "),
                "pid": client.daemon.pid,
                "socket": client.path,
            }
    except _admin_error() as error:
        report |= {"state": "unreachable", "reason": str(error)}
    if as_json:
        typer.echo(json.dumps(report))
    elif report["state"] == "unreachable":
        sys.stderr.write(f"kvtier: {report['reason']}\n")
    else:
        state = "ready" if report["ready"] else f"not ready: {report['reason']}"
        typer.echo(
            f"kvtier-server {report['daemon']} (pid {report['pid']}) at {report['socket']}: {state}; up for "
            f"{duration(report['uptime_s'])}, answered in {report['round_trip_ms']:.2f} ms"
            + (f"; this command is of {__version__}" if report["daemon"] != __version__ else "")
        )
    if not report["ready"]:
        raise typer.Exit(_NOT_READY)


def stat(socket: Socket = None, tenant: Tenant = "", as_json: AsObject = False) -> None:
    """Show what a daemon counts, for each tenant: tiers, hits and misses, blocks written down, clients, what is wrong.

    With --json that is the document of /status.json: counters run from the daemon's start.
    """
    with connect(socket) as client:
        document = _status(client, tenant)
    if as_json:
        typer.echo(json.dumps(document))
        return
    from kvtier.live_tables import print_status

    print_status(document)


def top(
    socket: Socket = None,
    tenant: Tenant = "",
    once: Annotated[bool, typer.Option("--once", help="Measure one interval, print it, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, max=3600, help="Between two looks.")
    ] = 1.0,
    as_json: AsRows = False,
) -> None:
    """Watch a daemon: what each tenant looks up, stores and restores a second, and what waits. Ctrl-C ends it.

    Where the output is no terminal one interval is measured and printed, as with --once; with --json and without --once
    a line each interval.
    """
    from rich.console import Console

    from kvtier.live_tables import rates, rates_table

    console = Console()
    with connect(socket) as client:
        measured = _measure(client, tenant, interval)
        if as_json:
            for before, after in measured:
                typer.echo(json.dumps(rates(before, after)))
                sys.stdout.flush()
                if once:
                    return
        elif once or not console.is_terminal:
            console.print(rates_table(*next(measured)))
        else:
            _watch(console, measured)


def _watch(console: Any, measured: Iterator[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    from rich.live import Live

    from kvtier.live_tables import rates_table

    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            for before, after in measured:
                live.update(rates_table(before, after), refresh=True)
    except KeyboardInterrupt:  # how this is ended
        return


def _measure(client: AdminClient, tenant: str, interval_s: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    before = _status(client, tenant)
    while True:
        time.sleep(interval_s)
        after = _status(client, tenant)
        yield before, after
        before = after


def _status(client: AdminClient, tenant: str) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for part in ask(client, "AskStatus", tenant=tenant):
        content = json.loads(part["document"])
        if part["tenant"]:
            document["tenants"].append(content)
        else:
            document = {**content, "tenants": []}
    return document


# ---- what it holds ---------------------------------------------------------------------------------------------------


def ls(
    socket: Socket = None,
    disk: Disk = None,
    tenant: Tenant = "",
    tier: Tier = "",
    blocks: Annotated[bool, typer.Option("--blocks", help="Every block's key and length.")] = False,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="HEX", help="Of this namespace alone: its digits, as shown.")
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="With --blocks: so many blocks at most.")
    ] = DEFAULT_BLOCKS,
    as_json: AsRows = False,
) -> None:
    """List what a daemon holds: blocks and bytes by namespace (a model, layout or shard) and tier; or every block.

    Redis cannot tell whose blocks it holds, and is one row. With --disk it is a directory's blocks that are listed,
    while no process uses it: segments, or with --json every block. Changes nothing.
    """
    if disk is not None:
        disk_commands.ls(disk, as_json)
        return
    with connect(socket) as client:
        wanted = _parse_namespace(namespace)
        if blocks:
            rows = _block_rows(client, tenant, tier, wanted, limit)
        else:
            _check_tier(tier)
            rows = (
                {**_place(row), "namespace": row["namespace"].hex(), "blocks": row["blocks"], "bytes": row["nbytes"]}
                for row in ask(client, "AskNamespaces", tenant=tenant)
                if tier in ("", row["tier"]) and wanted in (b"", row["namespace"])
            )
        if as_json:
            for row in rows:
                typer.echo(json.dumps(row))
        else:
            from kvtier.live_tables import print_blocks, print_namespaces

            (print_blocks if blocks else print_namespaces)(rows)
        if client.is_cut:
            sys.stderr.write(f"kvtier: there are more than {limit} blocks: raise --limit, or name --namespace\n")


def _block_rows(
    client: AdminClient, tenant: str, tier: str, namespace: bytes, limit: int
) -> Iterator[dict[str, object]]:
    from kvtier.keys import DIGEST_BYTES

    for page in ask(client, "AskBlocks", limit=limit, tenant=tenant, tier=tier, namespace=namespace):
        for place, length in enumerate(page["lengths"]):
            digest = page["digests"][place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            yield {**_place(page), "key": (page["namespace"] + digest).hex(), "bytes": length}


def _check_tier(tier: str) -> None:
    if tier not in ("", *_TIERS):
        raise ConfigError(f"--tier {tier!r} is none: there are {', '.join(_TIERS)}")


def _parse_namespace(text: str) -> bytes:
    from kvtier.keys import NAMESPACE_BYTES

    try:
        namespace = bytes.fromhex(text)
    except ValueError:
        namespace = b"?"
    if len(namespace) not in (0, NAMESPACE_BYTES):
        raise ConfigError(f"--namespace {text!r} is none: copy its {2 * NAMESPACE_BYTES} digits from `kvtier ls`")
    return namespace


# ---- what it is to do ------------------------------------------------------------------------------------------------


def flush(
    socket: Socket = None,
    tenant: Tenant = "",
    tier: Annotated[str, typer.Option("--tier", metavar="NAME", help="To this tier alone: disk, redis.")] = "",
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, max=MAX_WAIT_S, help="For how long at most.")
    ] = 60.0,
    drop: Annotated[
        bool, typer.Option("--drop", help="Forget every block instead, in every tier: a reset, for new weights.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --drop: do not ask.")] = False,
    as_json: AsRows = False,
) -> None:
    """Write out what is due: blocks of host memory that are on their way to the tiers below, or were put off.

    Waits for it, and exits with 1 when something is not written then. Nothing is forgotten: that is what --drop does,
    which writes nothing.
    """
    if drop:
        _drop(socket, tenant, tier, yes, as_json)
        return
    from kvtier.live_tables import print_flushed

    with connect(socket) as client:
        answers = ask(client, "AskFlush", max_wait_ms=round(1000 * wait), tenant=tenant, tier=tier)
        rows = [{**_place(row), "written": row["written"], "left": row["blocks_left"]} for row in answers]
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
    else:
        print_flushed(rows)
    if any(row["left"] for row in rows):
        raise typer.Exit(_UNWRITTEN)


def _drop(socket: str | None, tenant: str, tier: str, yes: bool, as_json: bool) -> None:
    if tier:
        raise ConfigError(f"--drop forgets blocks in every tier, and cannot spare any: leave --tier {tier} out")
    with connect(socket) as client:
        whose = f"tenant {tenant!r}" if tenant else "every tenant"
        if not (yes or _confirms(f"Forget all blocks of {whose} of {client.path}, in every tier?")):
            typer.echo("Nothing was forgotten: nobody said yes. Without a terminal, add --yes.", err=True)
            raise typer.Exit(1)
        for row in ask(client, "AskDrop", tenant=tenant):
            if as_json:
                typer.echo(json.dumps({"tenant": row["tenant"], "forgotten": row["blocks"], "epoch": row["epoch"]}))
            else:
                typer.echo(
                    f"{row['tenant']}: forgot {row['blocks']} blocks of host memory and all below it; this is epoch "
                    f"{row['epoch']}"
                )


def _confirms(question: str) -> bool:
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:  # the end of the input
        return False


def verify(
    socket: Socket = None,
    disk: Disk = None,
    tenant: Tenant = "",
    tier: Tier = "",
    integrity: Annotated[
        bool,
        typer.Option(
            "--integrity",
            help="Check the daemon's own counts too, which holds up its clients: some 10 ms for each 1,000 blocks of "
            "host memory.",
        ),
    ] = False,
    as_json: AsObject = False,
) -> None:
    """Compare every block of a daemon's host memory and disk with its checksums, while it serves.

    Exits with 1 when something is damaged. A damaged block is forgotten, so that it is a miss; it would have been one
    when it was read. With --disk it is a directory that is verified, while no process uses it; nothing is changed then.
    """
    if disk is not None:
        disk_commands.verify(disk, as_json)
        return
    report: dict[str, list[dict[str, Any]]] = {"tiers": [], "damaged": [], "integrity": []}
    with connect(socket) as client:
        for row in ask(client, "AskVerify", integrity=integrity, tenant=tenant, tier=tier):
            if "key" in row:
                report["damaged"].append({**_place(row), "key": row["key"].hex(), "problem": row["problem"]})
            elif "skipped" in row:
                names = {"blocks": "blocks", "bytes": "nbytes", "damaged": "damaged", "skipped": "skipped"}
                report["tiers"].append({**_place(row), **{name: row[field] for name, field in names.items()}})
            else:
                report["integrity"].append({"tenant": row["tenant"], "problem": row["problem"]})
    if as_json:
        typer.echo(json.dumps(report))
    else:
        from kvtier.live_tables import print_verified

        print_verified(report)
    if report["damaged"] or any(each["problem"] for each in report["integrity"]):
        raise typer.Exit(_DAMAGED)


# ---- asking ----------------------------------------------------------------------------------------------------------


def connect(socket: str | None) -> AdminClient:
    try:
        from kvtier.server.admin_client import AdminClient
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if socket is not None:
        return AdminClient(socket, "--socket")
    from kvtier.config import load_settings_with_sources

    loaded = load_settings_with_sources()
    daemon = loaded.settings.daemon
    name = "daemon.socket" if daemon.admin_socket is None else "daemon.admin_socket"
    return AdminClient(daemon.admin_path, f"{name}, {loaded.sources[name]}")


def _missing(error: ModuleNotFoundError) -> KVTierError:
    return ConfigError(f"asking a daemon needs the module {error.name}: pip install 'kvtier[server]'")


def _admin_error() -> type[Exception]:
    try:
        from kvtier.server.admin_client import AdminError
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return AdminError


def ask(client: AdminClient, name: str, **fields: Any) -> Iterator[Mapping[str, Any]]:
    """The answers to a message of that name, each as its fields."""
    from kvtier.protocol import admin

    request = getattr(admin, name)(client.next_id(), **fields)
    for answer in client.ask(request):
        yield _fields_of(answer)


def _fields_of(answer: AdminAnswer) -> Mapping[str, Any]:
    return {name: getattr(answer, name) for name in answer.__struct_fields__}


def _place(row: Mapping[str, Any]) -> dict[str, str]:
    return {"tenant": row["tenant"], "tier": row["tier"]}
