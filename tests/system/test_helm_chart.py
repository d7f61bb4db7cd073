"""The Helm chart: its objects match Kubernetes' schemas, the options of `kvevents`, and the pod security standards."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

from helm_cases import CHART, OPEN, ROOT, VERSIONS, Object, faults_of, needs_helm, needs_schemas, render_chart, run_helm
from kvevents.cli.options import engine
from kvevents.cli.program import make_parser as parser
from kvevents.package_metadata import version
from kvevents.service.access import Access
from kvevents.service.settings import ServiceSettings
from kvevents.settings import convert

MODEL: Final = "engines.model=llama"
EVERYTHING: Final = (
    MODEL,
    "engines.blockSize=16",
    "bridge.login.secretName=bridge",
    "bridge.login.nkey=bridge.nk",
    "bridge.login.inboxPrefix=_INBOX_bridge",
    "replica.login.secretName=replica",
    "replica.login.credentials=replica.creds",
    "replica.config.secretName=replica-config",
    "replica.antiAffinity=hard",
    "plane.tls.secretName=plane-tls",
    "plane.tls.certificate=tls.crt",
    "plane.tls.key=tls.key",
    "plane.servers={tls://nats-0:4222,tls://nats-1:4222}",
    "imagePullSecrets[0].name=registry",
    "bridge.nodeSelector.zone=a",
    "replica.tolerations[0].key=gpu",
    "replica.podAnnotations.note=x",
    "bridge.podLabels.team=x",
    "replica.service.annotations.note=x",
    "monitoring.podMonitor.enabled=true",
    "monitoring.podMonitor.labels.release=prometheus",
    "monitoring.prometheusRule.enabled=true",
    "monitoring.prometheusRule.labels.release=prometheus",
)


def find_object(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def pods_of(objects: list[Object]) -> list[Object]:
    return [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]


# --- Kubernetes' schemas -----------------------------------------------------------------------------------------------------


@needs_helm
@needs_schemas
@pytest.mark.parametrize("settings", [(MODEL,), EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("version", VERSIONS)
def test_rendered_objects_match_the_schemas_of_kubernetes(settings: tuple[str, ...], version: str) -> None:
    """Objects of the Prometheus operator are skipped, because there are no schemas for them."""
    objects = [each for each in render_chart(*settings, version=version) if not each["apiVersion"].startswith("monitoring.")]
    kinds = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
    assert {each["kind"] for each in objects} == kinds
    for each in objects:
        assert faults_of(each, version) == [], each["metadata"]["name"]


@needs_helm
@needs_schemas
def test_the_schemas_reject_an_unknown_field() -> None:
    """The schemas are strict, so the test above can fail."""
    wrong = json.loads(json.dumps(find_object(render_chart(MODEL), "Deployment", "plane-kvevents-replica")))
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    assert "redinessProbe" in str(faults_of(wrong, "1.30"))


@needs_helm
def test_the_commands_of_the_guide_install_a_plane(tmp_path: Path) -> None:
    """The `helm install` command of deploy/README.md renders; its Secrets have the files that the arguments name."""
    text = (ROOT / "deploy" / "README.md").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^helm install .*$", text, re.MULTILINE)
    _, _, release, chart, *settings = shlex.split(line)
    done = run_helm("template", release, ROOT / chart, *settings)
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    secrets = dict(re.findall(r"^kubectl create secret generic (\S+) --from-file=(\S+)", text, re.MULTILINE))
    named_secrets = set[str]()
    for pod in pods_of(objects):
        [container] = pod["spec"]["containers"]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                named_secrets.add(name)
                assert any(arg.endswith(f"={places[volume['name']]}/{secrets[name]}") for arg in container["args"]), name
    assert named_secrets == secrets.keys()
    [script] = re.findall(r"^printf .*$", text, re.MULTILINE)
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)  # noqa: S607 - our own document
    Access(convert(tomllib.loads((tmp_path / secrets["kv-config"]).read_text()), ServiceSettings, "guide").access)


@needs_helm
def test_helm_lint_accepts_the_chart() -> None:
    done = run_helm("lint", "--strict", CHART, "--set", MODEL, "--set", OPEN, "--kube-version", "1.30")
    assert done.returncode == 0, done.stdout + done.stderr


# --- what kvevents accepts --------------------------------------------------------------------------------------------------


def containers_of(objects: list[Object]) -> list[Object]:
    return [each for pod in pods_of(objects) for each in pod["spec"]["containers"]]


@needs_helm
@pytest.mark.parametrize("settings", [(MODEL,), EVERYTHING], ids=["default", "everything"])
def test_the_program_accepts_the_rendered_arguments(settings: tuple[str, ...]) -> None:
    """The program parses each container's arguments: the command, the port and the pod's name are as rendered."""
    for each in containers_of(render_chart(*settings)):
        args = parser().parse_args([arg.replace("$(POD_NAME)", "pod-1") for arg in each["args"]])
        command, port, name = {
            "bridge": ("bridge", "bridge.metrics_port", "bridge.name"),
            "replica": ("serve", "port", "replica"),
        }[each["name"]]
        assert args.command.name == command
        assert [port["containerPort"] for port in each["ports"]] == [getattr(args, port)]
        assert getattr(args, name) == "pod-1"


@needs_helm
def test_bridges_find_engines_behind_the_headless_service() -> None:
    objects = render_chart(*EVERYTHING)
    service = find_object(objects, "Service", "plane-kvevents-engines")
    assert service["spec"]["clusterIP"] == "None"
    tables = find_object(objects, "ConfigMap", "plane-kvevents-bridge")["data"]["bridge.toml"]
    config = convert(tomllib.loads(tables), ServiceSettings, "bridge.toml")
    [dns] = config.dns
    assert dns.target == f"plane-kvevents-engines.kv.svc:{service['spec']['ports'][0]['port']}"
    assert (dns.model, dns.block_size, dns.replay_endpoint, dns.stores_only) == ("llama", 16, "tcp://*:6558", ())
    objects = render_chart(*EVERYTHING, "engines.storesOnly={cpu,disk}")
    tables = find_object(objects, "ConfigMap", "plane-kvevents-bridge")["data"]["bridge.toml"]
    [dns] = convert(tomllib.loads(tables), ServiceSettings, "bridge.toml").dns
    assert dns.stores_only == ("cpu", "disk")


# --- what a cluster requires of pods-----------------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize("settings", [(MODEL,), EVERYTHING], ids=["default", "everything"])
def test_pods_meet_the_restricted_security_standard(settings: tuple[str, ...]) -> None:
    """Pods meet Kubernetes' standard `restricted`, with a read-only root file system, no token, and limits."""
    for pod in pods_of(render_chart(*settings)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in spec["containers"]:
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["requests"]
            assert "memory" in each["resources"]["limits"]
        assert {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }
        assert all(volume.keys() & {"secret", "configMap", "emptyDir"} for volume in spec["volumes"])


@needs_helm
def test_arguments_name_files_of_mounted_secrets() -> None:
    for pod in pods_of(render_chart(*EVERYTHING)):
        [each] = pod["spec"]["containers"]
        places = [mount["mountPath"] for mount in each["volumeMounts"]]
        files = [arg.partition("=")[2] for arg in each["args"] if re.match(r"--(creds|nkey|tls-\w+|config)=", arg)]
        assert len(files) == 5
        assert all(any(file.startswith(f"{place}/") for place in places) for file in files)


@needs_helm
def test_replicas_have_probes_and_are_evicted_one_at_a_time() -> None:
    objects = render_chart(*EVERYTHING)
    replica = find_object(objects, "Deployment", "plane-kvevents-replica")["spec"]["template"]
    [each] = replica["spec"]["containers"]
    assert each["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert each["livenessProbe"]["httpGet"]["path"] == "/health"
    assert "requiredDuringSchedulingIgnoredDuringExecution" in replica["spec"]["affinity"]["podAntiAffinity"]
    for part in ("bridge", "replica"):
        budget = find_object(objects, "PodDisruptionBudget", f"plane-kvevents-{part}")["spec"]
        assert budget["maxUnavailable"] == 1
        matching = [
            pod for pod in pods_of(objects) if budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(matching) == 1
    service = find_object(objects, "Service", "plane-kvevents-replica")["spec"]
    assert service["selector"].items() <= replica["metadata"]["labels"].items()


@needs_helm
def test_monitors_and_rules_are_those_of_the_observability_folder() -> None:
    objects = render_chart(*EVERYTHING)
    [rules] = [each for each in objects if each["kind"] == "PrometheusRule"]
    expected = [yaml.safe_load(path.read_text())["groups"] for path in sorted((ROOT / "observability").glob("*-rules.yaml"))]
    assert sorted(rules["spec"]["groups"], key=str) == sorted([group for groups in expected for group in groups], key=str)
    monitors = [each for each in objects if each["kind"] == "PodMonitor"]
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        found = [pod for pod in pods_of(objects) if labels <= pod["metadata"]["labels"].items()]
        assert found
        for pod in found:
            ports = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
            assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= ports
    assert len(monitors) == 2


# --- the relay ---------------------------------------------------------------------------------------------------------------


@needs_helm
def test_a_dependent_chart_can_add_relays_as_sidecars(tmp_path: Path) -> None:
    """The named template renders the container that the example for users without a chart contains."""
    chart = tmp_path / "engines"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: engines\nversion: 1.0.0\n")
    shutil.copytree(CHART, chart / "charts" / "kvevents")
    pod = '{{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 8 }}'
    (chart / "templates" / "engine.yaml").write_text(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: engine}\nspec:\n  template:\n    spec:\n      containers:\n"
        + pod.replace("{{-", "        {{-", 1)
    )
    objects = render_chart("kvevents.engines.model=llama", f"kvevents.{OPEN}", chart=chart)
    [relay] = find_object(objects, "Deployment", "engine")["spec"]["template"]["spec"]["containers"]
    example = yaml.safe_load((CHART / "examples" / "engine-with-relay.yaml").read_text())
    assert relay == example["spec"]["template"]["spec"]["containers"][1]
    args = parser().parse_args(relay["args"])
    assert (args.command.name, args.endpoint, args.replay_endpoint) == ("relay", "tcp://0.0.0.0:6557", "tcp://0.0.0.0:6558")
    assert [engine(each).endpoint for each in args.upstreams] == ["tcp://127.0.0.1:5557"]
    service = find_object(objects, "Service", "plane-kvevents-engines")["spec"]
    assert service["selector"].items() <= example["spec"]["template"]["metadata"]["labels"].items()
    assert {port["port"] for port in service["ports"]} <= {port["containerPort"] for port in relay["ports"]}


# --- wrong values ------------------------------------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("plane.copies=2", "copies"),
        ("plane.servers={nats://user:secret@nats:4222}", "servers"),
        ("replica.replicsa=2", "replicsa"),
        ("replica.memoryLimit=lots", "memoryLimit"),
        ("engines.storesOnly={cpuu}", "storesOnly"),
        ("engines.model=", "engines.model: what model the engines serve"),
        ("bridge.login.secretName=x", "name the key in it as well"),
        ("relay.tokenPolicy=burn", "tokenPolicy"),
        ("engines.ranks=2", "engines.port and engines.replayPort must be 2 or more apart: they are 6557 and 6558"),
        ("replica.insecure=false", "name a Secret with tokens in [access], or set replica.insecure"),
    ],
)
def test_a_wrong_value_is_named_in_the_error(wrong: str, message: str) -> None:
    done = run_helm("template", "plane", CHART, "--kube-version", "1.30", "--set", MODEL, "--set", OPEN, "--set", wrong)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_schema_has_exactly_the_values_of_the_chart() -> None:
    """Each value has a property in the schema, and each property has a value."""

    def places(values: Any, schema: Any, prefix: str = "") -> list[str]:
        if schema.get("additionalProperties") is not False:
            return []
        missing = [f"{prefix}{name}" for name in values.keys() ^ (schema["properties"].keys() - {"global"})]
        return missing + [
            place
            for name, value in values.items()
            if isinstance(value, dict)
            for place in places(value, schema["properties"][name], f"{prefix}{name}.")
        ]

    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text())
    assert places(values, schema) == []
    assert jsonschema_rs.validator_for(schema).is_valid(values)


def test_the_image_has_the_user_extras_and_files_that_the_chart_needs() -> None:
    """The user exists, the extras are installed, and the ignore file admits just the files that are copied."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    assert f"--uid {user}" in dockerfile
    assert f"USER {user}:" in dockerfile
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    [extras] = re.findall(r"\{wheel\}\[([\w,]+)\]", dockerfile)
    assert set(extras.split(",")) <= hook["extras"].keys()
    copied = [name for line in re.findall(r"^COPY (?!--)(.*)$", dockerfile, re.MULTILINE) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    admitted = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(admitted) == sorted(copied)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version()
    exposed = set(map(int, re.findall(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)[0].split()))
    ports = {values["replica"]["port"], values["engines"]["port"], values["engines"]["replayPort"]}
    assert exposed == ports | {values["bridge"]["metricsPort"], values["relay"]["metricsPort"]}
