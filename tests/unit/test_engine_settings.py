"""The settings of the plugins, from `KVEVENTS_PUBLISHER`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvevents.engines.plugin import VARIABLE, EngineSettings, may_configure_keys, read_settings
from kvevents.errors import ConfigError


def parse_settings(text: str) -> EngineSettings:
    found = read_settings({VARIABLE: text})
    assert found is not None
    return found


def test_nothing_is_asked_for_without_the_variable() -> None:
    assert read_settings({}) is read_settings({VARIABLE: " "}) is read_settings({VARIABLE: "off"}) is None
    assert parse_settings("on") == parse_settings("{}") == EngineSettings()


def test_words_for_on_and_off_are_no_files() -> None:
    """A file that cannot be read leaves the engine without events, since it might have keys."""
    assert [read_settings({VARIABLE: text}) for text in ("0", "false", "No", "OFF")] == [None] * 4
    assert [parse_settings(text) for text in ("1", "true", "Yes", "ON")] == [EngineSettings()] * 4
    assert not any(may_configure_keys({VARIABLE: text}) for text in ("0", "false", "no", "1", "true", "yes"))


def test_settings_that_may_be_about_keys_are_recognised(tmp_path: Path) -> None:
    """A file that cannot be read might have keys."""
    path = tmp_path / "publisher.toml"
    for text, expected in (
        ("on", False),
        ("", False),
        ('{"heartbeat": "soon"}', False),
        ('{"curv": {}}', True),
        ('{"key_file": ', True),
        ("/nowhere.toml", True),
    ):
        assert may_configure_keys({VARIABLE: text}) is expected
    for content in ("heartbeat = 5\n", "[curve]\n"):
        path.write_text(content)
        assert may_configure_keys({VARIABLE: str(path)}) is (content != "heartbeat = 5\n")


def test_json_sets_fields_at_any_depth() -> None:
    found = parse_settings('{"heartbeat": 1, "attestation": false, "limits": {"burst": 8, "buffer": {"max_bytes": 1000}}}')
    assert (found.heartbeat, found.attestation, found.compact) == (1.0, False, True)
    assert parse_settings('{"heartbeat": null}').heartbeat is None  # for consumers that reject unknown fields
    assert (found.limits.burst, found.limits.buffer.max_bytes) == (8, 1000)
    assert found.limits.buffer.group_size == EngineSettings().limits.buffer.group_size


def test_text_that_is_not_json_names_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "publisher.toml"
    path.write_text("attestation = false\n[limits.buffer]\nmax_bytes = 1000\n")
    found = parse_settings(str(path))
    assert not found.attestation
    assert found.limits.buffer.max_bytes == 1000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "KVEVENTS_PUBLISHER is not a JSON object"),
        ("[1]", "cannot read"),
        ("/nowhere.toml", "cannot read /nowhere.toml: No such file"),
        ('{"heartbeats": 1}', "unknown field 'heartbeats'; did you mean 'heartbeat'"),
        ('{"heartbeat": 0}', "heartbeat is 0.0; it must be above 0"),
        ('{"heartbeat": "5"}', "heartbeat"),
        ('{"limits": {"bursts": 1}}', "limits: unknown field 'bursts'; did you mean 'burst'"),
        ('{"limits": {"buffer": {"max_byte": 1}}}', "limits.buffer: unknown field 'max_byte'; did you mean 'max_bytes'"),
        ('{"limits": 5}', "limits"),
        ('{"limits": {"burst": 0}}', "limits.burst is 0; it must be at least 1"),
        ('{"limits": {"replay": {"idle_wait": -1}}}', "limits.replay.idle_wait is -1.0; it must be above 0"),
        ('{"curve": {}}', "curve needs key_file"),
    ],
)
def test_an_error_names_the_wrong_setting(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(";", ".?")):
        parse_settings(text)
