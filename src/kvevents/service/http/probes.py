"""Handlers for probes, metrics and the page."""

from __future__ import annotations

import secrets
from functools import cache
from importlib.resources import files
from typing import Final

from kvevents.service.exposition import exposition
from kvevents.service.http.messages import HttpRequest, Response, answer
from kvevents.service.service import Service

METRICS: Final = b"text/plain; version=0.0.4; charset=utf-8"


def health(service: Service, request: HttpRequest) -> Response:
    """Return whether the service receives events; 503 if the process must be restarted."""
    found = service.health()
    return answer(found, request, status=503 if found.status == "failed" else 200)


def live(service: Service, request: HttpRequest) -> Response:
    """Return the same as `/health`, under the path that Kubernetes uses."""
    return health(service, request)


def ready(service: Service, request: HttpRequest) -> Response:
    """Return whether the service can be queried: enough sources are EXACT or the deadline has passed; 503 before."""
    readiness = service.readiness()
    return answer(readiness, request, status=200 if readiness.ready else 503)


def metrics(service: Service, _request: HttpRequest) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(exposition(service), kind=METRICS)


@cache
def _page() -> bytes:
    return (files("kvevents.service") / "page.html").read_bytes()


def page(_service: Service, _request: HttpRequest) -> Response:
    """Return the page that shows the fleet in a browser."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )
    return Response(_page().replace(b"{{nonce}}", nonce.encode()), kind=b"text/html; charset=utf-8", headers=headers)
