"""Certificates for a server on 127.0.0.1 and for a client, signed by an authority made for the purpose."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.testing.redis_servers.installed import require_program

__all__ = ["TlsFiles", "make_tls_files"]

DAYS = "2"
KEY_KIND = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    ca_file: Path
    """The authority's certificate, which signs the two others."""
    server_cert_file: Path
    """For the address 127.0.0.1 and the name localhost."""
    server_key_file: Path
    client_cert_file: Path
    client_key_file: Path

    def client_context(self) -> ssl.SSLContext:
        """Checks the server, and shows the client's certificate."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        context.load_cert_chain(self.client_cert_file, self.client_key_file)
        return context


def make_tls_files(directory: Path) -> TlsFiles:
    """Make them in `directory`, valid for two days. KVTierError when there is no openssl, or it fails."""
    openssl = require_program("openssl", "openssl", "TLS for a Redis server of its own")
    ca_file, ca_key = directory / "ca.crt", directory / "ca.key"
    _run([openssl, "req", "-x509", *KEY_KIND, "-days", DAYS, "-subj", "/CN=kvtier testing CA"], ca_file, ca_key)
    made = {}
    for name, extensions in (
        ("server", "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"),
        ("client", "extendedKeyUsage=clientAuth\n"),
    ):
        cert, key, request = (directory / f"{name}.{suffix}" for suffix in ("crt", "key", "csr"))
        named = directory / f"{name}.ext"
        named.write_text(extensions)
        _run([openssl, "req", "-new", *KEY_KIND, "-subj", f"/CN=kvtier testing {name}"], request, key)
        signing = ["-CA", str(ca_file), "-CAkey", str(ca_key), "-CAcreateserial", "-extfile", str(named)]
        _run([openssl, "x509", "-req", "-in", str(request), "-days", DAYS, *signing], cert)
        made[name] = (cert, key)
    return TlsFiles(ca_file, *made["server"], *made["client"])


def _run(command: list[str], out: Path, key: Path | None = None) -> None:
    command = [*command, "-out", str(out), *([] if key is None else ["-keyout", str(key)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVTierError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
