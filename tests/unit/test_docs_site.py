"""The hooks of the documentation site change pages as mkdocs needs them."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from tools import docs_extensions, docs_reference
from tools.docs_docstrings import without_markers
from tools.docs_site import links_to_repository, separate_blocks, with_generated


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("text\n- one\n- two\n", "text\n\n- one\n- two\n"),
        ("text\n1. one\n2. two\n", "text\n\n1. one\n2. two\n"),
        ("- one\n  goes on\n- two\n", "- one\n  goes on\n- two\n"),
        ("text\n| a |\n|---|\n", "text\n\n| a |\n|---|\n"),
        ("```\ntext\n- not a list\n```\n", "```\ntext\n- not a list\n```\n"),
        ("text\n\n- one\n", "text\n\n- one\n"),
    ],
)
def test_lists_and_tables_are_separated_from_paragraphs(source: str, expected: str) -> None:
    assert separate_blocks(source) == expected


def test_links_to_files_outside_of_the_site_point_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address of the repository, the name of the file replaces the link."""
    text = "[Kubernetes](../../deploy/README.md#helm), [streams](../concepts/stream.md), [home](https://example.com/a.md)"
    monkeypatch.delenv("KVEVENTS_REPOSITORY", raising=False)
    assert links_to_repository(text, "guides/a.md") == text.replace(
        "[Kubernetes](../../deploy/README.md#helm)", "Kubernetes (`deploy/README.md`)"
    )
    monkeypatch.setenv("KVEVENTS_REPOSITORY", "https://forge.example/kv")
    assert "[Kubernetes](https://forge.example/kv/blob/main/deploy/README.md#helm)" in links_to_repository(text, "guides/a.md")


def test_a_link_to_a_missing_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/guides/a\.md links to deploy/none\.md, which does not exist"):
        links_to_repository("[x](../../deploy/none.md)", "guides/a.md")


def test_generated_parts_replace_their_marker() -> None:
    text = with_generated("before\n<!-- generated: dialects -->\nafter\n")
    assert text.startswith("before\n| engine | from release |")
    assert "| vllm | 0.24.0 | array of maps |" in text
    with pytest.raises(KeyError):
        with_generated("<!-- generated: nothing -->\n")


def test_the_reference_names_every_setting_and_every_endpoint() -> None:
    """A setting has its option, variable, default and range; an endpoint has its types."""
    row = "| `limits.max_tokens` | `--limits-max-tokens` | `KVEVENTS_SERVE_LIMITS_MAX_TOKENS` |"
    settings = docs_reference.settings()
    assert row in settings
    assert [line for line in settings.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []
    endpoints = docs_reference.http()
    assert "### POST /v1/match\n" in endpoints
    assert "\n### MatchAnswer\n" in endpoints
    assert "### kvevents sim compare\n\n```text\nusage: kvevents sim compare" in docs_reference.commands()


def test_the_public_modules_exist_and_have_a_docstring() -> None:
    """Modules without `__all__` consist only of types, which are all public."""
    for module in docs_reference.API:
        found = import_module(module)
        assert found.__doc__
        assert hasattr(found, "__all__") or module in {"kvevents.client.schemas", "kvevents.errors"}


def test_literal_blocks_of_docstrings_become_markdown_blocks() -> None:
    assert without_markers("What it is.\n\n::\n\n    a = 1\n\nCall it:: or so, as in::\n\n    b\n") == (
        "What it is.\n\n    a = 1\n\nCall it:: or so, as in:\n\n    b\n"
    )


def test_every_abstract_class_of_a_public_module_is_an_extension_point() -> None:
    """So is every protocol. Those that users do not call are only on the page of extension points."""
    public = [(module, name) for module in docs_reference.API for name in getattr(import_module(module), "__all__", ())]
    values = {name: getattr(import_module(module), name) for module, name in public}
    abstract = {name for name, value in values.items() if inspect.isabstract(value) or getattr(value, "_is_protocol", False)}
    assert abstract == {point.name for point in docs_extensions.PUBLIC}
    text = with_generated("<!-- generated: extension_points -->\n<!-- generated: internal_extension_points -->\n")
    for name in ("kvevents.routing.Policy", "kvevents.subscriber.Sink", "kvevents.service.discovery.provider.Provider"):
        assert f"(#{name})" in text
        assert f"\n::: {name}\n" in text
    assert "(api/kvevents.publisher.md#kvevents.publisher.EventPublisher)" in text
    assert 'filters: ["!^_", "!^(Policy)$"]' in docs_reference.api_pages()["reference/api/kvevents.routing.md"]
