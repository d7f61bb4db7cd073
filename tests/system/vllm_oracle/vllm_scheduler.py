"""vLLM's own scheduler over its own block manager, executed out of its released wheel; its model returns given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from tests.system.vllm_oracle.vllm_blocks import MAX_MODEL_LEN, cache_config, core, request


class RealLookup(NamedTuple):
    """The result of an admitted request's lookup."""

    tokens: int
    """Tokens that were looked up."""
    cached: int
    position: int
    """Events of the step's batch before the lookup."""


class RealStep(NamedTuple):
    """The results of one step of a scheduler."""

    lookups: dict[str, RealLookup]
    """Lookups of the requests admitted in this step, by request."""
    finished: list[str]
    events: list[Any]


class RealScheduler:
    """vLLM's `Scheduler` without asynchronous scheduling."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        config = _engine_config(blocks, max_num_seqs, max_num_batched_tokens)
        self.scheduler: Final = core("sched.scheduler").Scheduler(
            config,
            cache_config(blocks, block_size, windows, retention=0),
            SimpleNamespace(accept_tokens=lambda *_: True),
            block_size,
        )
        self.scheduler.kv_event_publisher = SimpleNamespace(publish=self._publish)
        self._get_computed_blocks: Final = self.scheduler.kv_cache_manager.get_computed_blocks
        self.scheduler.kv_cache_manager.get_computed_blocks = self._record_lookup
        self._lookups: dict[str, RealLookup] = {}
        self._block_size: Final = block_size
        self._answers: dict[str, Sequence[int]] = {}
        self._published: list[Any] = []

    def _publish(self, batch: Any) -> None:
        self._published += batch.events

    def _record_lookup(self, request: Any) -> Any:
        found = self._get_computed_blocks(request)
        position = len(self.scheduler.kv_cache_manager.block_pool.kv_event_queue)
        self._lookups[request.request_id] = RealLookup(request.num_tokens, found[1], position)
        return found

    @property
    def free(self) -> int:
        """Return the number of blocks that no request uses."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def running(self) -> list[str]:
        """Return the admitted requests, in the order of their admission."""
        return [each.request_id for each in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        """Return the other requests, the next one first."""
        return [each.request_id for each in self.scheduler.waiting]

    def submit(self, name: str, prompt: Sequence[int], answer: Sequence[int], **options: str | None) -> None:
        """Add a request with this answer; `options` are those of `request`."""
        self._answers[name] = answer
        self.scheduler.add_request(request(name, prompt, self._block_size, output=len(answer), **options))

    def reset(self) -> bool:
        """Clear the prefix cache. Returns False while a block is in use."""
        return bool(self.scheduler.reset_prefix_cache())

    def begin(self) -> Any:
        """Schedule a step. Pass the returned value to `end`."""
        self._lookups.clear()
        return self.scheduler.schedule()

    def end(self, output: Any) -> RealStep:
        """End a step with the tokens of the given answers."""
        names = list(output.num_scheduled_tokens)
        requests = dict(self.scheduler.requests)
        tokens = [[] if requests[name].is_prefill_chunk else [self._next(requests[name])] for name in names]
        self.scheduler.update_from_output(output, _make_output(names, tokens))
        events, self._published = self._published, []
        admitted = {each.req_id for each in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        lookups = {name: lookup for name, lookup in self._lookups.items() if name in admitted}
        return RealStep(lookups, [name for name in names if name not in self.scheduler.requests], events)

    def _next(self, request: Any) -> int:
        return self._answers[str(request.request_id)][int(request.num_output_tokens)]


def _make_output(names: list[str], tokens: list[list[int]]) -> Any:
    """Return vLLM's `ModelRunnerOutput` with one list of tokens for each request."""
    return SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=tokens,
        prompt_logprobs_dict={},
        prompt_token_id_logprobs_dict={},
        **dict.fromkeys(
            ("logprobs", "pooler_output", "num_nans_in_logits", "kv_connector_output", "ec_connector_output", "cudagraph_stats")
        ),
    )


def _engine_config(blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> Any:
    """Return the parts of `VllmConfig` that the scheduler reads: defaults, except the limits and synchronous scheduling."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            policy="fcfs",
            watermark=0.0,
            scheduler_reserve_full_isl=True,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=blocks + 1,
            enable_prefix_caching=True,
            mamba_cache_mode="none",
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        model_config=SimpleNamespace(
            max_model_len=MAX_MODEL_LEN,
            runner_type="generate",
            is_diffusion=False,
            is_encoder_decoder=False,
            uses_mrope=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True, publisher="null"),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics="none", kv_cache_metrics=False),
        aux_output_config=SimpleNamespace(enabled=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        use_v2_model_runner=False,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_concurrent_batches=1,
        max_in_flight_tokens=max_num_batched_tokens,
    )
