"""Render the Helm chart and validate the objects in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml

import paths

ROOT: Final = paths.ROOT


CHART: Final = ROOT / "deploy" / "helm" / "kvevents"


HELM: Final = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm") or ""


needs_helm = pytest.mark.skipif(not HELM, reason="no helm is installed; `tools/setup` installs it on x86-64 only")


_VALIDATE: Final = find_spec("kubernetes_validate")


SCHEMAS: Final = Path((_VALIDATE and _VALIDATE.origin) or "/nowhere/x").parent / "kubernetes-json-schema"
"""Kubernetes' own schemas of each release, from the package kubernetes-validate."""


needs_schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason="no schemas of Kubernetes: pip install kubernetes-validate")


SECONDS: Final = 60.0


VERSIONS: Final = ("1.25", "1.37")


OPEN: Final = "replica.insecure=true"
"""The setting that allows replicas without a Secret of tokens."""


Object = dict[str, Any]


def run_helm(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELM, *map(str, args)], capture_output=True, text=True, timeout=SECONDS, check=False)


@cache
def render_chart(*settings: str, chart: Path = CHART, version: str = "1.30") -> list[Object]:
    has_tokens = any(setting.startswith("replica.config.secretName=") for setting in settings)
    flags = [part for setting in (*settings, *(() if has_tokens else (OPEN,))) for part in ("--set", setting)]
    done = run_helm("template", "plane", chart, "--namespace", "kv", "--kube-version", version, *flags)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


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
