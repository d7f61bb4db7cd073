"""TLS certificates for tests: an authority, and certificates that it signs for a server at 127.0.0.1 and a client."""

from __future__ import annotations

import subprocess
from pathlib import Path

SECONDS = 60.0
_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


def make_certificates(folder: Path) -> Path:
    """Write `ca.pem`, `server.pem` and `client.pem`, each with a `.key`, that pass strict checks, and return the folder."""
    signs = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl(folder, "req", "-x509", *_CURVE, *signs, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        sign_certificate(folder, name)
    return folder


def sign_certificate(folder: Path, name: str) -> None:
    """Write a certificate of the authority of `make_certificates` to `name.pem`, and its key to `name.key`."""
    _openssl(
        folder,
        *("req", "-x509", *_CURVE, "-subj", f"/CN={name}", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"),
        *("-addext", "authorityKeyIdentifier=keyid:always"),
        *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
    )


def _openssl(folder: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True, timeout=SECONDS)  # noqa: S607 - the test's own
