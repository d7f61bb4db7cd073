"""A real Chromium, controlled over the DevTools protocol, for tests of the service's page.

`--remote-debugging-pipe` uses the protocol over two inherited file descriptors, as JSON that ends in a NUL. That needs no
WebSocket client, no port that another process could take, and no wait until a port is open.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

SECONDS: Final = 60.0
"""Deadline of every wait. Only a failing test waits that long."""
FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers give /dev/shm 64 MB
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_READ_FROM: Final = 3
_WRITE_TO: Final = 4
"""The descriptors at which Chromium expects the pipe."""
_LOWEST_DESCRIPTOR: Final = 16
"""The lowest number of our descriptors: a lower one could be the target of another one."""


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


class Chromium:
    """One browser process with one page; a context manager."""

    def __init__(self) -> None:
        self.console: list[str] = []
        """Errors and warnings that the page has logged, with exceptions and violations of its security policy."""
        self.requested_urls: list[str] = []
        """Every URL that the page has requested."""
        self.dialogs: list[str] = []
        """Messages that scripts have shown by `alert`, `confirm` or `prompt`."""
        self._calls = 0
        self._session: str | None = None
        self._buffer = b""

    def __enter__(self) -> Self:
        path = find_chromium()
        assert path, "no Chromium is installed"
        with ExitStack() as undo:
            self._home = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)))
            self._launch(path, undo)
            undo.callback(self._end)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()

    def _launch(self, path: str, undo: ExitStack) -> None:
        theirs_in, self._in = _pipe()
        self._out, theirs_out = _pipe()
        for ours in (self._in, self._out):
            undo.callback(os.close, ours)
        log = str(self._home / "stderr")
        # Not by subprocess: it cannot change the numbers of a child's descriptors without code between fork and exec.
        self._pid = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={self._home / 'profile'}"],
            os.environ | {"HOME": str(self._home)},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, _READ_FROM),
                (os.POSIX_SPAWN_DUP2, theirs_out, _WRITE_TO),
                (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o600),
            ],
            setpgroup=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def _end(self) -> None:
        """Request the end of the browser and of its processes in other sessions, then kill what has not ended."""
        self._session = None
        with suppress(AssertionError, OSError):
            self.call("Browser.close")
            while True:  # until the pipe breaks because the browser has ended
                self._receive(monotonic() + SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    # --- the protocol ------------------------------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result. Events that arrive before the result are recorded."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        until = monotonic() + SECONDS
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._record_event(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            # Not select(), which accepts no descriptor above 1,023.
            poll = select.poll()
            poll.register(self._out, select.POLLIN)
            ready = poll.poll(max(0.0, until - monotonic()) * 1000)
            assert ready, f"Chromium has not answered for {SECONDS:g} seconds"
            chunk = os.read(self._out, 1 << 16)
            assert chunk, "Chromium ended: " + (self._home / "stderr").read_text(errors="replace")[-2000:]
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _record_event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested_urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.console.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.console.append(f"{params['entry']['text']} ({params['entry'].get('url', '')})")
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])

    # --- the page ----------------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Open a page and wait until its documents and scripts are loaded."""
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.wait("document.readyState === 'complete'")

    def block(self, *patterns: str) -> None:
        """Block requests for these URL patterns until the next call."""
        self.call("Network.setBlockedURLs", urls=patterns)

    def reset(self) -> None:
        """Unblock all requests, and remove everything that was recorded."""
        self.block()
        for records in (self.console, self.requested_urls, self.dialogs):
            records.clear()

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page. A promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value. The page evaluates it every 20 ms."""
        found = self.run(
            f"""new Promise(found => {{
              const until = Date.now() + {(SECONDS - 5) * 1000};
              (function look() {{
                let value = null;
                try {{ value = {condition}; }} catch (error) {{ if (Date.now() > until) throw error; }}
                if (value || Date.now() > until) found(value); else setTimeout(look, 20);
              }})();
            }})"""
        )
        assert found, f"not true after {SECONDS - 5:g} seconds: {condition}\n{self.run('document.body.innerText')}"
        return found

    def type_into(self, selector: str, text: str) -> None:
        """Focus a field and replace its text."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key such as `Enter` or `Tab`."""
        codes = {"Enter": 13, "Tab": 9, " ": 32}
        more = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes[key], **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def set_viewport(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features: Sequence[dict[str, str]] = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)


def _pipe() -> tuple[int, int]:
    """Return the read and the write end of a pipe, closed in children, with numbers of at least `_LOWEST_DESCRIPTOR`."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LOWEST_DESCRIPTOR) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
