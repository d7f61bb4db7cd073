"""What the hooks of the documentation site make of a page."""

from __future__ import annotations

import pytest

from tools.docs_site import links_to_repository, separate_blocks


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("text\n- one\n- two\n", "text\n\n- one\n- two\n"),
        ("text\n1. one\n2. two\n", "text\n\n1. one\n2. two\n"),
        ("- one\n  goes on\n- two\n", "- one\n  goes on\n- two\n"),
        ("text\n| a |\n|---|\n", "text\n\n| a |\n|---|\n"),
        ("```\ntext\n- not a list\n```\n", "```\ntext\n- not a list\n```\n"),
        ("text\n\n- one\n", "text\n\n- one\n"),
    ],
)
def test_lists_and_tables_are_apart_from_paragraphs(written: str, read: str) -> None:
    assert separate_blocks(written) == read


def test_links_out_of_the_site_lead_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address of the repository they name the file."""
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
