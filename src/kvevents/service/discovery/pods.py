"""Reads what a pod declares about its engine by labels, annotations and ports, in the conventions of deployment projects.

Keys of kvevents begin with `kvevents/` and can be annotations or labels: `model`, `tenant`, `group`, `role`, `zone`,
`http-port`, `events-port`, `replay-port`, `ranks`, `stores-only` and `drafts`. If a pod lacks a key, the value follows from the
table `CONVENTIONS`, or else from the names of container ports. Values that the engine itself reports over HTTP take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct, field

from kvevents.client.schemas import DEFAULT_GROUP
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import Declaration, EngineProvider
from kvevents.service.discovery.object_watch import KubernetesObject, ObjectKind
from kvevents.service.discovery.provider import MAX_RANKS, Template, bracket_host
from kvevents.service.fleet.registration import Registration, source_name
from kvevents.settings import build_decoder_now

if TYPE_CHECKING:
    from kvevents.service.settings import KubernetesSettings

_PREFIX: Final = "kvevents/"
_ZONE_LABEL: Final = "topology.kubernetes.io/zone"
"""Label for the zone. Kubernetes 1.35 copies the label from nodes to pods; 1.33 and 1.34 need `PodTopologyLabelsAdmission`."""
_ROLES: Final = frozenset({"encode", "prefill", "decode", "both"})
"""Known roles. A label can join several roles by hyphens, as in llm-d's `prefill-decode`; Dynamo has workers without a role."""
_HTTP_PORTS: Final = ("http", "api", "container-port", "modelserver", "vllm", "sglang", "serve")
"""Names of the port of an HTTP server. If a pod has none of these, the first port that is not listed below is used."""
_EVENTS_PORTS: Final = ("kv-events", "kv-event", "zmq-kv")
_REPLAY_PORTS: Final = ("kv-replay", "kv-events-replay")
_RELAY_PREFIX: Final = "kvevents-relay"
"""Prefix of the names of relays' containers. Their ports have the names in `_EVENTS_PORTS` and `_REPLAY_PORTS`."""


class Convention(NamedTuple):
    """The labels and ports that one project uses when it deploys engines."""

    project: str
    mark: str
    """Prefix of a label that all pods of this project have."""
    model: str
    """Label or annotation with the model."""
    names_model: bool = False
    """Whether the engine serves the model under exactly this name; if false, the name can be a nickname."""
    roles: tuple[str, ...] = ()
    """Labels with the role, the most specific label first."""
    http_port: str = ""
    """Label with the port of the HTTP server."""
    events_port: int | None = None
    """Port for events in the project's manifests; None if the port in the settings applies."""
    is_queried: bool = True
    """Whether the project's engines have an HTTP server of vLLM or SGLang."""


CONVENTIONS: Final = (
    # AIBrix: pkg/constants/model.go, samples/quickstart/model-with-kv-events.yaml (`--served-model-name` must equal the label),
    # pkg/plugins/gateway/algorithms/pd_disaggregation.go (`role-name`). AIBrix names the ports kv-events and kv-replay.
    Convention("AIBrix", "model.aibrix.ai/", "model.aibrix.ai/name", True, ("role-name",), "model.aibrix.ai/port", 5557),
    # llm-d: guides/precise-prefix-cache-routing/modelserver/gpu/vllm/base (5556, label llm-d.ai/model: Qwen3-32B for the served
    # Qwen/Qwen3-32B), llm-d-router pkg/plugins/filter (llm-d.ai/role: prefill, decode, both). The port is named kv-events.
    Convention("llm-d", "llm-d.ai/", "llm-d.ai/model", roles=("llm-d.ai/role",), events_port=5556),
    # Dynamo: deploy/operator/internal/consts/consts.go, internal/dynamo (the model is an annotation, since it can have a
    # slash), internal/gms (DYN_VLLM_KV_EVENT_PORT from 20080 on). Dynamo's workers take requests over Dynamo's runtime.
    Convention(
        "Dynamo", "nvidia.com/dynamo-", "nvidia.com/dynamo-base-model", True,
        ("nvidia.com/dynamo-sub-component-type", "nvidia.com/dynamo-component-type"), events_port=20_080, is_queried=False,
    ),
    # vLLM production stack: helm/templates/deployment-vllm-multi.yaml (model: the `name` of a modelSpec, container-port 8000).
    Convention("vLLM production stack", "helm-release-name", "model"),
    # SGLang: docker/k8s-sglang-service.yaml (model, containerPort 30000), the gateway's --prefill-selector (component=prefill).
    Convention("SGLang", "", "model", roles=("component",)),
)  # fmt: skip
"""The first row applies whose `mark` is a prefix of one of the pod's labels. The final row fits all pods."""


class _Port(Struct, frozen=True, rename="camel"):
    container_port: int
    name: str = ""


class _Container(Struct, frozen=True):
    name: str = ""
    ports: list[_Port] = []


class _Spec(Struct, frozen=True, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] = []
    """Init containers, some of which are sidecars."""


class _Condition(Struct, frozen=True):
    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""


class _Reason(Struct, frozen=True):
    reason: str = ""


class _ContainerStatus(Struct, frozen=True):
    name: str
    state: dict[str, _Reason] = {}
    """The container's state; the key is `running`, `waiting` or `terminated`."""


class _PodStatus(Struct, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = field(name="podIP", default="")
    conditions: list[_Condition] = []
    container_statuses: list[_ContainerStatus] = []


@build_decoder_now
class Pod(KubernetesObject, frozen=True):
    """The fields of a pod that discovery reads."""

    spec: _Spec = _Spec()
    status: _PodStatus = _PodStatus()

    @property
    def why_not_ready(self) -> str:
        """Why the pod takes no requests, as a sentence; empty if it is Ready."""
        condition = next((condition for condition in self.status.conditions if condition.type == "Ready"), _Condition("Ready"))
        if condition.status == "True":
            return ""
        reasons = [condition.reason or condition.message, *self._container_reasons]
        return f"its pod is not Ready: {', '.join(filter(None, reasons)) or 'no reason is given'}"

    @property
    def failure(self) -> str:
        """Why the pod has failed; empty if it has not failed."""
        if self.status.phase != "Failed":
            return ""
        reasons = [self.status.reason, self.status.message, *self._container_reasons]
        return "; ".join(filter(None, reasons)) or "no reason is given"

    @property
    def _container_reasons(self) -> list[str]:
        statuses = self.status.container_statuses
        reasons = [(container.name, state.reason) for container in statuses for state in container.state.values()]
        return [f"container {name}: {reason}" for name, reason in reasons if reason]

    @property
    def ports(self) -> list[_Port]:
        """The ports of all containers."""
        return [port for container in self.spec.containers for port in container.ports]

    @property
    def relays(self) -> list[_Container]:
        """The containers with kvevents relays beside the engine, one for each rank."""
        containers = [*self.spec.init_containers, *self.spec.containers]
        return [container for container in containers if container.name.startswith(_RELAY_PREFIX)]


class _PoolSpec(Struct, frozen=True, rename="camel"):
    selector: dict[str, dict[str, str]] = {}
    """The labels that select pods, as a map under the key `matchLabels`."""
    target_ports: list[dict[str, int]] = []
    """One map for each port, with the port under the key `number`."""


@build_decoder_now
class InferencePool(KubernetesObject, frozen=True):
    """An `InferencePool` of the Gateway API Inference Extension, v1: the labels and the ports of its pods."""

    spec: _PoolSpec = _PoolSpec()

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels belongs to the pool. If the selector is empty, no pod belongs to the pool."""
        selector = self.spec.selector.get("matchLabels", {})
        return bool(selector) and selector.items() <= labels.items()

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports of the HTTP servers in each pod."""
        return tuple(port["number"] for port in self.spec.target_ports if "number" in port)


POD_KIND: Final = ObjectKind("pods", Pod)
POOL_KIND: Final = ObjectKind("inferencepools", InferencePool, "inference.networking.k8s.io")


class PodEngine(NamedTuple):
    """The engine of a pod: providers that query the engine, or registrations of its ranks if it cannot be queried."""

    source: str
    """Name of the source whose streams belong to the engine."""
    providers: tuple[EngineProvider, ...] = ()
    registrations: tuple[Registration, ...] = ()


def read_engine(pod: Pod, instance: str, namespace: str, ports: Sequence[int], settings: KubernetesSettings) -> PodEngine:
    """Return the engine of a pod. `ports` are the ports of its pool. Raises `ConfigError` for an invalid or a missing value."""
    labels = pod.metadata.labels or {"": ""}
    convention = next(row for row in CONVENTIONS if any(label.startswith(row.mark) for label in labels))
    facts = _PodFields(pod, convention)
    places = {"namespace": namespace, "role": facts.role, "zone": facts.text("zone", _ZONE_LABEL)}
    template = Template(
        ranks=facts.number("ranks", MAX_RANKS) or len(pod.relays) or 1,
        tenant=facts.text("tenant") or DEFAULT_GROUP,
        group=facts.text("group") or DEFAULT_GROUP,
        stores_only=tuple(facts.texts("stores-only")),
        drafts=facts.drafts,
        labels={name: value for name, value in places.items() if value},
    )
    declared = facts.declaration(settings)
    engine = PodEngine(source_name(template.tenant, template.group, instance))
    host = bracket_host(pod.status.pod_ip)
    if not convention.is_queried:
        if declared.model is None:
            raise ConfigError(f"pod {instance} needs the annotation {_PREFIX}model: Dynamo's workers cannot be queried for it")
        ranks = [template.registration(instance, declared.model, rank) for rank in declared.endpoints(host, template)]
        return engine._replace(registrations=tuple(ranks))
    stated = facts.number("http-port", MAX_PORT, convention.http_port)
    http_ports = [stated] if stated is not None else ports or [facts.http_port or settings.http_port]
    urls = [f"http://{host}:{port}" for port in http_ports]
    return engine._replace(providers=tuple(EngineProvider(url, template, instance, declaration=declared) for url in urls))


class _PodFields:
    """The values in the labels, annotations and ports of a pod."""

    def __init__(self, pod: Pod, convention: Convention) -> None:
        self._pod = pod
        self._convention = convention
        stated = pod.metadata.labels | pod.metadata.annotations
        self._own = {key.removeprefix(_PREFIX): value for key, value in stated.items() if key.startswith(_PREFIX)}

    def text(self, name: str, *fallbacks: str) -> str:
        """Return the value of `kvevents/NAME`, or else of the first existing key in `fallbacks`; empty without a value."""
        return self._own.get(name) or next((value for key in fallbacks if (value := self._value_of(key))), "")

    def texts(self, name: str) -> list[str]:
        """Return the comma-separated texts in the value of `kvevents/NAME`. Only annotations can contain commas."""
        return [part for text in self.text(name).split(",") if (part := text.strip())]

    @property
    def drafts(self) -> tuple[int, ...] | None:
        """KV cache groups of the draft model. The text `all` gives the empty tuple, as in settings. Raises `ConfigError`."""
        texts = self.texts("drafts")
        if not texts or texts == ["all"]:
            return () if texts else None
        if not all(text.isascii() and text.isdecimal() and len(text) < 10 for text in texts):
            name, text = self._pod.metadata.name, self.text("drafts")
            raise ConfigError(f"invalid {_PREFIX}drafts {text!r} of pod {name}: expected all, or 0,1")
        return tuple(map(int, texts))

    def number(self, name: str, maximum: int, *fallbacks: str) -> int | None:
        """Return the value of `text` as a number from 1 to `maximum`; None if the value is empty. Raises `ConfigError`."""
        text = self.text(name, *fallbacks)
        if not text:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 0 < int(text) <= maximum):
            raise ConfigError(f"invalid {_PREFIX}{name} {text!r} of pod {self._pod.metadata.name}: expected 1 to {maximum}")
        return int(text)

    def _value_of(self, key: str) -> str:
        return self._pod.metadata.annotations.get(key) or self._pod.metadata.labels.get(key, "")

    @property
    def role(self) -> str:
        """The role of the engine, such as `prefill` or `decode`; empty if the pod declares no role."""
        values = map(self._value_of, self._convention.roles)
        return self.text("role") or next((value for value in values if _ROLES.issuperset(value.split("-"))), "")

    @property
    def http_port(self) -> int | None:
        """The container port of the HTTP server; None if each port is named for events or replay."""
        if named := self._find_port(_HTTP_PORTS):
            return named
        others = {*_EVENTS_PORTS, *_REPLAY_PORTS}
        return next((port.container_port for port in self._pod.ports if port.name not in others), None)

    def _find_port(self, names: tuple[str, ...]) -> int | None:
        return next((port.container_port for name in names for port in self._pod.ports if port.name == name), None)

    def declaration(self, settings: KubernetesSettings) -> Declaration:
        """Return what the pod declares about the engine. Raises `ConfigError`."""
        own_model, convention = self.text("model"), self._convention
        model, names_model = own_model or self._value_of(convention.model) or None, bool(own_model) or convention.names_model
        if relays := self._pod.relays:
            ports = {port.name: port.container_port for port in relays[0].ports}
            events_port = next((ports[name] for name in _EVENTS_PORTS if name in ports), None)
            if events_port is None:
                raise ConfigError(f"container {relays[0].name} of pod {self._pod.metadata.name} has no port named kv-events")
            replay_port = next((ports[name] for name in _REPLAY_PORTS if name in ports), None)
            return Declaration(model, names_model, events_port, replay_port, is_relay=True)
        return Declaration(
            model,
            names_model,
            events_port=self.number("events-port", MAX_PORT) or self._find_port(_EVENTS_PORTS),
            replay_port=self.number("replay-port", MAX_PORT) or self._find_port(_REPLAY_PORTS),
            assumed_events_port=convention.events_port or settings.events_port,
            assumed_replay_port=settings.replay_port,
        )
