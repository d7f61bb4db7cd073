"""`python -m tools.conform.smg python|rust ARGUMENTS`: `kvevents conform` for SMG 1.13 with either of its servicers.

SMG (Shepherd Model Gateway) reads events by gRPC from a servicer in the process of each engine, which reads the engine's ZeroMQ
sockets on loopback. `smg_workers.py` plays the engines around the released servicers; a restart of an engine restarts its
servicer too. SMG reports the ranks of a worker without complete events, and stalls, as metrics, and its state in `/workers`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvevents.cli import main
from kvevents.cli.conform import DRIVERS
from kvevents.conform.router_target import MODEL, Control, PlayedWorker, Ports, RouterDriver, RouterTarget, RouterWorker
from kvevents.conform.scenario import Scenario
from kvevents.conform.target import EngineRegistration, Program, TargetError, install_package, is_open, request, wait_until
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT

SMG: Final = ("smg", "1.13.0")
SERVICERS: Final = ("smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28", "msgspec", "pyzmq")
NUMBERS: Final = 41_000
"""Words of the tokenizer that are numbers; the names of workers follow."""
START_SECONDS: Final = 30.0
FEED_SECONDS: Final = 5.0
REPORTS: Final = re.compile(r"^(smg_kv_event_degraded_ranks|smg_worker_stalled)\{(.*)\} (\S+)$", re.MULTILINE)


def write_tokenizer(folder: Path, names: Sequence[str]) -> None:
    """Write a tokenizer whose words are the numbers of token ids, and the workers' names, which are their answers."""
    words = [*map(str, range(NUMBERS)), *names, "<unk>", "<s>", "</s>"]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"}
    parts: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = {"version": "1.0", "added_tokens": [], **parts, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "chat_template": template}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(words)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": len(words) - 1, "bos_token_id": len(words) - 2}))


class SmgWorker:
    """One engine with its servicer; all engines of a scenario run in one process."""

    def __init__(self, name: str, port: int, program: Program) -> None:
        self._name = name
        self._port = port
        self._program = program
        self.url: Final = f"grpc://127.0.0.1:{port}"

    @property
    def is_open(self) -> bool:
        """Whether the servicer accepts connections."""
        return is_open(f"tcp://127.0.0.1:{self._port}")

    def command(self, word: str) -> None:
        """Let the process stop or start this worker, and wait until it has."""
        self._program.feed(f"{word} {self._name}\n".encode(), FEED_SECONDS)
        wait_until(lambda: self.is_open == (word == "start"), START_SECONDS)

    def close(self) -> None:
        """End the servicer."""
        with suppress(TargetError):
            self.command("stop")


class SmgTarget(RouterTarget):
    """The gateway."""

    def __init__(
        self, program: Program, ports: Ports, workers: Mapping[str, PlayedWorker], control: Control, block_size: int
    ) -> None:
        super().__init__(program, ports, workers, control, block_size)
        self._metrics = f"http://127.0.0.1:{ports.metrics}/metrics"
        self._names = {worker.url: name for name, worker in workers.items()}

    def _start(self) -> None:
        super()._start()
        wait_until(lambda: len(self._listed()) == len(self._workers), START_SECONDS)

    def _listed(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (request(f"{self._program.url}/workers").json or {}).get("workers", [])
        return workers

    @contextmanager
    def engine_restarting(self, worker: str) -> Iterator[None]:
        played = self._workers[worker]
        assert isinstance(played, SmgWorker)
        played.command("stop")
        yield
        played.command("start")

    def read_reports(self) -> dict[str, str | None]:
        said: dict[str, list[str]] = {name: [] for name in self._registered}
        for metric, labels, value in REPORTS.findall(request(self._metrics).body.decode()):
            worker = next((name for url, name in self._names.items() if f'"{url}"' in labels), "")
            if float(value) and worker in said:
                reason = re.search('reason="([^"]*)"', labels)
                said[worker].append(f"{metric} {value}" + (f" ({reason[1]})" if reason else ""))
        for listed in self._listed():
            worker = self._names.get(listed["url"], "")
            if worker in said and not (listed.get("is_healthy", True) and listed.get("status", "ready") == "ready"):
                said[worker].append(f"status {listed.get('status')}")
        return {name: "; ".join(texts) or None for name, texts in said.items()}


class SmgDriver(RouterDriver):
    """Starts a gateway for each scenario. Its choices at random, for new workers, are off."""

    kind = SmgTarget

    def __init__(self, servicer: str, folder: Path) -> None:
        self._python = install_package(*SMG, folder, requirements=SERVICERS)
        self._servicer = servicer
        super().__init__(f"smg {SMG[1]}, {servicer.capitalize()} servicer", self._gateway)

    def _gateway(self, ports: Ports, block_size: int, members: Sequence[RouterWorker]) -> list[str]:
        del block_size  # the workers say it
        words = [str(Path(self._python).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(ports.requests)]
        words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.metrics), "--backend", "vllm"]
        words += ["--worker-warmup-divert-every", "0", "--worker-warmup-secs", "0"]
        return [*words, "--worker-urls", *dict.fromkeys(member.url for member in members)]

    def _play_workers(
        self, scenario: Scenario, followed: Sequence[EngineRegistration], stack: ExitStack
    ) -> Mapping[str, PlayedWorker]:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = list(dict.fromkeys(registration.worker for registration in followed))
        write_tokenizer(folder, names)
        topics = {engine.worker or name: engine.topic for name, engine in scenario.engines.items()}
        rows, ports = [], dict[str, int]()
        for number, name in enumerate(names):
            port = reserve_port(ANY_LOCAL_PORT)
            stack.callback(port.close)  # held, because other scenarios take ports at the same time
            ports[name] = int(port.endpoint.rpartition(":")[2])
            registrations = [registration for registration in followed if registration.worker == name]
            sources = [[rank.rank, rank.endpoint, rank.replay_endpoint] for rank in registrations]
            row = {"name": name, "port": ports[name], "topic": topics.get(name, ""), "answer": NUMBERS + number}
            rows.append({**row, "sources": sources, "block_size": scenario.block_size, "model": MODEL})
        (folder / "workers.json").write_text(json.dumps(rows))
        words = [self._python, "-P", str(Path(__file__).with_name("smg_workers.py")), self._servicer, str(folder)]
        program = stack.enter_context(Program("the engines of SMG", lambda _port, _folder: words, is_fed=True))
        workers = {name: SmgWorker(name, port, program) for name, port in ports.items()}
        program.start(lambda: all(worker.is_open for worker in workers.values()))
        return workers


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:] or [""]
    if kind not in {"python", "rust"}:
        sys.exit(__doc__)
    DRIVERS["smg"] = lambda folder: SmgDriver(kind, folder)
    sys.exit(main(["conform", "smg", *arguments]))
