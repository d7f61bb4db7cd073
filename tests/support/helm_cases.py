"""Render the Helm chart and validate the objects in it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

from tools.chart import CHART, HELM, render

needs_helm = pytest.mark.skipif(not HELM, reason="no helm is installed; `tools/setup` installs it on x86-64 only")


_VALIDATE: Final = find_spec("kubernetes_validate")


SCHEMAS: Final = Path((_VALIDATE and _VALIDATE.origin) or "/nowhere/x").parent / "kubernetes-json-schema"
"""Kubernetes' own schemas of each release, from the package kubernetes-validate."""


needs_schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason="no schemas of Kubernetes: pip install kubernetes-validate")


VERSIONS: Final = ("1.29", "1.37")


SELECTOR: Final = "engines.selector.matchLabels.app=vllm"


OPEN: Final = "access.insecure=true"
"""The setting that allows requests without a token."""


Object = dict[str, Any]


@cache
def render_chart(*settings: str, chart: Path = CHART, values: Path | None = None, version: str = "1.30") -> list[Object]:
    """Return the objects of a release `kv` in the namespace `prod`, from a file of values, or from a selector and settings."""
    flags: list[object] = ["--set", f"{SELECTOR},access.secretName=tokens"] if values is None else ["--values", values]
    flags += [part for setting in settings for part in ("--set", setting)]
    return [found for found in yaml.safe_load_all(render("kv", "prod", *flags, chart=chart, version=version)) if found]


def render_sidecars(folder: Path, *settings: str) -> Object:
    """Return the specification of an engine's pod, from a chart that depends on this one."""
    chart = folder / "engines"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: engines\nversion: 1.0.0\n")
    shutil.copytree(CHART, chart / "charts" / "kvevents")
    (chart / "templates" / "engine.yaml").write_text(_ENGINE)
    objects = render_chart(*(f"kvevents.{setting}" for setting in (SELECTOR, *settings)), chart=chart)
    [spec] = [each["spec"]["template"]["spec"] for each in objects if each["metadata"]["name"] == "engine"]
    return spec  # type: ignore[no-any-return]


_ENGINE: Final = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: engine}
spec:
  template:
    spec:
      initContainers:
        {{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 8 }}
      volumes:
        {{- include "kvevents.relay.volume" (dict "root" .Subcharts.kvevents) | nindent 8 }}
"""


def faults_of(each: Object, version: str) -> list[str]:
    """Return the errors of an object in the strict schemas of a release of Kubernetes, which reject unknown fields."""
    [folder] = SCHEMAS.glob(f"v{version}.*-local-strict")

    @cache
    def read(uri: str) -> Any:
        return json.loads((folder / uri.rpartition("/")[2]).read_text())

    group, _, api = each["apiVersion"].rpartition("/")
    kind = "-".join([each["kind"].lower(), *([group.partition(".")[0]] if group else []), api])
    validator = jsonschema_rs.validator_for(read(f"{kind}.json"), retriever=read)
    return [f"{'/'.join(map(str, fault.instance_path))}: {fault.message}" for fault in validator.iter_errors(each)]
