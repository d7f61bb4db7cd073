"""The exceptions have one root and separate usage errors, external errors and internal errors. Each is also a built-in type."""

from __future__ import annotations

import inspect
import re

import pytest

from kvevents import errors

ALL = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}


def test_every_exception_has_the_same_root() -> None:
    assert all(issubclass(kind, errors.KVEventsError) for kind in ALL.values())


def test_every_leaf_exception_is_either_a_usage_error_or_an_external_error() -> None:
    leaves = ALL.keys() - {"KVEventsError", "UsageError", "ExternalError", "DamagedIndexError"}
    for name in leaves:
        assert issubclass(ALL[name], errors.UsageError) != issubclass(ALL[name], errors.ExternalError), name


def test_the_tree_in_the_module_docstring_lists_every_exception_and_its_builtin_type() -> None:
    drawn = re.findall(r"── (\w+)\s.*?(?:\((\w+)\))?$", errors.__doc__ or "", re.MULTILINE)
    assert {name for name, _ in drawn} == ALL.keys() - {"KVEventsError"}
    for name, builtin in drawn:
        if builtin:
            assert issubclass(ALL[name], getattr(__import__("builtins"), builtin)), name


@pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
def test_every_exception_has_a_docstring(kind: type[Exception]) -> None:
    assert kind.__doc__
    assert str(kind("what happened; what to do")) == "what happened; what to do"
