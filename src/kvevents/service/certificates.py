"""The TLS certificate of the service: checks its files, and reads them again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvevents.errors import ConfigError
from kvevents.service.discovery.files import CHECK_SECONDS, file_stamp
from kvevents.service.settings import Tls

log: Final = logging.getLogger("kvevents.service")


def check_tls(tls: Tls) -> None:
    """Raise `ConfigError` for files that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = tls.certificate
    try:
        for file in _files_of(tls):
            Path(file).read_bytes()
        file = tls.certificate
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
        if tls.client_ca is not None:
            file = tls.client_ca
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is a subclass of OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        hint = "certificate, key and client_ca are PEM files, the key without password"
        raise ConfigError(f"tls cannot be used: {file}: {reason}; {hint}") from error


def _files_of(tls: Tls) -> list[str]:
    return [tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca is not None else [])]


class CertificateFiles:
    """The files of a certificate. `reload` makes the server read the files again, or raises `ValueError` for unusable files."""

    def __init__(self, tls: Tls, reload: Callable[[], None]) -> None:
        self._tls: Final = tls
        self._reload: Final = reload
        self._loaded_stamps = self._newest_stamps = self._read_stamps()
        self.fault: str | None = None
        """Why the newest files cannot be used; None if the server uses the newest files."""

    async def watch(self) -> None:
        """Call `check` every `CHECK_SECONDS` until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await asyncio.to_thread(self.check)

    def check(self) -> None:
        """Read files that have changed, but not since the previous check, so that no incomplete file is read.

        If the new files cannot be used, the old certificate stays in use, and `fault` has the reason.
        """
        former, self._newest_stamps = self._newest_stamps, self._read_stamps()
        if self._newest_stamps == self._loaded_stamps or self._newest_stamps != former:
            return
        self._loaded_stamps, self.fault = self._newest_stamps, None
        try:
            check_tls(self._tls)
            self._reload()
        except (ConfigError, ValueError) as error:
            self.fault = f"{error}; new connections use the certificate that was read before"
            log.error("%s", self.fault)  # noqa: TRY400 - the message has the cause, so a traceback adds nothing
        else:
            log.info("the TLS certificate %s was read again", self._tls.certificate)

    def _read_stamps(self) -> list[object]:
        return [file_stamp(Path(file)) for file in _files_of(self._tls)]
