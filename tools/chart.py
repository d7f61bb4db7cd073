"""Renders the Helm chart: `python -m tools.chart` writes the manifests that tests compare with the chart's output.

The manifests are `deploy/kubernetes/serve.yaml`, for clusters without Helm, and those in `tests/data/chart`, each made from the
values file beside it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "kvevents"
HELM: Final = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm") or ""
"""The program of the package helm-binary, which `make` installs beside Python, or else one on the path; empty without one."""
SECONDS: Final = 60.0
HEADER: Final = """\
# Two `kvevents serve`, each of which follows all engines in pods with the label `app: vllm` of the namespace `kvevents`: what
# the chart renders, by `python -m tools.chart`. docs/guides/kubernetes.md explains it. It needs a token for routers:
#
#   kubectl create secret generic kvevents-tokens --from-literal=read="$(openssl rand -base64 32)" --namespace kvevents
"""
_SERVE: Final = ("--set", "engines.selector.matchLabels.app=vllm", "--set", "access.secretName=kvevents-tokens")


def run_helm(*args: object) -> subprocess.CompletedProcess[str]:
    """Run Helm, and return its outcome."""
    return subprocess.run([HELM, *map(str, args)], capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - our own


def render(name: str, namespace: str, *flags: object, chart: Path = CHART, version: str = "1.30") -> str:
    """Return the objects of a release as YAML. Raises `AssertionError` with Helm's message."""
    done = run_helm("template", name, chart, "--namespace", namespace, "--kube-version", version, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests() -> dict[Path, str]:
    """Return what each file should have."""
    manifests_by_path = {ROOT / "deploy" / "kubernetes" / "serve.yaml": HEADER + render("kvevents", "kvevents", *_SERVE)}
    for values in sorted((ROOT / "tests" / "data" / "chart").glob("*.values.yaml")):
        manifests_by_path[values.with_name(values.name.replace(".values", ""))] = render("kv", "prod", "--values", values)
    return manifests_by_path


def main(arguments: Sequence[str]) -> None:
    """Write the files."""
    assert not arguments, "there are no arguments"
    for path, text in manifests().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
