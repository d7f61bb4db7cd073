"""What discovery reads from pods as five projects deploy them, as an API server returned them (tests/data/kubernetes.json)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kubernetes_cases import PROJECTS, pod, ready
from kubernetes_stream_cases import recorded
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import Declaration
from kvevents.service.discovery.pods import InferencePool, Pod, PodEngine, read_engine
from kvevents.service.settings import KubernetesSettings

SETTINGS = KubernetesSettings(selector="app=vllm")
HERE = {"namespace": "inference"}


def read(manifest: dict[str, Any], *ports: int, settings: KubernetesSettings = SETTINGS) -> PodEngine:
    """Read a manifest, or a pod of the API server."""
    found = msgspec.convert({"status": ready("10.1.0.7"), **manifest}, Pod)
    return read_engine(found, found.metadata.name, "inference", ports, settings)


def read_project(project: str) -> PodEngine:
    name = PROJECTS[project]["metadata"]["name"]
    return read(next(each for each in recorded("projects")["items"] if each["metadata"]["name"] == name))


@pytest.mark.parametrize(
    ("project", "url", "labels", "declared"),
    [
        ("vLLM production stack", "http://10.1.0.1:8000", {}, Declaration("llama3")),
        ("SGLang", "http://10.1.0.2:30000", {}, Declaration("meta-llama-31-8b-instruct")),
        (
            "llm-d",
            "http://10.1.0.3:8000",
            {"role": "decode", "zone": "zone-b"},
            Declaration("Qwen3-32B", False, 5556, assumed_events_port=5556),
        ),
        (
            "AIBrix",
            "http://10.1.0.4:8000",
            {"role": "prefill"},
            Declaration("deepseek-r1-distill-llama-8b", True, 5557, 5558),
        ),
    ],
)
def test_the_conventions_of_a_project_are_known(project: str, url: str, labels: dict[str, str], declared: Declaration) -> None:
    found = read_project(project)
    [provider] = found.providers
    assert provider.base_url == url
    assert provider.instance == PROJECTS[project]["metadata"]["name"]
    assert provider.template.labels == HERE | labels
    assert provider.declaration == declared
    assert not found.registrations


def test_a_worker_of_dynamo_is_not_queried() -> None:
    found = read_project("Dynamo")
    [registration] = found.registrations
    assert (registration.instance, registration.model) == ("agg-decode-0", "Qwen/Qwen3-0.6B")
    assert (registration.endpoint, registration.replay_endpoint, registration.url) == ("tcp://10.1.0.5:20080", None, None)
    assert registration.labels == HERE | {"role": "decode"}
    assert not found.providers


def test_a_worker_of_dynamo_without_a_model_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="pod w needs the annotation kvevents/model"):
        read(pod("w", {"nvidia.com/dynamo-component-type": "worker"}, ("system", 9090)))


def test_our_own_keys_take_precedence() -> None:
    own = {
        "kvevents/model": "m", "kvevents/tenant": "t", "kvevents/group": "g", "kvevents/role": "draft", "kvevents/zone": "z",
        "kvevents/http-port": "9000", "kvevents/events-port": "9001", "kvevents/replay-port": "9002", "kvevents/ranks": "2",
    }  # fmt: skip
    labels = {"llm-d.ai/model": "other", "llm-d.ai/role": "decode", "topology.kubernetes.io/zone": "other"}
    [provider] = read(pod("p", labels, ("http", 8000), ("kv-events", 1), annotations=own), 8200).providers
    assert provider.base_url == "http://10.1.0.7:9000"
    template = provider.template
    assert (template.tenant, template.group, template.ranks) == ("t", "g", 2)
    assert template.labels == HERE | {"role": "draft", "zone": "z"}
    assert provider.declaration == Declaration("m", True, 9001, 9002, assumed_events_port=5556)
    assert read(pod("p", labels, annotations=own)).source == "t\x1fg\x1fp"


def test_relays_beside_an_engine_are_followed_in_its_place() -> None:
    """Each rank has one. The names of their ports are an engine's, and the engine may have ports of these names too."""

    def relay(name: str, *ports: tuple[str, int]) -> dict[str, Any]:
        return {"name": name, "ports": [{"name": port, "containerPort": number} for port, number in ports]}

    found = pod("p", {}, ("http", 8000), ("kv-events", 5557), ("kv-replay", 5558), annotations={"kvevents/model": "m"})
    first = relay("kvevents-relay-0", ("kv-events", 6557), ("kv-replay", 6567), ("kv-metrics", 9465))
    second = relay("kvevents-relay-1", ("kv-events-1", 6558), ("kv-replay-1", 6568), ("kv-metrics-1", 9466))
    found["spec"]["initContainers"] = [relay("other", ("x", 1)), first, second]
    [provider] = read(found).providers
    assert (provider.base_url, provider.template.ranks) == ("http://10.1.0.7:8000", 2)
    assert provider.declaration == Declaration("m", True, 6557, 6567, is_relay=True)
    found["spec"]["initContainers"] = [relay("kvevents-relay", ("events", 6557))]
    with pytest.raises(ConfigError, match="container kvevents-relay of pod p has no port named kv-events"):
        read(found)


@pytest.mark.parametrize(("text", "drafts"), [("all", ()), ("0", (0,)), ("1, 2", (1, 2)), ("", None)])
def test_what_no_event_says_can_be_an_annotation(text: str, drafts: tuple[int, ...] | None) -> None:
    """Tiers without removals, and a draft model."""
    own = {"kvevents/stores-only": "cpu, disk", "kvevents/drafts": text}
    [provider] = read(pod("p", {}, 8000, annotations=own)).providers
    assert (provider.template.stores_only, provider.template.drafts) == (("cpu", "disk"), drafts)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"kvevents/drafts": "none"}, "invalid kvevents/drafts 'none' of pod p: expected all, or 0,1"),
        ({"kvevents/stores-only": "cpuu"}, "invalid stores_only 'cpuu'"),
    ],
)
def test_an_invalid_annotation_is_named(own: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(pod("p", {}, annotations=own))


def test_settings_count_for_pods_that_say_nothing() -> None:
    settings = KubernetesSettings(selector="x", http_port=8001, events_port=5001, replay_port=5002)
    [provider] = read(pod("p", {}), settings=settings).providers
    assert provider.base_url == "http://10.1.0.7:8001"
    assert provider.declaration == Declaration(assumed_events_port=5001, assumed_replay_port=5002)


def test_the_ports_of_a_pool_are_those_of_requests() -> None:
    """With several ports, each has the HTTP server of some ranks of one engine."""
    providers = read(pod("p", {}, ("modelserver", 8200)), 8000, 8001).providers
    assert [each.base_url for each in providers] == ["http://10.1.0.7:8000", "http://10.1.0.7:8001"]
    assert {each.instance for each in providers} == {"p"}


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {}}])
def test_a_pool_without_labels_has_no_pods(selector: dict[str, dict[str, str]]) -> None:
    assert not msgspec.convert({"spec": {"selector": selector}}, InferencePool).selects({"app": "vllm"})


def test_an_ipv6_address_is_bracketed() -> None:
    [provider] = read(pod("p", {}, 8000) | {"status": ready("fd00::7")}).providers
    assert provider.base_url == "http://[fd00::7]:8000"


def test_a_role_that_is_not_one_is_ignored() -> None:
    [provider] = read(pod("p", {"component": "engine"}, 8000)).providers
    assert provider.template.labels == HERE


@pytest.mark.parametrize(
    ("key", "value"),
    [("http-port", "http"), ("events-port", "0"), ("replay-port", "65536"), ("ranks", "-1"), ("ranks", "1025")],
)
def test_an_invalid_number_is_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid kvevents/{key} '{value}' of pod p"):
        read(pod("p", {}, annotations={f"kvevents/{key}": value}))


@pytest.mark.parametrize(
    "selector",
    ["app=vllm", "app==vllm,tier!=b", "a in (x, y)", "a notin (x)", "app.kubernetes.io/name=vllm,!canary", "kvevents/engine"],
)
def test_a_selector_is_accepted(selector: str) -> None:
    assert KubernetesSettings(selector=selector).selector == selector


@pytest.mark.parametrize("selector", ["", "app=", "app=vllm;x", "a in x", "app=vllm,", "app vllm", "-a", "a=b c"])
def test_an_invalid_selector_is_refused(selector: str) -> None:
    if selector == "app=":  # an empty value is one
        assert KubernetesSettings(selector=selector)
        return
    with pytest.raises(ConfigError, match="invalid selector"):
        KubernetesSettings(selector=selector)


def test_all_pods_of_a_namespace_are_never_engines() -> None:
    with pytest.raises(ConfigError, match="needs a selector or pools"):
        KubernetesSettings(namespaces=("a",))


@pytest.mark.parametrize("fields", [{"namespaces": ("A",)}, {"pools": ("a/b",)}, {"namespaces": ("",)}])
def test_an_invalid_name_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="invalid name"):
        KubernetesSettings(selector="a", **fields)
