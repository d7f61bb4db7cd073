"""The service's page works in a real Chromium, against a real `kvevents serve` and real events.

Only the user is simulated: the publishers are ours, on sockets, and the browser is Debian's.
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
from publisher_cases import ANY, run_publisher
from service_cases import wait_for
from tools.ports import reserve_port

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed; tools/setup installs Debian's")
MODEL = "tiny"
BLOCK = 16
SIZES = [(1400, 900), (360, 780)]
HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "\"'><svg onload=alert(3)>",
    "{{nonce}}",
    "a" * 500,
)


@pytest.fixture(scope="module", name="browser")
def start_browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture(name="page")
def clean_page(browser: Chromium) -> Iterator[Chromium]:
    """Yield a wide, light window without a page; afterwards check that no dialog was opened and no other host was contacted."""
    browser.set_viewport(*SIZES[0])
    browser.reset()
    yield browser
    browser.open("about:blank")
    assert browser.dialogs == []
    assert {urlsplit(url).hostname for url in browser.requested_urls} <= {"127.0.0.1", None}
    assert {urlsplit(url).scheme for url in browser.requested_urls} <= {"http", "data", "about"}


@contextmanager
def serving(*args: object) -> Iterator[tuple[Program, str]]:
    """Yield a service at a port of its choice, and its URL."""
    with Program("serve", "--port", 0, *args) as program:
        line = program.err.wait("listening at http")
        found = re.search(r"http://\S+", line)
        assert found
        yield program, found[0]


def worker_options(publisher: ZmqEventPublisher, name: str = "engine-0") -> tuple[object, ...]:
    return "--model", MODEL, "--block-size", BLOCK, "--worker", f"{name}={publisher.endpoint},{publisher.replay_endpoint}"


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return a service's answer to GET, or to POST with a body."""
    content = None if body is None else json.dumps(body).encode()
    request = Request(url + path, content, {"Content-Type": "application/json"})  # noqa: S310 - our own service
    with urlopen(request, timeout=20) as answer:  # noqa: S310
        return json.load(answer)


def store_event(first: int, blocks: int, medium: str = "GPU") -> EventBatch:
    """Return an event that stores blocks `first` and so on of one prompt, whose tokens are 0, 1, 2 ..."""
    hashes = [number + 1 for number in range(first, first + blocks)]
    tokens = list(range(first * BLOCK, (first + blocks) * BLOCK))
    return EventBatch(time(), [BlockStored(hashes, first or None, tokens, BLOCK, medium=medium)])


def cell_script(selector: str, instance: str = "engine-0") -> str:
    """Return a script that returns the text of a cell in the row of an engine."""
    row = f"find(row => row.querySelector('bdi')?.textContent === {json.dumps(instance)})"
    return f"[...document.querySelectorAll('#fleet tbody tr')].{row}?.querySelector({json.dumps(selector)})?.textContent"


EMPTY = EventBatch(0.0, [])
TRUST, REASON, BLOCKS = ".why .trust", ".why", "[data-label=Blocks]"


def text_script(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).textContent"


def texts_script(selector: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.textContent)"


def is_visible_script(selector: str) -> str:
    """Return a script that returns whether an element is visible."""
    return f"!document.querySelector({json.dumps(selector)}).hidden"


def wait_until_exact(page: Chromium, publish: Callable[[], object]) -> None:
    """Wait until the engine's row is EXACT; a live batch of the engine confirms what was replayed.

    The page shows the state before that, so that it announces a change. Then the engine publishes until it is EXACT, since a
    batch that it sends before it knows the subscription is replayed as well.
    """
    page.wait(f"/^(EXACT|DEGRADED)$/.test({cell_script(TRUST)})")

    def is_exact() -> bool:
        publish()
        return bool(page.run(f"{cell_script(TRUST)} === 'EXACT'"))

    wait_for("the engine's row to be EXACT", is_exact)


def console_errors(page: Chromium, *, expected: str = r"503 .*/readyz") -> list[str]:
    """Return the errors in the browser's log. It logs every status except 2xx; `/readyz` is 503 until a service is ready."""
    return [line for line in page.console if not re.search(expected, line)]


def test_the_table_follows_an_engine(page: Chromium) -> None:
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        page.open(url)
        engine.publish(store_event(0, 4))
        wait_until_exact(page, lambda: engine.publish(EMPTY))
        page.wait(f"{cell_script(TRUST)} === 'EXACT' && {cell_script(BLOCKS)} === '4'")
        engine.publish(store_event(4, 3))
        page.wait(f"{cell_script(BLOCKS)} === '7'")
        page.wait(f"{text_script('#blocks')} === '7' && {text_script('#workers-more')} === '1 of 1 source EXACT'")
        page.wait(f"{text_script('#ready')} === 'READY'")
        page.wait("document.title.startsWith('1/1 exact') && document.querySelectorAll('#chart-blocks .curve').length === 1")
        assert console_errors(page) == []


def test_a_row_shows_tiers_and_a_wrong_block_size(page: Chromium) -> None:
    with (
        run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine,
        serving(*worker_options(engine), "--block-size", 32) as (_, url),
    ):
        engine.publish(store_event(0, 4))
        engine.publish(store_event(4, 1, medium="CPU"))
        page.open(url)
        page.wait("document.querySelectorAll('#tiers li').length === 2")
        assert page.run(texts_script("#tiers .label")) == ["gpu4 80 %", "cpu1 20 %"]
        page.run("document.querySelector('.toggle').click()")
        page.wait(f"/32 declared, 16 seen/.test({text_script('tr.detail .bad-text')})")
        page.wait(f"{cell_script(TRUST)} === 'DEGRADED'")


def test_the_event_stream_updates_the_page_without_polling(page: Chromium) -> None:
    """The page cannot poll here: polling would show the change too, seconds later."""
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        page.open(url)
        wait_until_exact(page, lambda: engine.publish(EMPTY))
        page.block("*/v1/sources*")
        engine.publish(store_event(0, 2))
        page.wait(f"{cell_script(BLOCKS)} === '2'")


def test_the_prompt_box_shows_how_much_each_worker_holds_on_which_tier(page: Chromium) -> None:
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        engine.publish(store_event(0, 2))
        engine.publish(store_event(2, 1, medium="CPU"))
        page.open(url)
        wait_until_exact(page, lambda: engine.publish(EMPTY))
        page.wait(f"{cell_script(BLOCKS)} === '3' && document.querySelector('#model').value === '{MODEL}'")
        page.type_into("#tokens", json.dumps(list(range(64))))
        assert page.run(text_script("#token-count")) == "64 token ids"
        page.run("document.querySelector('#prompt button').focus()")
        page.press("Enter")
        page.wait(f"{text_script('#found .held')} === '48 tokens, 75 %'")
        assert page.run(text_script("#found .trust")) == "EXACT"
        assert page.run(texts_script("#found .key")) == ["gpu 32", "cpu 16"]
        widths = "[...document.querySelectorAll('#found .bar > span')].map(part => part.style.width)"
        assert page.run(widths) == ["50%", "25%"]
        assert console_errors(page) == []


def test_selections_are_explained(page: Chromium) -> None:
    """The newest selection names the chosen worker, and opens with the parts of its score."""
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        page.open(url)
        engine.publish(store_event(0, 4))
        wait_until_exact(page, lambda: engine.publish(EMPTY))
        assert not page.run(is_visible_script("#choices-part"))
        ask(url, "/v1/select", {"model": MODEL, "tokens": list(range(4 * BLOCK + 1))})
        page.wait(f"{is_visible_script('#choices-part')} && {text_script('#choices summary bdi')} === 'engine-0 rank 0'")
        page.run("document.querySelector('#choices summary').click()")
        page.wait("document.querySelector('#choices details').open")
        assert "holds 64 of 65 tokens" in page.run(text_script("#choices p"))
        assert page.run(text_script("#choices li li small")).startswith("score 0.0")
        assert console_errors(page) == []


def test_a_killed_publisher_turns_its_row_stale(page: Chromium) -> None:
    with Program("publish", "--endpoint", ANY, "--replay", ANY, "--linger") as engine:
        live, replay = publishing_at(engine)
        with serving("--model", MODEL, "--worker", f"engine-0={live},{replay}") as (_, url):
            page.open(url)
            wait_until_exact(page, lambda: engine.write(b'{"events": []}'))
            page.wait(
                f"/is EXACT|have changed/.test({text_script('#said')})"
            )  # several changes are announced together, up to three singly
            engine.process.kill()
            page.wait(
                f"{cell_script(TRUST)} === 'STALE' && /disconnected.*check that the engine runs/.test({cell_script(REASON)})"
            )
            page.wait(f"/engine-0 rank 0 is STALE/.test({text_script('#said')})")
            page.wait(f"/EXACT → STALE/.test({text_script('#log li')})")
            assert console_errors(page) == []


def test_restarts_are_those_of_the_source(page: Chromium) -> None:
    """A source that is new has none, whatever happened to others."""
    place = {name: f"tcp://127.0.0.1:{reserve_port()}" for name in ("endpoint", "replay_endpoint")}
    with serving() as (_, url):
        page.open(url)
        for restarts in ("0", "1"):
            with run_publisher(**place, bind=True) as publisher:
                ask(url, "/register", {"instance_id": "engine-0", "model_name": MODEL, **place})
                publisher.publish(store_event(0, 2 + int(restarts)))
                page.wait(f"{cell_script(BLOCKS)} === '{2 + int(restarts)}'")
                page.wait(f"{cell_script('[data-label=Restarts]')} === '{restarts}'")
        ask(url, "/unregister", {"instance_id": "engine-0"})
        ask(url, "/register", {"instance_id": "engine-1", "model_name": MODEL, **place})
        page.wait(f"{cell_script('[data-label=Restarts]', 'engine-1')} === '0'")


def test_names_with_markup_are_shown_as_text(page: Chromium) -> None:
    with serving() as (_, url):
        for number, name in enumerate(HOSTILE_NAMES):
            body = {
                "instance_id": name,
                "model_name": HOSTILE_NAMES[number % 2],
                "tenant_id": name,
                "endpoint": "tcp://127.0.0.1:1",
            }
            ask(url, "/register", body)
        page.open(url)
        for name in HOSTILE_NAMES:
            page.wait(f"{cell_script('bdi', name)} === {json.dumps(name)}")
        page.run("document.querySelectorAll('.toggle').forEach(toggle => toggle.click())")
        page.type_into("#model", HOSTILE_NAMES[1])
        page.type_into("#tokens", "1 2 <img src=x onerror=alert(4)>")
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait(f'/Item 3, "<img", is no token id/.test({text_script("#found .problem")})')
        page.wait("document.querySelector('#models').options.length === 2")
        assert page.run("document.querySelectorAll('main img, main script, main svg:not(.spark, .chart)').length") == 0
        assert console_errors(page) == []
        assert find_overflow(page) == {}


def test_an_error_is_shown_with_its_message_and_its_hint(page: Chromium) -> None:
    with serving() as (_, url):
        page.open(url)
        page.wait(f"{is_visible_script('#fleet-none')} && /^No source is registered/.test({text_script('#fleet-none')})")
        page.type_into("#model", MODEL)
        page.type_into("#tenant", "x" * 600)
        page.type_into("#tokens", "1, 2, 3")
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait("document.querySelector('#found .problem') !== null")
        assert "tenant" in page.run(text_script("#found .problem"))
        assert page.run(text_script("#found small"))


def test_a_row_opens_by_keyboard_and_the_filter_hides_it(page: Chromium) -> None:
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        engine.publish(store_event(0, 1))
        page.open(url)
        page.wait(f"{cell_script(BLOCKS)} === '1'")
        page.run("document.querySelector('.toggle').focus()")
        page.press("Enter")
        assert engine.endpoint in page.wait("document.querySelector('tr.detail')?.innerText")
        assert page.run("document.querySelector('.toggle').ariaExpanded") == "true"
        page.type_into("#filter", "another")
        page.wait(f"{text_script('#fleet-count')} === '0 of 1 source' && document.querySelector('tr.detail').hidden")
        page.run("document.querySelector('#fleet thead th:nth-child(5) button').click()")
        assert page.run("document.querySelector('#fleet thead th:nth-child(5)').ariaSort") == "descending"


def test_an_engine_is_registered_drained_and_unregistered(page: Chromium) -> None:
    """Selections leave a drained engine out, and choose it again afterwards."""

    def is_usable() -> bool:
        return bool(ask(url, "/v1/select", {"model": MODEL, "tokens": [1, 2, 3]})["usable"])

    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving() as (_, url):
        engine.publish(store_event(0, 2))
        page.open(url)
        page.run("document.querySelector('#register-part summary').click()")
        fields = {"instance_id": "engine-0", "endpoint": "tcp://nowhere", "model_name": MODEL, "block_size": str(BLOCK)}
        for name, value in fields.items():
            page.type_into(f"#register [name={name}]", value)
        page.press("Enter")
        page.wait(f"/^invalid endpoint 'tcp:..nowhere'/.test({text_script('#register-said')})")
        page.type_into("#register [name=replay_endpoint]", str(engine.replay_endpoint))
        page.type_into("#register [name=endpoint]", engine.endpoint)
        page.press("Enter")
        page.wait(f"{text_script('#register-said')} === 'engine-0 is registered.'")
        page.wait(f"{cell_script(BLOCKS)} === '2'")
        page.run("document.querySelector('.toggle').click()")
        drain, unregister = (f"document.querySelector('tr.detail button:nth-of-type({number})')" for number in (1, 2))
        assert is_usable()
        page.run(f"{drain}.click()")
        page.wait(f"{drain}.textContent === 'End draining' && {cell_script(REASON)}.includes('selections leave it out')")
        assert not is_usable()
        page.run(f"{drain}.click()")
        page.wait(f"{drain}.textContent === 'Drain' && !{cell_script(REASON)}.includes('selections leave it out')")
        assert is_usable()
        page.run(f"{unregister}.click()")
        page.wait(f"{unregister}.textContent === 'Unregister and drop its blocks'")
        page.run(f"{unregister}.click()")
        page.wait(is_visible_script("#fleet-none"))
        assert ask(url, "/v1/sources")["sources"] == []
        assert console_errors(page, expected=r"503 .*/readyz|400 .*/register") == []


def test_actions_need_a_token_that_permits_them_and_an_engine_that_a_client_registered(page: Chromium, tmp_path: Path) -> None:
    token = "correct-horse-battery-staple"  # noqa: S105 - of this test
    config = tmp_path / "fleet.toml"
    config.write_text(f'[[access.tokens]]\nrole = "read"\ntoken = "{token}"\n')
    with (
        run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine,
        serving("--config", config, *worker_options(engine)) as (_, url),
    ):
        page.open(url)
        page.wait(is_visible_script("#locked"))
        page.type_into("#token", token)
        page.press("Enter")
        page.wait("document.querySelector('.toggle') !== null")
        page.run("document.querySelector('.toggle').click()")
        assert page.run("document.querySelector('tr.detail button:nth-of-type(2)').hidden")
        page.run("document.querySelector('tr.detail button').click()")
        page.wait("document.querySelector('tr.detail output').textContent.includes('does not have the required role')")


def test_the_page_shows_when_the_connection_was_lost_and_reconnects(page: Chromium) -> None:
    port = reserve_port()
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine:
        engine.publish(store_event(0, 2))
        with Program("serve", "--port", port, *worker_options(engine)) as service:
            service.err.wait("listening at http")
            page.open(f"http://127.0.0.1:{port}")
            page.wait(f"{cell_script(BLOCKS)} === '2'")
            service.process.kill()
            page.wait(
                f"/^Connection lost since \\d\\d:\\d\\d:\\d\\d: /.test({text_script('#lost')}) && {is_visible_script('#lost')}"
            )
        with Program("serve", "--port", port, *worker_options(engine)) as service:
            service.err.wait("listening at http")
            page.run("document.querySelector('#lost-now').click()")
            page.wait(f"!{is_visible_script('#lost')}")
            engine.publish(store_event(2, 1))
            page.wait(f"{cell_script(BLOCKS)} === '3'")


def test_the_page_prompts_for_a_token_if_the_service_requires_one(page: Chromium, tmp_path: Path) -> None:
    token = "correct-horse-battery-staple"  # noqa: S105 - of this test
    config = tmp_path / "fleet.toml"
    config.write_text(f'[[access.tokens]]\nrole = "read"\ntoken = "{token}"\n')
    with (
        run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine,
        serving("--config", config, *worker_options(engine)) as (_, url),
    ):
        engine.publish(store_event(0, 2))
        page.open(url)
        for attempt in ("a-wrong-token-of-that-length", token):
            page.wait(f"{is_visible_script('#locked')} && document.activeElement.id === 'token'")
            page.type_into("#token", attempt)
            page.press("Enter")
        page.wait(f"{cell_script(BLOCKS)} === '2' && !{is_visible_script('#locked')} && !{is_visible_script('#lost')}")
        engine.publish(store_event(2, 1))
        page.wait(f"{cell_script(BLOCKS)} === '3'")
        page.open(url)
        page.wait(f"{cell_script(BLOCKS)} === '3'")  # the token is stored as long as the tab is open
        assert console_errors(page, expected=r"503 .*/readyz|401 ") == []


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_wide_and_narrow_windows_in_light_and_dark(
    page: Chromium, width: int, height: int, *, dark: bool
) -> None:
    page.set_viewport(width, height, dark=dark)
    with run_publisher(endpoint=ANY, replay_endpoint=ANY) as engine, serving(*worker_options(engine)) as (_, url):
        engine.publish(store_event(0, 4))
        page.open(url)
        page.wait(f"{cell_script(BLOCKS)} === '4'")
        page.run("document.querySelector('.toggle').click()")
        page.type_into("#tokens", " ".join(map(str, range(64))))
        page.run("document.querySelector('#prompt').requestSubmit()")
        page.wait(f"{text_script('#found .held')} === '48 tokens, 75 %'")
        assert find_overflow(page) == {}
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(15, 18, 23)" if dark else "rgb(245, 246, 248)")
        assert console_errors(page) == []


def find_overflow(page: Chromium) -> dict[str, int]:
    """Return the width of each part of the page, or of the page itself, that is too wide for its window."""
    found: dict[str, int] = page.run(
        """Object.fromEntries([document.documentElement, ...document.querySelectorAll('header, section, figure, form')]
          .filter(part => part.scrollWidth > innerWidth || part.getBoundingClientRect().right > innerWidth)
          .map(part => [part.id || part.tagName, part.scrollWidth]))"""
    )
    return found
