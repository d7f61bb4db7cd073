"""Follows the objects of one kind in one namespace of a Kubernetes API server: it lists them, and then watches for changes.

The watch begins at the version of the list, so it contains every later change, including deletions. When a watch ends, the next
watch begins at the newest version that the former watch received. Bookmarks keep this version recent if nothing changes. If
the server no longer has the changes since that version (status 410, after etcd is compacted), the objects are listed again, and
objects that are not listed are removed. So no deletion is missed, even if the server was unreachable for long. Until the server
answers again, the objects stay. See the section "Efficient detection of changes" of "Kubernetes API Concepts".
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from kvevents.backoff import Backoff, Clock
from kvevents.errors import ExternalError
from kvevents.settings import build_decoder_now

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 500
"""Maximum number of objects in one answer to a list request; kubectl uses the same limit."""
WATCH_SECONDS: Final = 300
"""Seconds after which the server ends a watch, so that connections move to other servers; client-go uses 5 to 10 minutes."""
SILENCE_SECONDS: Final = 12.0
"""Seconds without data after which a watch ends; the next watch shows whether the server answers. Without this limit a stopped
server would look like a server without changes: the server sends a bookmark only about every minute."""
CONNECT_SECONDS: Final = 10.0
"""Maximum number of seconds to connect for a watch."""
LIST_SECONDS: Final = 30.0
"""Maximum number of seconds for a list request."""
MIN_WATCH_SECONDS: Final = 5.0
"""Seconds after which the end of a watch counts as normal, so that the next watch begins without a pause."""
MAX_PAUSE_SECONDS: Final = 5.0
"""Maximum pause in seconds between two attempts to reach the server."""
_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CLUSTER_VARIABLE: Final = "KUBERNETES_SERVICE_HOST"


class Metadata(Struct, frozen=True, rename="camel"):
    """The fields of `metadata` that discovery reads."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


@build_decoder_now
class KubernetesObject(Struct, frozen=True):
    """The fields that objects of all kinds have. Each subclass adds the fields of one kind."""

    metadata: Metadata = Metadata()


class _ListMetadata(Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = field(name="continue", default="")


@build_decoder_now
class _Page(Struct, frozen=True):
    items: list[Raw]
    metadata: _ListMetadata


@build_decoder_now
class _WatchEvent(Struct, frozen=True):
    type: str
    object: Raw


@build_decoder_now
class _Status(Struct, frozen=True):
    code: int = 0
    message: str = ""


class ApiServerError(ExternalError):
    """The API server did not answer a request, or refused it. The message is the second half of a sentence about a watch."""


class _ExpiredError(ApiServerError):
    """Raised if the server no longer has the changes after a version, or the further pages of a list."""


T = TypeVar("T", bound=KubernetesObject)


@dataclass(frozen=True, slots=True)
class ObjectKind(Generic[T]):
    """A kind of Kubernetes objects."""

    plural: str
    """Name of the kind in paths, such as `pods`."""
    struct: type[T]
    group: str = ""
    """API group of the kind; empty for the core group."""

    def request(self, api: Any, namespace: str, **parameters: Any) -> Any:
        """Return an awaitable that sends a list or watch request. The caller reads the response."""
        from kubernetes_asyncio.client import CoreV1Api, CustomObjectsApi  # noqa: PLC0415

        if not self.group:
            return CoreV1Api(api).list_namespaced_pod(namespace, _preload_content=False, **parameters)
        names = (self.group, "v1", namespace, self.plural)
        return CustomObjectsApi(api).list_namespaced_custom_object(*names, _preload_content=False, **parameters)


@asynccontextmanager
async def connect(kubeconfig: str | None) -> AsyncGenerator[Any, None]:
    """Connect with the pod's service account, or with a kubeconfig. Every connection reads the credentials again."""
    from kubernetes_asyncio import client, config  # noqa: PLC0415

    configuration = client.Configuration()
    if kubeconfig is None and _CLUSTER_VARIABLE in os.environ:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    # Python 3.13 requires fields that the certificates of some clusters lack. kubectl accepts these certificates.
    configuration.disable_strict_ssl_verification = True
    async with client.ApiClient(configuration) as api:
        yield api


def own_namespace(kubeconfig: str | None) -> str:
    """Return the namespace of this pod, or of the kubeconfig's context, or else the namespace `default`."""
    from kubernetes_asyncio import config  # noqa: PLC0415

    try:
        if kubeconfig is None and _CLUSTER_VARIABLE in os.environ:
            return (_ACCOUNT_FOLDER / "namespace").read_text(encoding="utf-8").strip()
        context: Any = config.list_kube_config_contexts(kubeconfig)[1]
        return str(context["context"].get("namespace", "default"))
    except (OSError, ValueError, KeyError, config.ConfigException):
        return "default"


class ObjectWatch(Generic[T]):
    """Follows the objects of one kind in one namespace. `on_change` is called after each change, and must not block."""

    def __init__(
        self,
        kind: ObjectKind[T],
        namespace: str,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        selector: str | None = None,
        kubeconfig: str | None = None,
    ) -> None:
        self.objects: dict[str, T] = {}
        """Maps the name of each object to the object's newest known version."""
        self.fault: str | None = None
        """Why changes are not followed now, as a sentence; None if they are followed."""
        self.is_listed = False
        """Whether a complete list of the objects has arrived."""
        self.namespace: Final = namespace
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind.struct)
        self._clock = clock
        self._on_change = on_change
        self._kubeconfig = kubeconfig
        self._options = {} if selector is None else {"label_selector": selector}
        self._version: str | None = None
        """Version after which the next watch begins; None if the objects must be listed first."""

    async def run(self) -> None:
        """Follow the objects until cancelled."""
        from aiohttp import ClientError  # noqa: PLC0415
        from kubernetes_asyncio.config import ConfigException  # noqa: PLC0415
        from yaml import YAMLError  # noqa: PLC0415

        backoff = Backoff(self._clock.random, maximum=MAX_PAUSE_SECONDS)
        while True:
            try:
                async with connect(self._kubeconfig) as api:
                    await self._follow(api, backoff)
            except _ExpiredError:
                self._version = None
            except (ApiServerError, ConfigException, ClientError, OSError, ValueError, LookupError, YAMLError) as error:
                is_late = isinstance(error, TimeoutError)
                reason = "the API server does not answer in time" if is_late else str(error) or type(error).__name__
                stay = f"; the {len(self.objects)} known before stay" if self.is_listed else ""
                self.fault = f"the {self._kind.plural} of namespace {self.namespace} cannot be followed: {reason}{stay}"
                self._on_change()
            await self._clock.sleep(backoff.next_delay())

    async def _follow(self, api: Any, backoff: Backoff) -> NoReturn:
        while True:
            if self._version is None:
                await self._list_objects(api)
            began = self._clock.now()
            if await self._watch_objects(api) or self._clock.now() - began > MIN_WATCH_SECONDS:
                backoff.reset()
            else:
                await self._clock.sleep(backoff.next_delay())

    async def _list_objects(self, api: Any) -> None:
        items: list[Raw] = []
        token = ""
        while True:
            request = self._kind.request(
                api, self.namespace, limit=PAGE_SIZE, _continue=token, _request_timeout=LIST_SECONDS, **self._options
            )
            async with await request as response:
                body = await response.read()
            _check_status(response.status, body)
            page = msgspec.json.decode(body, type=_Page)
            items += page.items
            if not (token := page.metadata.continue_):
                break
        self.objects = {}
        for item in items:
            self._put_object(item)
        self._version, self.is_listed, self.fault = page.metadata.resource_version, True, None
        self._on_change()

    async def _watch_objects(self, api: Any) -> bool:
        """Apply changes until the server ends the watch or becomes silent. Return whether any event arrived."""
        from aiohttp import ClientTimeout, SocketTimeoutError  # noqa: PLC0415

        request = self._kind.request(
            api,
            self.namespace,
            watch=True,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS),
            **self._options,
        )
        has_events = False
        async with await request as response:
            if response.status != 200:
                _check_status(response.status, await response.read())
            if self.fault is not None:
                self.fault = None
                self._on_change()
            with suppress(SocketTimeoutError):  # See `SILENCE_SECONDS`.
                while (line := await response.content.readline()).endswith(b"\n"):
                    self._apply_event(msgspec.json.decode(line, type=_WatchEvent))
                    has_events = True
        return has_events

    def _apply_event(self, event: _WatchEvent) -> None:
        if event.type == "ERROR":
            _check_status(msgspec.json.decode(event.object, type=_Status).code, event.object)
        metadata = msgspec.json.decode(event.object, type=KubernetesObject).metadata
        self._version = metadata.resource_version
        if event.type == "BOOKMARK":  # A bookmark has a version, but no change.
            return
        if event.type == "DELETED":
            self.objects.pop(metadata.name, None)
        else:
            self._put_object(event.object)
        self._on_change()

    def _put_object(self, raw: Raw) -> None:
        """Store an object. An object that cannot be decoded counts as deleted, so that it does not end the watch."""
        try:
            decoded = self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            name = msgspec.json.decode(raw, type=KubernetesObject).metadata.name
            self.objects.pop(name, None)
            log.warning("%s %s of namespace %s cannot be read: %s", self._kind.plural, name, self.namespace, error)
        else:
            self.objects[decoded.metadata.name] = decoded


def _check_status(status: int, body: bytes | Raw) -> None:
    """Raise `ApiServerError` unless an answer has status 200."""
    if status == 200:
        return
    message = ""
    with suppress(msgspec.DecodeError):
        message = msgspec.json.decode(body, type=_Status).message
    sentence = f"the API server answers with status {status}" + (f": {message}" if message else "")
    raise (_ExpiredError if status == HTTPStatus.GONE else ApiServerError)(sentence)
