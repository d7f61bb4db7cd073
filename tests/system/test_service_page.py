"""The service's page in a real Chromium, against a real `kvevents serve` and real events.

Nothing is faked but the hand on the keyboard: publishers are ours, on sockets, and the browser is Debian's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from chromium import Chromium, find_chromium
from cli_cases import Program
from cli_record_cases import serving as publishing_at
from kvevents.events import BlockStored, EventBatch
from kvevents.publisher import ZmqEventPublisher
from ports import quiet_port
from publisher_cases import ANY, publishing

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed; tools/setup installs Debian's"),
    pytest.mark.timeout(180),
]
MODEL = "tiny"
BLOCK = 16
SIZES = [(1400, 900), (360, 780)]
WAYS_OUT = ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "\"'><svg onload=alert(3)>", "{{nonce}}", "a" * 500)


@pytest.fixture(scope="module", name="browser")
def one_browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture(name="page")
def clean_page(browser: Chromium) -> Iterator[Chromium]:
    """The browser with nothing open, wide and light. Afterwards: no script has opened a dialog, and no other host was asked."""
    browser.look(*SIZES[0])
    browser.forget()
    yield browser
    browser.open("about:blank")
    assert browser.dialogs == []
    assert {urlsplit(url).hostname for url in browser.requested} <= {"127.0.0.1", None}
    assert {urlsplit(url).scheme for url in browser.requested} <= {"http", "data", "about"}


@contextmanager
def serving(*args: object) -> Iterator[tuple[Program, str]]:
    """A service at a port of its choice, and its URL."""
    with Program("serve", "--port", 0, *args) as program:
        line = program.err.wait("listening at http")
        found = re.search(r"http://\S+", line)
        assert found
        yield program, found[0]


def worker(publisher: ZmqEventPublisher, name: str = "engine-0") -> tuple[object, ...]:
    return "--model", MODEL, "--block-size", BLOCK, "--worker", f"{name}={publisher.endpoint},{publisher.replay_endpoint}"


def post(url: str, body: dict[str, Any]) -> int:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - our own service
    with urlopen(request, timeout=20) as answer:  # noqa: S310
        return int(answer.status)


def stored(first: int, blocks: int, medium: str = "GPU") -> EventBatch:
    """Blocks `first` and so on of one prompt, whose tokens are 0, 1, 2 ..."""
    hashes = [number + 1 for number in range(first, first + blocks)]
    tokens = list(range(first * BLOCK, (first + blocks) * BLOCK))
    return EventBatch(time(), [BlockStored(hashes, first or None, tokens, BLOCK, medium=medium)])


def cell(selector: str, instance: str = "engine-0") -> str:
    """An expression: the text of a cell in the row of an engine."""
    row = f"find(row => row.querySelector('bdi')?.textContent === {json.dumps(instance)})"
    return f"[...document.querySelectorAll('#fleet tbody tr')].{row}?.querySelector({json.dumps(selector)})?.textContent"


EMPTY = EventBatch(0.0, [])
TRUST, REASON, BLOCKS = ".why .trust", ".why", "[data-label=Blocks]"


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent"


def texts(selector: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.textContent)"


def seen(selector: str) -> str:
    """An expression: whether an element is not hidden."""
    return f"!document.querySelector({json.dumps(selector)}).hidden"


def confirmed(page: Chromium, publish: Callable[[], object]) -> None:
    """Wait until the engine's row is EXACT; the engine's next batch confirms what replay has brought."""
    page.wait(f"/^(EXACT|DEGRADED)$/.test({cell(TRUST)})")
    publish()
    page.wait(f"{cell(TRUST)} === 'EXACT'")


def complaints(page: Chromium, *, but: str = r"503 .*/readyz") -> list[str]:
    """What the browser has logged. It logs every answer that is not 2xx; until a service is ready, `/readyz` gives such."""
    return [line for line in page.console if not re.search(but, line)]


def test_the_table_follows_an_engine(page: Chromium) -> None:
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine)) as (_, url):
        page.open(url)
        engine.publish(stored(0, 4))
        page.wait(f"{cell(TRUST)} === 'EXACT' && {cell(BLOCKS)} === '4'")
        engine.publish(stored(4, 3))
        page.wait(f"{cell(BLOCKS)} === '7'")
        page.wait(f"{text('#blocks')} === '7' && {text('#workers-more')} === '1 of 1 source EXACT'")
        page.wait(f"{text('#ready')} === 'READY'")
        page.wait("document.title.startsWith('1/1 exact') && document.querySelectorAll('#chart-blocks .curve').length === 1")
        assert complaints(page) == []


def test_what_the_index_knows_of_the_engine(page: Chromium) -> None:
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine), "--block-size", 32) as (_, url):
        engine.publish(stored(0, 4))
        engine.publish(stored(4, 1, medium="CPU"))
        page.open(url)
        page.wait("document.querySelectorAll('#tiers li').length === 2")
        assert page.run(texts("#tiers .label")) == ["gpu4 80 %", "cpu1 20 %"]
        page.run("document.querySelector('.toggle').click()")
        page.wait(f"/32 declared, 16 seen/.test({text('tr.detail .bad-text')})")
        page.wait(f"{cell(TRUST)} === 'DEGRADED'")


def test_what_events_bring_needs_no_polling(page: Chromium) -> None:
    """The stream alone: polling would show it too, seconds later, so that is kept from the page."""
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine)) as (_, url):
        page.open(url)
        confirmed(page, lambda: engine.publish(EMPTY))
        page.block("*/v1/sources*")
        engine.publish(stored(0, 2))
        page.wait(f"{cell(BLOCKS)} === '2'")


def test_the_prompt_box_shows_how_much_each_worker_holds_on_which_tier(page: Chromium) -> None:
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine)) as (_, url):
        engine.publish(stored(0, 2))
        engine.publish(stored(2, 1, medium="CPU"))
        page.open(url)
        confirmed(page, lambda: engine.publish(EMPTY))
        page.wait(f"{cell(BLOCKS)} === '3' && document.querySelector('#model').value === '{MODEL}'")
        page.type_into("#tokens", json.dumps(list(range(64))))
        assert page.run(text("#token-count")) == "64 token ids"
        page.run("document.querySelector('#prompt button').focus()")
        page.press("Enter")
        page.wait(f"{text('#found .held')} === '48 tokens, 75 %'")
        assert page.run(text("#found .trust")) == "EXACT"
        assert page.run(texts("#found .key")) == ["gpu 32", "cpu 16"]
        widths = "[...document.querySelectorAll('#found .bar > span')].map(part => part.style.width)"
        assert page.run(widths) == ["50%", "25%"]
        page.wait("document.querySelectorAll('#hot tbody tr').length > 0")
        assert complaints(page) == []


def test_a_killed_publisher_turns_its_row_stale(page: Chromium) -> None:
    with Program("publish", "--endpoint", ANY, "--replay-endpoint", ANY, "--linger") as engine:
        live, replay = publishing_at(engine)
        with serving("--model", MODEL, "--worker", f"engine-0={live},{replay}") as (_, url):
            page.open(url)
            confirmed(page, lambda: engine.write(b'{"events": []}'))
            page.wait(f"/is EXACT|have changed/.test({text('#said')})")  # changes are said together, at most three one by one
            engine.process.kill()
            page.wait(f"{cell(TRUST)} === 'STALE' && /disconnected/.test({cell(REASON)})")
            page.wait(f"/engine-0 rank 0 is STALE/.test({text('#said')})")
            assert "EXACT → STALE" in page.run(text("#log li"))
            assert complaints(page) == []


def test_names_are_text_whatever_they_say(page: Chromium) -> None:
    with serving() as (_, url):
        for number, name in enumerate(WAYS_OUT):
            body = {"instance_id": name, "model_name": WAYS_OUT[number % 2], "tenant_id": name, "endpoint": "tcp://127.0.0.1:1"}
            assert post(f"{url}/register", body) in {200, 201}
        page.open(url)
        for name in WAYS_OUT:
            page.wait(f"{cell('bdi', name)} === {json.dumps(name)}")
        page.run("document.querySelectorAll('.toggle').forEach(toggle => toggle.click())")
        page.type_into("#model", WAYS_OUT[1])
        page.type_into("#tokens", "1 2 <img src=x onerror=alert(4)>")
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait(f'/Item 3, "<img", is no token id/.test({text("#found .problem")})')
        page.wait("document.querySelector('#hot-scope').options.length >= 5")
        assert page.run("document.querySelectorAll('main img, main script, main svg:not(.spark, .chart)').length") == 0
        assert complaints(page) == []
        assert no_overflow(page) == {}


def test_a_problem_is_its_sentence_and_its_hint(page: Chromium) -> None:
    with serving() as (_, url):
        page.open(url)
        page.wait(f"{seen('#fleet-none')} && /^No source is registered/.test({text('#fleet-none')})")
        page.type_into("#model", MODEL)
        page.type_into("#tenant", "x" * 600)
        page.type_into("#tokens", "1, 2, 3")
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait("document.querySelector('#found .problem') !== null")
        assert "tenant" in page.run(text("#found .problem"))
        assert page.run(text("#found small"))


def test_a_row_opens_by_keyboard_and_the_filter_hides_it(page: Chromium) -> None:
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine)) as (_, url):
        engine.publish(stored(0, 1))
        page.open(url)
        page.wait(f"{cell(BLOCKS)} === '1'")
        page.run("document.querySelector('.toggle').focus()")
        page.press("Enter")
        assert engine.endpoint in page.wait("document.querySelector('tr.detail')?.innerText")
        assert page.run("document.querySelector('.toggle').ariaExpanded") == "true"
        page.type_into("#filter", "another")
        page.wait(f"{text('#fleet-count')} === '0 of 1 source' && document.querySelector('tr.detail').hidden")
        page.run("document.querySelector('#fleet thead th:nth-child(5) button').click()")
        assert page.run("document.querySelector('#fleet thead th:nth-child(5)').ariaSort") == "descending"


def test_it_says_since_when_the_service_is_gone_and_comes_back_with_it(page: Chromium) -> None:
    port = quiet_port()
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine:
        engine.publish(stored(0, 2))
        with Program("serve", "--port", port, *worker(engine)) as service:
            service.err.wait("listening at http")
            page.open(f"http://127.0.0.1:{port}")
            page.wait(f"{cell(BLOCKS)} === '2'")
            service.process.kill()
            page.wait(f"/^Connection lost since \\d\\d:\\d\\d:\\d\\d: /.test({text('#lost')}) && {seen('#lost')}")
        with Program("serve", "--port", port, *worker(engine)) as service:
            service.err.wait("listening at http")
            page.run("document.querySelector('#lost-now').click()")
            page.wait(f"!{seen('#lost')}")
            engine.publish(stored(2, 1))
            page.wait(f"{cell(BLOCKS)} === '3'")


def test_it_asks_for_a_token_where_one_is_needed(page: Chromium, tmp_path: Path) -> None:
    token = "correct-horse-battery-staple"  # noqa: S105 - of this test
    config = tmp_path / "fleet.toml"
    config.write_text(f'[[access.tokens]]\nrole = "read"\ntoken = "{token}"\n')
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving("--config", config, *worker(engine)) as (_, url):
        engine.publish(stored(0, 2))
        page.open(url)
        for attempt in ("a-wrong-token-of-that-length", token):
            page.wait(f"{seen('#locked')} && document.activeElement.id === 'token'")
            page.type_into("#token", attempt)
            page.press("Enter")
        page.wait(f"{cell(BLOCKS)} === '2' && !{seen('#locked')} && !{seen('#lost')}")
        engine.publish(stored(2, 1))
        page.wait(f"{cell(BLOCKS)} === '3'")
        page.open(url)
        page.wait(f"{cell(BLOCKS)} === '3'")  # it is kept for as long as the tab is open
        assert complaints(page, but=r"503 .*/readyz|401 ") == []


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_window_and_either_scheme(page: Chromium, width: int, height: int, *, dark: bool) -> None:
    page.look(width, height, dark=dark)
    with publishing(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker(engine)) as (_, url):
        engine.publish(stored(0, 4))
        page.open(url)
        page.wait(f"{cell(BLOCKS)} === '4'")
        page.run("document.querySelector('.toggle').click()")
        page.type_into("#tokens", " ".join(map(str, range(64))))
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait(f"{text('#found .held')} === '48 tokens, 75 %'")
        assert no_overflow(page) == {}
        ground = page.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(15, 18, 23)" if dark else "rgb(245, 246, 248)")
        assert complaints(page) == []


def no_overflow(page: Chromium) -> dict[str, int]:
    """Widths by which the page, or a part of it, is too wide for its window."""
    found: dict[str, int] = page.run(
        """Object.fromEntries([document.documentElement, ...document.querySelectorAll('header, section, figure, form')]
          .filter(part => part.scrollWidth > innerWidth || part.getBoundingClientRect().right > innerWidth)
          .map(part => [part.id || part.tagName, part.scrollWidth]))"""
    )
    return found
