"""The Helm chart: its objects match Kubernetes' schemas, the options of `kvevents`, and the pod security standards."""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

from helm_cases import OPEN, SELECTOR, VERSIONS, Object, faults_of, needs_helm, needs_schemas, render_chart, render_sidecars
from kvevents.cli.options import engine
from kvevents.cli.program import make_parser as parser
from kvevents.package_metadata import VERSION
from kvevents.service.settings import ServiceSettings
from kvevents.settings import convert
from tools.chart import CHART, ROOT, manifests, render, run_helm

DATA: Final = ROOT / "tests" / "data" / "chart"
SERVE: Final = DATA / "serve.values.yaml"
PLANE: Final = DATA / "plane.values.yaml"
VALUES: Final = (None, SERVE, PLANE)
"""Only a selector; all of mode serve; all of mode plane."""

all_values = pytest.mark.parametrize("values", VALUES, ids=["selector", "serve", "plane"])


def find_object(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def find_all(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def pods_of(objects: list[Object]) -> list[Object]:
    return [each["spec"]["template"] for each in find_all(objects, "Deployment")]


def container_of(objects: list[Object], name: str) -> Object:
    found: list[Object] = [each for pod in pods_of(objects) for each in pod["spec"]["containers"] if each["name"] == name]
    [container] = found
    return container


# --- Kubernetes' schemas -----------------------------------------------------------------------------------------------------


@needs_helm
@needs_schemas
@all_values
@pytest.mark.parametrize("version", VERSIONS)
def test_rendered_objects_match_the_schemas_of_kubernetes(values: Path | None, version: str) -> None:
    """Objects of the Prometheus operator and of the Gateway API are skipped, because there are no schemas for them."""
    objects = render_chart(values=values, version=version)
    checked = [each for each in objects if not each["apiVersion"].startswith(("monitoring.", "gateway."))]
    kinds = {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"}
    assert kinds <= {each["kind"] for each in checked}
    for each in checked:
        assert faults_of(each, version) == [], each["metadata"]["name"]


@needs_helm
@needs_schemas
def test_the_schemas_reject_an_unknown_field() -> None:
    """The schemas are strict, so the test above can fail."""
    wrong = json.loads(json.dumps(find_object(render_chart(), "Deployment", "kv-kvevents")))
    wrong["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    assert "redinessProbe" in str(faults_of(wrong, "1.30"))


@needs_helm
@pytest.mark.parametrize("path", [ROOT / "deploy/kubernetes/serve.yaml", DATA / "serve.yaml", DATA / "plane.yaml"])
def test_the_manifests_are_what_the_chart_renders(path: Path) -> None:
    """A change of the chart is visible in them, as in a review: `python -m tools.chart` writes them."""
    assert path.read_text() == manifests()[path], "run python -m tools.chart"


@needs_helm
def test_helm_lint_accepts_the_chart() -> None:
    done = run_helm("lint", "--strict", CHART, "--set", SELECTOR, "--kube-version", "1.30")
    assert done.returncode == 0, done.stdout + done.stderr


# --- the default: a service that finds engines by label ---------------------------------------------------------------------


@needs_helm
def test_a_selector_is_all_that_an_installation_needs() -> None:
    """Two replicas of the service follow the labelled pods of the namespace; there is no bridge, and no NATS is named."""
    objects = list(yaml.safe_load_all(render("kvevents", "prod", "--set", SELECTOR)))
    [deployment] = find_all(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    args = container_of(objects, "serve")["args"]
    assert "--kubernetes-selector=app=vllm" in args
    assert not [arg for arg in args if arg.startswith(("--nats", "--plane", "--insecure", "--kubernetes-namespace"))]
    assert not find_all(objects, "NetworkPolicy")


@needs_helm
def test_a_chart_without_a_secret_makes_a_token_and_never_answers_without_one() -> None:
    """Each installation has another token, as strong as a key; with a Secret or `access.insecure` it makes none."""
    found = set()
    for _ in range(2):
        objects = list(yaml.safe_load_all(render("kvevents", "prod", "--set", SELECTOR)))
        [secret] = find_all(objects, "Secret")
        [token] = secret["data"].values()
        found.add(base64.b64decode(token))
        [volume] = [each for each in pods_of(objects)[0]["spec"]["volumes"] if each["name"] == "tokens"]
        assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert len(found) == 2
    assert all(re.fullmatch(rb"[A-Za-z0-9]{43}", token) for token in found)
    assert not find_all(render_chart(), "Secret")
    insecure = render_chart("access.secretName=", OPEN)
    assert not find_all(insecure, "Secret")
    assert "--insecure" in container_of(insecure, "serve")["args"]


@needs_helm
@pytest.mark.parametrize("values", VALUES[:2], ids=["selector", "serve"])
def test_the_service_account_can_do_no_more_than_find_engines(values: Path | None) -> None:
    """The account can read only pods, and pools if one is named, of the named namespaces. Only the service gets its token."""
    objects = render_chart(values=values)
    named = yaml.safe_load(values.read_text())["engines"] if values else {}
    resources = {"pods"} | ({"inferencepools"} if named.get("pools") else set())
    [account] = find_all(objects, "ServiceAccount")
    namespaces = named.get("namespaces") or ["prod"]
    for kind in ("Role", "RoleBinding"):
        assert [each["metadata"]["namespace"] for each in find_all(objects, kind)] == namespaces
    for role in find_all(objects, "Role"):
        assert {each for rule in role["rules"] for each in rule["resources"]} == resources
        assert {each for rule in role["rules"] for each in rule["verbs"]} == {"get", "list", "watch"}
    for binding in find_all(objects, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "prod"}]
    assert account["automountServiceAccountToken"] is False
    assert [pod["spec"]["serviceAccountName"] for pod in pods_of(objects)] == [account["metadata"]["name"]]


@needs_helm
def test_an_own_service_account_gets_no_rights_from_the_chart() -> None:
    objects = render_chart("serviceAccount.name=own")
    assert not [each for kind in ("ServiceAccount", "Role", "RoleBinding") for each in find_all(objects, kind)]
    assert pods_of(objects)[0]["spec"]["serviceAccountName"] == "own"


@needs_helm
@all_values
def test_only_what_finds_engines_by_label_has_a_token_of_the_api_server(values: Path | None) -> None:
    """In mode plane these are the bridges, and not the replicas."""
    objects = render_chart(values=values)
    for pod in pods_of(objects):
        [each] = pod["spec"]["containers"]
        finds = any(arg.startswith("--kubernetes-") for arg in each["args"])
        assert pod["spec"]["automountServiceAccountToken"] is finds
        assert finds is (each["name"] == ("bridge" if values == PLANE else "serve"))


# --- what kvevents accepts --------------------------------------------------------------------------------------------------


@needs_helm
@all_values
def test_the_program_accepts_the_rendered_arguments(values: Path | None) -> None:
    """The program parses each container's arguments: the command and the port are as rendered."""
    objects = render_chart(values=values)
    for pod in pods_of(objects):
        [each] = pod["spec"]["containers"]
        args = parser().parse_args([arg.replace("$(POD_NAME)", "pod-1") for arg in each["args"]])
        command, port = {"bridge": ("bridge", "bridge.metrics_port"), "serve": ("serve", "port")}[each["name"]]
        assert args.command.name == command
        assert [port["containerPort"] for port in each["ports"]] == [getattr(args, port)]
        if values == PLANE:
            name = {"bridge": "bridge.name", "serve": "replica"}[each["name"]]
            assert getattr(args, name) == "pod-1"


@needs_helm
@all_values
def test_the_program_accepts_the_rendered_files(values: Path | None) -> None:
    """The settings file of each container is valid, and names tokens as the Secret has them."""
    objects = render_chart(values=values)
    for pod in pods_of(objects):
        [each] = pod["spec"]["containers"]
        [name] = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        [(file, text)] = find_object(objects, "ConfigMap", name)["data"].items()
        assert f"--config=/etc/kvevents/config/{file}" in each["args"]
        settings = convert(tomllib.loads(text), ServiceSettings, file)
        assert [source.instance for source in settings.sources] == (["other"] if each["name"] == "bridge" else [])
        if each["name"] == "serve":
            roles = yaml.safe_load(values.read_text())["access"].get("roles", ["read"]) if values else ["read"]
            assert [(token.role, token.token_file) for token in settings.access.tokens] == [
                (role, f"/etc/kvevents/tokens/{role}") for role in roles
            ]


# --- what a cluster requires of pods-----------------------------------------------------------------------------------------


@needs_helm
@all_values
def test_pods_meet_the_restricted_security_standard(values: Path | None) -> None:
    """Pods meet Kubernetes' standard `restricted`, with a read-only root file system and limits."""
    for pod in pods_of(render_chart(values=values)):
        spec = pod["spec"]
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
@pytest.mark.parametrize("values", VALUES[1:], ids=["serve", "plane"])
def test_arguments_name_files_of_mounted_secrets(values: Path) -> None:
    """Keys, certificates and logins are files of Secrets, which only the group of the process can read."""
    names = set[str]()
    for pod in pods_of(render_chart(values=values)):
        [each] = pod["spec"]["containers"]
        secrets = {volume["name"]: volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume}
        places = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
        for arg in each["args"]:
            if found := re.match(r"--(?:creds|nkey|tls-\w+|https-\w+|curve-[\w-]+)=(/.*)/", arg):
                names.add(secrets[places[found[1]]]["secretName"])
        assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
    assert names == ({"curve", "certificate"} if values == SERVE else {"curve", "nats-tls", "bridge", "replica"})


@needs_helm
@all_values
def test_each_pod_has_probes_a_spread_and_a_budget(values: Path | None) -> None:
    """Liveness never asks what a restart does not heal; one pod at a time is evicted; nodes are shared if they must be."""
    objects = render_chart(values=values)
    for pod in pods_of(objects):
        [each] = pod["spec"]["containers"]
        paths = {kind: each[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
        assert paths == {"startup": "/livez", "readiness": "/readyz", "liveness": "/livez"}
        schemes = {each[f"{kind}Probe"]["httpGet"]["scheme"] for kind in paths}
        assert schemes == {"HTTPS" if values == SERVE else "HTTP"}
        labels = pod["metadata"]["labels"].items()
        [constraint] = pod["spec"]["topologySpreadConstraints"]
        assert constraint["labelSelector"]["matchLabels"].items() <= labels
        budgets = [each["spec"] for each in find_all(objects, "PodDisruptionBudget")]
        [budget] = [each for each in budgets if each["selector"]["matchLabels"].items() <= labels]
        assert budget["maxUnavailable"] == 1
    service = find_object(objects, "Service", "kv-kvevents")["spec"]
    assert [port["appProtocol"] for port in service["ports"]] == (
        ["https", "https"] if values == SERVE else ["http", "kubernetes.io/h2c"]
    )
    assert service["selector"]["app.kubernetes.io/component"] == "serve"


@needs_helm
def test_each_workload_takes_additions() -> None:
    """Arguments, variables, volumes and mounts reach the bridge and the service alike."""
    additions = ["extraArgs={--log-format=json}", "extraEnv[0].name=A", "priorityClassName=high"]
    additions += ["extraVolumes[0].name=v", "extraVolumeMounts[0].name=v", "extraVolumeMounts[0].mountPath=/v"]
    objects = render_chart("mode=plane", *(f"{name}.{each}" for name in ("serve", "bridge") for each in additions))
    for pod in pods_of(objects):
        [each] = pod["spec"]["containers"]
        assert each["args"][-1] == "--log-format=json"
        assert each["env"][-1]["name"] == "A"
        assert each["volumeMounts"][-1] == {"name": "v", "mountPath": "/v"}
        assert pod["spec"]["volumes"][-1]["name"] == "v"
        assert pod["spec"]["priorityClassName"] == "high"


# --- networks ----------------------------------------------------------------------------------------------------------------


def admits(policy: Object, port: int, peer: str) -> bool:
    """Whether a policy of engines admits a connection from kvevents or from anything else."""
    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports", [{"port": 1, "endPort": 65535}])
        if (peer == "kvevents" or "from" not in rule) and any(each["port"] <= port <= each["endPort"] for each in ports):
            return True
    return False


@needs_helm
def test_nothing_but_kvevents_reaches_the_ports_of_events() -> None:
    """All other ports of the engines' pods stay open, because a policy can only allow, and no other policy selects these
    pods."""
    objects = render_chart("networkPolicy.enabled=true")
    policy = find_object(objects, "NetworkPolicy", "kv-kvevents-engines")
    assert policy["spec"]["podSelector"]["matchLabels"] == {"app": "vllm"}
    closed = {port for port in range(1, 65536) if not admits(policy, port, "anything")}
    assert closed == {5557, 5558, 6557, 6558}
    assert all(admits(policy, port, "kvevents") for port in (1, 5557, 6558, 65535))
    [peer] = policy["spec"]["ingress"][0]["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "prod"}}
    assert peer["podSelector"]["matchLabels"].items() <= pods_of(objects)[0]["metadata"]["labels"].items()


@needs_helm
@pytest.mark.parametrize("values", VALUES[1:], ids=["serve", "plane"])
def test_named_clients_reach_the_ports_of_the_service_alone(values: Path) -> None:
    objects = render_chart(values=values)
    policy = find_object(objects, "NetworkPolicy", "kv-kvevents")["spec"]
    [rule] = policy["ingress"]
    ports = {port["name"] for pod in pods_of(objects) for each in pod["spec"]["containers"] for port in each["ports"]}
    assert {port["port"] for port in rule["ports"]} == ports
    for pod in pods_of(objects):
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@needs_helm
def test_names_of_routes_are_allowed_hosts() -> None:
    objects = render_chart(values=SERVE)
    [ingress], [route] = find_all(objects, "Ingress"), find_all(objects, "HTTPRoute")
    names = {ingress["spec"]["rules"][0]["host"], *route["spec"]["hostnames"]}
    args = container_of(objects, "serve")["args"]
    assert {f"--allowed-host={name}" for name in names} <= set(args)
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    service = find_object(objects, "Service", backend["name"])
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    [target] = route["spec"]["rules"][0]["backendRefs"]
    assert target["port"] in {port["port"] for port in service["spec"]["ports"]}


# --- monitoring --------------------------------------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize("mode", ["serve", "plane"])
def test_monitors_and_rules_are_those_of_the_observability_folder(mode: str) -> None:
    """A service has no rules of a plane. Prometheus has a token, because metrics need one."""
    objects = render_chart(f"mode={mode}", "monitoring.podMonitor.enabled=true", "monitoring.prometheusRule.enabled=true")
    [rules] = find_all(objects, "PrometheusRule")
    files = ["prometheus-rules.yaml", *(["plane-rules.yaml"] if mode == "plane" else [])]
    expected = [yaml.safe_load((ROOT / "observability" / name).read_text())["groups"] for name in files]
    assert rules["spec"]["groups"] == [group for groups in expected for group in groups]
    monitors = find_all(objects, "PodMonitor")
    assert len(monitors) == len(pods_of(objects))
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        [pod] = [pod for pod in pods_of(objects) if labels <= pod["metadata"]["labels"].items()]
        [each] = pod["spec"]["containers"]
        [end] = monitor["spec"]["podMetricsEndpoints"]
        assert end["port"] in {port["name"] for port in each["ports"]}
        needs_token = each["name"] == "serve"
        assert end.get("authorization") == ({"credentials": {"name": "tokens", "key": "read"}} if needs_token else None)


# --- relays ------------------------------------------------------------------------------------------------------------------


@needs_helm
def test_a_dependent_chart_can_add_relays_as_sidecars(tmp_path: Path) -> None:
    """The named templates render the container and the volume that the example for users without a chart contains."""
    spec = render_sidecars(tmp_path)
    [relay] = spec["initContainers"]
    example = yaml.safe_load((CHART / "examples" / "engine-with-relay.yaml").read_text())["spec"]["template"]
    assert example["spec"]["initContainers"] == [relay]
    assert example["spec"]["volumes"] == spec["volumes"]
    assert relay["restartPolicy"] == "Always"
    args = parser().parse_args(relay["args"])
    assert (args.command.name, args.endpoint, args.replay_endpoint) == ("relay", "tcp://0.0.0.0:6557", "tcp://0.0.0.0:6558")
    assert [engine(each).endpoint for each in args.upstreams] == ["tcp://127.0.0.1:5557"]
    [mount] = relay["volumeMounts"]
    assert str(args.journal).startswith(f"{mount['mountPath']}/")


@needs_helm
def test_ports_of_ranks_must_not_overlap(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"relay.port and relay.replayPort must be 2 or more apart: they are 6557 and 6558"
    ):
        render_sidecars(tmp_path, "relay.ranks=2")


@needs_helm
def test_relays_of_two_ranks_share_a_pod(tmp_path: Path) -> None:
    """The two relays have different ports and journals. Additions, such as keys, reach both relays."""
    ranks = ("relay.ranks=2", "relay.replayPort=6567", "relay.engineReplayPort=5567")
    mount = ("relay.extraVolumeMounts[0].name=keys", "relay.extraVolumeMounts[0].mountPath=/keys")
    key = "relay.extraArgs={--curve-key=/keys/relay.key_secret}"
    both = render_sidecars(tmp_path, *ranks, *mount, key)["initContainers"]
    ports = [port["containerPort"] for each in both for port in each["ports"]]
    assert len(set(ports)) == len(ports) == 6
    args = [parser().parse_args(each["args"]) for each in both]
    assert len({each.journal for each in args}) == 2
    assert [engine(each.upstreams[0]).rank for each in args] == [0, 1]
    assert all("--curve-key=/keys/relay.key_secret" in each["args"] for each in both)
    assert all(each["volumeMounts"][-1] == {"name": "keys", "mountPath": "/keys"} for each in both)


# --- documents ---------------------------------------------------------------------------------------------------------------


@needs_helm
def test_the_commands_of_the_guides_render() -> None:
    """Each `helm install` of a document renders; the Secrets that documents create have the files that arguments name."""
    texts = [(ROOT / name).read_text() for name in ("deploy/README.md", "docs/guides/kubernetes.md", "docs/guides/plane.md")]
    text = "\n".join(texts).replace("\\\n", " ")
    commands = re.findall(r"^helm install .*$", text, re.MULTILINE)
    assert len(commands) >= 2
    created = dict(re.findall(r"^kubectl create secret generic (\S+) --from-file=(\S+)", text, re.MULTILINE))
    for command in commands:
        _, _, release, chart, *settings = shlex.split(command, comments=True)
        done = run_helm("template", release, ROOT / chart, "--kube-version", "1.30", *settings)
        assert done.returncode == 0, done.stderr
        for pod in pods_of([found for found in yaml.safe_load_all(done.stdout) if found]):
            [each] = pod["spec"]["containers"]
            places = {mount["name"]: mount["mountPath"] for mount in each["volumeMounts"]}
            for volume in pod["spec"]["volumes"]:
                if (name := volume.get("secret", {}).get("secretName")) in created:
                    file = f"{places[volume['name']]}/{created[name]}"
                    assert any(arg.endswith(f"={file}") for arg in each["args"]), name


# --- wrong values ------------------------------------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("engines.selector.matchLabels=null", "engines.selector: which pods are engines, such as --set"),
        ("mode=plain", "mode"),
        ("plane.copies=2", "copies"),
        ("plane.servers={nats://user:secret@nats:4222}", "servers"),
        ("serve.replicsa=2", "replicsa"),
        ("serve.memoryLimit=lots", "memoryLimit"),
        ("serve.readyQuorum=2", "readyQuorum"),
        ("access.roles={admin}", "roles"),
        ("mode=plane,bridge.login.secretName=x", "name the key in it as well"),
        ("relay.tokenPolicy=burn", "tokenPolicy"),
        ("networkPolicy.enabled=true,networkPolicy.enginePorts[0].port=9,networkPolicy.enginePorts[1].port=9", "ascending"),
        ("ingress.enabled=true", "ingress.host"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs"),
    ],
)
def test_a_wrong_value_is_named_in_the_error(wrong: str, message: str) -> None:
    done = run_helm("template", "kv", CHART, "--kube-version", "1.30", "--set", SELECTOR, "--set", wrong)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_schema_has_exactly_the_values_of_the_chart() -> None:
    """Each value has a property in the schema, and each property has a value."""
    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), json.loads((CHART / "values.schema.json").read_text())

    def places(values: Any, schema: Any, prefix: str = "") -> list[str]:
        if reference := schema.get("$ref"):
            schema = definitions[reference.rpartition("/")[2]]
        if schema.get("additionalProperties") is not False:
            return []
        missing = [f"{prefix}{name}" for name in values.keys() ^ (schema["properties"].keys() - {"global"})]
        return missing + [
            place
            for name, value in values.items()
            if isinstance(value, dict)
            for place in places(value, schema["properties"][name], f"{prefix}{name}.")
        ]

    definitions = schema["definitions"]
    assert places(values, schema) == []
    assert jsonschema_rs.validator_for(schema).is_valid(values)


def test_the_image_has_the_user_and_the_ports_that_the_chart_needs() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    assert f"--uid {user}" in dockerfile
    assert f"USER {user}:" in dockerfile
    exposed = set(map(int, re.findall(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)[0].split()))
    assert exposed == {8090, 9464, 9465, values["relay"]["port"], values["relay"]["replayPort"]}
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == VERSION
