"""The Hypothesis profile `explore`, which `make fuzz` uses, runs more examples of each property."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import paths

HERE = paths.TESTS
PROPERTIES = """
import atexit, json
from pathlib import Path
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

ran = {"plain": 0, "explicit": 0, "machine": 0}

@pytest.mark.parametrize("name", ["plain", "plain"])
@given(number=st.integers())
def test_plain(name, number):
    ran["plain"] += 1

@settings(max_examples=7)
@given(st.integers())
def test_explicit(number):
    ran["explicit"] += 1

class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        ran["machine"] += 1

    @rule()
    def go(self):
        pass

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=5, stateful_step_count=2)

def test_nothing_of_hypothesis():
    raise AssertionError("it is deselected")

atexit.register(lambda: Path("ran.json").write_text(json.dumps(ran)))
"""


def test_every_property_is_found_and_has_more_examples(tmp_path: Path) -> None:
    """This holds for parametrised properties, state machines and properties with their own settings; other tests do not run."""
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "test_these.py").write_text(PROPERTIES)
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "explore", "HYPOTHESIS_SCALE": "3"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "-p", "no:cacheprovider", "test_these.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "4 passed, 1 deselected" in ended.stdout
    ran = json.loads((tmp_path / "ran.json").read_text())
    assert ran["plain"] == 2 * 300
    assert ran["explicit"] == 21
    assert ran["machine"] >= 15
