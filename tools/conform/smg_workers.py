"""The engines of SMG for a scenario: `smg_workers.py python|rust FOLDER`, run by the interpreter that has SMG's wheels.

`FOLDER` has `workers.json` and the tokenizer. Each worker is a vLLM engine without a model behind one of SMG's released
servicers, which reads the events of its sources. Lines of stdin are `stop NAME` and `start NAME`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

CONTEXT_TOKENS: Final = 1 << 20
VOCABULARY: Final = 200_000
READY_SECONDS: Final = 20.0


class PythonServicer:
    """The default servicer of SMG: a gRPC server whose `SubscribeKvEvents` is the released relay."""

    def __init__(self, row: dict[str, Any], folder: str, loop: asyncio.AbstractEventLoop) -> None:
        self._row = row
        self._folder = folder
        self._loop = loop
        self._server: Any = None

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(READY_SECONDS)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result(READY_SECONDS)

    async def _serve(self) -> None:
        import grpc  # noqa: PLC0415 - of SMG's environment, as all below
        from grpc_health.v1 import health_pb2_grpc  # noqa: PLC0415
        from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: PLC0415
        from smg_grpc_servicer.health_frame import SERVING, HealthFrame  # noqa: PLC0415

        class Health(HealthFrame):  # type: ignore[misc]  # it has no types
            ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"

            async def engine_status(self, service_name: str) -> Any:
                del service_name
                return SERVING

        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer(), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(), self._server)
        assert self._server.add_insecure_port(f"127.0.0.1:{self._row['port']}"), self._row
        await self._server.start()

    def _servicer(self) -> Any:  # noqa: C901  a class
        from smg_grpc_proto import vllm_engine_pb2 as pb  # noqa: PLC0415
        from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: PLC0415
        from smg_grpc_servicer.kv_relay import Engine, RankSource, relay  # noqa: PLC0415
        from smg_grpc_servicer.tokenizer_bundle import tokenizer_bundle, tokenizer_chunks  # noqa: PLC0415
        from smg_grpc_servicer.vllm.loads import LoadTracker, load_record, scheduler_load_fields  # noqa: PLC0415

        row, folder, tracker = self._row, self._folder, LoadTracker()
        sources = [RankSource(*source) for source in row["sources"]]
        limits = {"max_total_num_tokens": CONTEXT_TOKENS, "max_running_requests": 256}

        class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # it has no types
            async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802 - names of the protocol
                del context
                count = {
                    "prompt_tokens": len(request.tokenized.input_ids),
                    "completion_tokens": 1,
                    "cached_tokens": 0,
                    "index": 0,
                }
                ids = [row["answer"]]
                if request.stream:
                    yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **count))
                    ids = []
                yield pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, finish_reason="stop", **count))

            async def HealthCheck(self, *_: Any) -> Any:  # noqa: N802
                return pb.HealthCheckResponse(healthy=True, message="ok")

            async def Abort(self, *_: Any) -> Any:  # noqa: N802
                return pb.AbortResponse()

            async def GetModelInfo(self, *_: Any) -> Any:  # noqa: N802
                names = {"model_path": row["model"], "served_model_name": row["model"], "tokenizer_path": folder}
                tokens = {"eos_token_ids": [2], "pad_token_id": 0, "bos_token_id": 1, "vocab_size": VOCABULARY}
                lengths = {"max_context_length": CONTEXT_TOKENS, "max_req_input_len": CONTEXT_TOKENS}
                kind = {"is_generation": True, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
                return pb.GetModelInfoResponse(**names, **tokens, **lengths, **kind)

            async def GetServerInfo(self, *_: Any) -> Any:  # noqa: N802
                sizes = {"data_parallel_size": 1, "block_size": row["block_size"], "max_num_seqs": 256}
                return pb.GetServerInfoResponse(server_type="vllm-grpc", uptime_seconds=1.0, **sizes)

            async def GetLoads(self, *_: Any) -> Any:  # noqa: N802
                fields = scheduler_load_fields(0, 0, 0.1, tracker.estimate(0, rank=0), **limits)
                loads = [pb.SchedulerLoad(**fields)]
                return pb.GetLoadsResponse(timestamp="2026-11-28T00:00:00Z", version="0.33.0", dp_rank_count=1, loads=loads)

            async def GetTokenizer(self, *_: Any) -> Any:  # noqa: N802
                data, digest = await tokenizer_bundle(folder)
                for chunk in tokenizer_chunks(data, digest):
                    yield chunk

            async def SubscribeKvEvents(self, request: Any, context: Any) -> Any:  # noqa: N802
                def load(_: int) -> Any:
                    return load_record(0, 0, 0.1, tracker.estimate(0, rank=0), **limits)

                start, options = request.start_sequence_number, {"topic": row["topic"], "hwm": 100_000, "load_source": load}
                async for batch in relay(sources, Engine.VLLM, start, context, **options):
                    yield batch

        return Servicer()


class RustServicer:
    """SMG's servicer in Rust, in front of an engine core that answers each request at once."""

    def __init__(self, row: dict[str, Any], folder: str, loop: asyncio.AbstractEventLoop) -> None:
        del loop
        self._row = row
        self._folder = folder
        self._server: Any = None
        self._core = threading.Event()

    def start(self) -> None:
        from smg.servicer import VllmGrpcServer  # noqa: PLC0415 - of SMG's environment

        row, [(_, endpoint, replay), *_] = self._row, self._row["sources"]
        events = {"kv_events_endpoint": endpoint, "kv_events_replay_endpoint": replay or "", "kv_events_topic": row["topic"]}
        model = {"served_model_name": row["model"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        tokens = {"tokenizer_dir": self._folder, "tokenizer_path": self._folder, "vocab_size": VOCABULARY}
        sizes = {"max_context_length": CONTEXT_TOKENS, "block_size": row["block_size"], "max_num_seqs": 256}
        sockets = tempfile.mkdtemp(prefix="smg")
        address, ipc, handshake = f"127.0.0.1:{row['port']}", f"ipc://{sockets}/e", f"ipc://{sockets}/h"
        options = {**events, **model, **tokens, **sizes, "eos_token_ids": [VOCABULARY - 1], "log_stats": False}
        self._server = VllmGrpcServer(address, ipc, handshake, row["model"], **options)
        self._core = threading.Event()
        threading.Thread(target=self._run_core, args=(handshake, self._core), daemon=True).start()
        deadline = time.monotonic() + READY_SECONDS
        while not self._server.engine_ready and time.monotonic() < deadline:
            time.sleep(0.02)
        self._server.set_serving(True)

    def stop(self) -> None:
        self._core.set()
        self._server.stop(0.2)

    def _run_core(self, handshake: str, ended: threading.Event) -> None:
        """Answer as vLLM's EngineCore does: a handshake, then one token for each request."""
        encode, identity = msgspec.msgpack.encode, (0).to_bytes(2, "little")
        with zmq.Context() as context:
            greeting, requests = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            answers = context.socket(zmq.PUSH)
            for own in (greeting, requests, answers):
                own.set(zmq.LINGER, 0)
            for own in (greeting, requests):
                own.set(zmq.IDENTITY, identity)
            greeting.connect(handshake)
            greeting.send(encode({"status": "HELLO", "local": True, "headless": True}))
            if not greeting.poll(int(READY_SECONDS * 1000)):
                return
            addresses = msgspec.msgpack.decode(greeting.recv())["addresses"]
            greeting.send(encode({"status": "READY", "local": True, "headless": True}))
            requests.connect(addresses["inputs"][0])
            answers.connect(addresses["outputs"][0])
            requests.send(encode(self._core_settings()))
            while not ended.is_set():
                if requests.poll(50):
                    kind, *frames = requests.recv_multipart()
                    if kind == b"\0":
                        name = msgspec.msgpack.decode(frames[0])[0]
                        output = [name, [self._row["answer"]], None, None, None, 0]
                        answers.send(encode([0, [output], None, time.monotonic(), None, [name]]))
            context.destroy(linger=0)

    def _core_settings(self) -> dict[str, Any]:
        sizes = dict.fromkeys(("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), 1)
        limits = {
            "max_model_len": CONTEXT_TOKENS,
            "num_gpu_blocks": 65_536,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
        }
        nothing = dict.fromkeys(("dp_stats_address", "kv_cache_size_tokens", "kv_cache_max_concurrency"))
        names = {"dtype": "bfloat16", "vllm_version": "0.33.0", "instance_id": "i", "block_size": self._row["block_size"]}
        return {**sizes, **limits, **nothing, **names, "decode_context_parallel_size": 1, "data_parallel_rank": 0}


SERVICERS: Final[dict[str, type[PythonServicer | RustServicer]]] = {"python": PythonServicer, "rust": RustServicer}


def main(kind: str, folder: str) -> None:
    """Start all workers, and do what stdin says."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    rows = json.loads(Path(folder, "workers.json").read_text())
    workers = {row["name"]: SERVICERS[kind](row, folder, loop) for row in rows}
    for worker in workers.values():
        worker.start()
    for line in sys.stdin:
        word, name = line.split()
        getattr(workers[name], word)()


if __name__ == "__main__":
    main(*sys.argv[1:])
