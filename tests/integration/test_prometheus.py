"""The server of metrics also answers probes, with the reason why one fails."""

from __future__ import annotations

from kvevents.prometheus import Probes, family, serve
from prometheus_probe_cases import ask_probe
from tools.ports import reserve_port


def test_probes_are_answered_beside_the_metrics() -> None:
    """A probe that fails is 503 and says why; every other path has the metrics, as before."""
    faults = {"live": "", "ready": "no server is connected"}
    port = reserve_port()
    probes = Probes(lambda: faults["live"], lambda: faults["ready"])
    end = serve(lambda: [family("some_value", "A value.", 7.0)], port, "127.0.0.1", probes)
    try:
        assert ask_probe(port, "/livez") == (200, "ok")
        assert ask_probe(port, "/readyz") == (503, "no server is connected")
        faults.update(live="it hangs", ready="")
        assert ask_probe(port, "/livez") == (503, "it hangs")
        assert ask_probe(port, "/readyz") == (200, "ok")
        status, text = ask_probe(port, "/metrics")
        assert status == 200
        assert "some_value 7.0" in text
    finally:
        end()
