"""vLLM's own tests of its events, with `kvevents.compat.vllm` in the place of `vllm.distributed.kv_events`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from tools.released import CHECKOUT

SECONDS: Final = 300.0
_TESTS: Final = ("test_events.py", "test_kv_cache_events.py", "conftest.py")
_PLUGIN: Final = """
import importlib.util, logging, os, pathlib, sys, types
from kvevents.compat import vllm as compat

def add(name, **names):
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module
    return module

add("vllm", envs=add("vllm.envs"))
add("vllm.config")
add("vllm.distributed", kv_events=compat)
add("vllm.utils")
add("vllm.logger", init_logger=logging.getLogger)
sys.modules["vllm.config.kv_events"] = sys.modules["vllm.distributed.kv_events"] = compat
for name in ("psutil", "urllib3", "urllib3.util"):
    if importlib.util.find_spec(name.partition(".")[0]) is None or name in sys.modules:
        add(name, Process=object)
if not hasattr(sys.modules.get("urllib3.util"), "parse_url") and isinstance(sys.modules.get("urllib3"), types.ModuleType):
    from urllib.parse import urlsplit

    def parse_url(text):
        found = urlsplit(text)
        host = found.netloc.rpartition(":")[0] if ":" in found.netloc.rpartition("]")[2] else found.netloc
        return types.SimpleNamespace(scheme=found.scheme, host=host, port=found.port, path=found.path)

    sys.modules["urllib3.util"].parse_url = parse_url
path = pathlib.Path(os.environ["VLLM_SOURCE"]) / "vllm" / "utils" / "network_utils.py"
spec = importlib.util.spec_from_file_location("vllm.utils.network_utils", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
"""
"""A pytest plugin with the modules that the tests import, and vLLM's own `network_utils`."""


class Outcome(NamedTuple):
    """The status of pytest, and the last line that it printed."""

    status: int
    summary: str


def run_own_tests(folder: Path) -> Outcome:
    """Run the tests of a source distribution in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        tests = Path(name) / "own"
        tests.mkdir()
        (tests / "__init__.py").touch()
        for each in _TESTS:
            shutil.copy(folder / "tests" / "distributed" / each, tests)
        (Path(name) / "own_modules.py").write_text(_PLUGIN, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "own_modules", "-p", "no:cacheprovider", "-W", "ignore", "own"],
            cwd=name,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((name, str(CHECKOUT / "src"))), "VLLM_SOURCE": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
    return Outcome(done.returncode, (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2])
