"""Settings that all tests share."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that no run fails for a change that is not its own. `HYPOTHESIS_PROFILE=quick`, of
# `make unit`, has a third of them. `HYPOTHESIS_PROFILE=explore` looks for new ones, `HYPOTHESIS_SCALE` times as many as each
# property has by itself, and keeps those that failed in `.hypothesis`.
for name in ("same", "quick"):
    settings.register_profile(name, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
SCALES: Final = {"quick": 1 / 3, "explore": float(os.environ.get("HYPOTHESIS_SCALE", "20"))}
"""How many times as many examples as by itself a property has, by profile."""
settings.load_profile(PROFILE)


LONG: Final = frozenset(
    f"test_{name}.py"
    for name in (
        "conform_ours",
        "deploy_runs",
        "docs_blocks",
        "examples",
        "packaging",
        "plane_bridge_servers",
        "plane_chaos",
        "plane_observability",
        "relay_journal_kill",
        "service_restart",
        "service_scale",
        "service_shards",
        "service_shards_processes",
        "sim_defaults",
        "stream_model",
    )
)
"""Files of few tests that take tens of seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files for several processes, and give properties the number of examples of the profile."""
    _begin_with_long_files(items)
    _scale_examples(items)


def _begin_with_long_files(items: list[pytest.Item]) -> None:
    """Sort by files: `LONG` ones first, then those with the most tests.

    xdist itself would begin with the most tests, and one process would still run a long file when the others are idle.
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG, -tests[item.path], item.path))


def _scale_examples(items: list[pytest.Item]) -> None:
    """Scale the number of examples of each property, also if it has a number of its own.

    Hypothesis has no setting for it: what `@settings(max_examples=...)` says counts more than the profile.
    """
    scale = SCALES.get(PROFILE)
    if scale is None:
        return
    scaled: set[Any] = set()
    for item in items:
        function: Any = getattr(item, "function", None)
        if not getattr(function, "is_hypothesis_test", False):
            continue
        machine: Any = getattr(item, "cls", None)
        if isinstance(getattr(machine, "settings", None), settings):  # the TestCase of a state machine
            if machine not in scaled:
                machine.settings = _scaled(machine.settings, scale)
            scaled.add(machine)
        else:
            if function not in scaled:  # of several parameters there is one function
                function._hypothesis_internal_use_settings = _scaled(function._hypothesis_internal_use_settings, scale)
            scaled.add(function)


def _scaled(before: settings, scale: float) -> settings:
    return settings(before, max_examples=max(1, round(before.max_examples * scale)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The files in which most of the time went, set-up included; of several processes all together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section(f"slowest 10 of {len(seconds)} files, {sum(seconds.values()):.0f} s in all")
        for file, each in sorted(seconds.items(), key=lambda pair: -pair[1])[:10]:
            terminalreporter.line(f"{each:7.2f}s {file}")
