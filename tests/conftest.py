"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

# The default profile, `fixed`, has the same examples in each run, so that a run fails only because of the change that it tests.
# They are a third of those that each property has by itself, and find what breaks ordinary cases. The profile `explore`, which
# `make fuzz` and CI each night use, finds rare cases: it generates new examples, `HYPOTHESIS_SCALE` times as many, and stores
# failing ones in `.hypothesis`.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
SCALE: Final = {"fixed": 1 / 3, "explore": float(os.environ.get("HYPOTHESIS_SCALE", "20"))}[PROFILE]
"""Factor by which the profile multiplies the number of examples of each property."""
settings.load_profile(PROFILE)


LONG_FILES: Final = frozenset(
    f"test_{name}.py"
    for name in (
        "cli_bridge",
        "conform_ours",
        "deploy_runs",
        "docs_blocks",
        "examples",
        "packaging",
        "plane_bridge",
        "plane_bridge_servers",
        "plane_chaos",
        "plane_observability",
        "relay_journal_kill",
        "relay_model",
        "service_replica",
        "service_restart",
        "service_scale",
        "site",
        "stream_model",
    )
)
"""Files with few tests that take tens of seconds."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and let it ignore the modules and the ten thousand tests afterwards.

    Each full collection would take half a second, in each process of xdist: while tests are collected, and in tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files for several processes, and scale the number of examples of properties."""
    _begin_with_long_files(items)
    _scale_examples(items)


def _begin_with_long_files(items: list[pytest.Item]) -> None:
    """Sort by files: those in `LONG_FILES` first, then those with the most tests.

    xdist begins with the files with the most tests, so that one process still runs a long file when the others are idle.
    """
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONG_FILES, -tests[item.path], item.path))


def _scale_examples(items: list[pytest.Item]) -> None:
    """Scale the number of examples of each property, also if the property sets a number.

    Hypothesis has no setting for this: `@settings(max_examples=...)` overrides the profile.
    """
    scaled: set[Any] = set()
    for item in items:
        function: Any = getattr(item, "function", None)
        if not getattr(function, "is_hypothesis_test", False):
            continue
        machine: Any = getattr(item, "cls", None)
        if isinstance(getattr(machine, "settings", None), settings):  # the TestCase of a state machine
            if machine not in scaled:
                machine.settings = _scale_settings(machine.settings)
            scaled.add(machine)
        else:
            if function not in scaled:  # all parametrisations of a test share one function
                function._hypothesis_internal_use_settings = _scale_settings(function._hypothesis_internal_use_settings)
            scaled.add(function)


def _scale_settings(before: settings) -> settings:
    return settings(before, max_examples=max(1, round(before.max_examples * SCALE)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest files, with the time of set-up, as the sum over all processes of xdist."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section(f"slowest 10 of {len(seconds)} files, {sum(seconds.values()):.0f} s in all")
        for file, each in sorted(seconds.items(), key=lambda pair: -pair[1])[:10]:
            terminalreporter.line(f"{each:7.2f}s {file}")
