"""One engine, or one data-parallel rank of it: continuous batching with chunked prefill, in virtual time.

Theory of operation, after vLLM 0.32 (`vllm/v1/core/sched/scheduler.py`). A step computes one token of every decoding sequence.
The remaining token budget goes to prompts that are being prefilled, then to waiting prompts in the order of arrival. The step
that admits a waiting prompt looks it up in the cache. A sequence without room for its next block preempts the sequence that was
admitted last. The preempted sequence releases its blocks and waits at the front of the queue. All changes that a step makes to
the cache are one batch of events, which is published when the step ends.

`begin` schedules a step and returns its duration; `end` returns its results. The module has no clock: the caller advances the
time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from kvevents.errors import ConfigError
from kvevents.events import KVEvent
from kvevents.settings import Positive, Settings
from kvevents.sim.cache import EVENT_STYLES, CacheSize, EventStyle, PrefixCache
from kvevents.sim.costs import CostModel
from kvevents.sim.requests import Request, Sequence


class StepLimits(Settings, frozen=True):
    """Limits of one step. Raises `ConfigError`."""

    max_num_seqs: Positive = 256
    """Maximum number of concurrent sequences (vLLM's `--max-num-seqs`)."""
    max_num_batched_tokens: Positive = 8192
    """Maximum number of tokens of one step (vLLM's `--max-num-batched-tokens`; the default of a server on an H100)."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs, which is "
                f"{self.max_num_seqs}, because each sequence needs a token in each step"
            )


class Lookup(NamedTuple):
    """The lookup of a prompt in the cache: its result, and its position in the stream."""

    job: Job
    tokens: int
    """Number of tokens that were looked up: the prompt and, after a preemption, the part of the answer that was computed."""
    cached: int
    """Number of tokens that were found in the cache. The last token never counts."""
    position: int
    """Number of events in the step's batch that precede the lookup."""
    is_first: bool
    """Whether this lookup is the first lookup of its request."""


@dataclass(eq=False)
class Job:
    """A request that was submitted to an engine."""

    request: Request
    block_size: int
    seed: str
    """Seed of the block hashes, which differs between engines."""
    order: int = 0
    """Number of the job's admission, from 1; the highest is preempted first. 0 while the job waits or when it is finished."""
    cached: int | None = None
    """Number of prompt tokens that were found in the cache at the job's first admission; None before the first admission."""
    ahead: int = 0
    """Number of computed tokens of a decoding job before a step, minus the step's number; constant, as a step computes one."""

    @cached_property
    def sequence(self) -> Sequence:
        """The tokens of the prompt and the answer, which are generated at the first lookup."""
        request = self.request
        tokens = (request.prompt + request.output).tokens()
        return Sequence(tokens, len(request.prompt), self.block_size, self.seed, request.lora, request.salt)


@dataclass(slots=True)
class StepResult:
    """The results of one step."""

    first_token_jobs: list[Job] = field(default_factory=list)
    """Jobs whose answer got its first token in this step."""
    finished: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)
    """Jobs that the engine can never run, because they are longer than the cache."""
    lookups: list[Lookup] = field(default_factory=list)
    events: list[KVEvent] = field(default_factory=list)


class SimulatedEngine:
    """An engine: its cache, its scheduler and its requests."""

    def __init__(
        self,
        size: CacheSize,
        costs: CostModel,
        step_limits: StepLimits,
        *,
        seed: str,
        event_style: EventStyle = EVENT_STYLES["vllm"],
    ) -> None:
        self.size: Final = size
        self.cache: Final = PrefixCache(size, max_step_tokens=step_limits.max_num_batched_tokens, event_style=event_style)
        self.computed = 0
        """Number of prompt tokens that the engine has computed."""
        self.preemptions = 0
        self._costs: Final = costs
        self._step_limits: Final = step_limits
        self._seed: Final = seed
        self._waiting: Final[deque[Job]] = deque()
        self._prefilling: Final[list[Job]] = []
        """Admitted jobs of which some known tokens are not computed yet."""
        self._decoding: Final[dict[Job, None]] = {}
        self._due: Final[defaultdict[int, list[tuple[int, Job]]]] = defaultdict(list)
        """Maps the number of a step to the jobs that begin or fill a block in it. An entry begins with the number of the job's
        admission, and is ignored if the job was admitted again."""
        self._ending: Final[defaultdict[int, list[tuple[int, Job]]]] = defaultdict(list)
        """Maps the number of a step to the jobs whose last token it produces. Entries are as in `_due`."""
        self._number = 0
        """Number of the current step."""
        self._admissions = 0
        last = size.block_size - 1
        self._places: Final = {0, last} if size.window is None else {0, last, (size.window - 1) % size.block_size}
        """Positions in a block at which a decoding sequence begins or fills the block, or its window moves out of a block."""
        self._context = 0
        """Number of computed tokens of all decoding sequences."""
        self._reset_wanted = False
        self._step = StepResult()
        self._prefilled: list[Job] = []
        """Jobs whose last chunk of prompt is computed in the current step."""

    @property
    def idle(self) -> bool:
        """Whether the engine has no job to compute."""
        return not (self._waiting or self.running)

    @property
    def running(self) -> int:
        """Number of admitted sequences."""
        return len(self._prefilling) + len(self._prefilled) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first admission or, after a preemption, for another admission."""
        return len(self._waiting)

    def submit(self, request: Request) -> Job:
        """Add a request, which waits until a step admits it."""
        job = Job(request, self.size.block_size, self._seed)
        self._waiting.append(job)
        return job

    def jobs(self) -> list[Job]:
        """Return all jobs that are not finished. The call is allowed during a step."""
        return [*self._decoding, *self._prefilled, *self._prefilling, *self._waiting, *self._step.refused]

    def reset(self) -> None:
        """Clear the prefix cache as soon as no sequence holds a block. The next step with work publishes the clear."""
        self._reset_wanted = not self.cache.reset()

    # --- steps

    def begin(self) -> float:
        """Schedule a step and return its duration in seconds. Call `end` after that time."""
        self._number += 1
        work = _StepWork(self._step_limits.max_num_batched_tokens)
        preemptions = self.preemptions
        self._schedule_decoding(work)
        self._schedule_chunks(work)
        if self.preemptions == preemptions:
            self._admit(work)
        self.computed += work.prefilled
        seconds = self._costs.seconds(work.prefilled, work.pairs, work.decoding, self._context)
        self._context += work.decoding
        return seconds + self._costs.reload * self.size.block_size * work.loaded

    def end(self) -> StepResult:
        """Finish the step and return its results."""
        step, self._step = self._step, StepResult()
        for order, job in sorted(self._ending.pop(self._number, ()), key=itemgetter(0)):
            if job.order == order:
                self._stop_decoding(job, self._number + 1)
                self._finish(job, step)
        for job in self._prefilled:
            self._record_first_token(job, step)
        self._prefilled = []
        if self._reset_wanted:
            self.reset()
        step.events = self.cache.take_events()
        return step

    # --- decoding of answers

    def _schedule_decoding(self, work: _StepWork) -> None:
        for order, job in sorted(self._due.pop(self._number, ()), key=itemgetter(0)):
            if job.order != order:
                continue  # the job was preempted after the entry was added
            sequence = job.sequence
            sequence.computed = self._number + job.ahead
            sequence.known = sequence.computed + 1
            if self.cache.extend(sequence, 1) or self._make_room(job, 1):
                self._schedule_next_block(job)
        work.decoding = len(self._decoding)
        work.budget -= work.decoding

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Preempt the jobs admitted last until `job` has room. Return False if `job` itself was preempted."""
        while True:
            victim = max((*self._decoding, *self._prefilling), key=attrgetter("order"))
            self._preempt(victim)
            if victim is job:
                return False
            if self.cache.extend(job.sequence, tokens):
                return True

    def _preempt(self, job: Job) -> None:
        sequence = job.sequence
        if job in self._decoding:
            sequence.known = self._number + job.ahead + 1
            self._stop_decoding(job, self._number)
        else:
            self._prefilling.remove(job)
        self.cache.release(sequence)
        job.order = 0
        self.preemptions += 1
        self._waiting.appendleft(job)

    def _schedule_next_block(self, job: Job) -> None:
        """Plan the next step in which a job begins a block, fills a block, or moves its window out of a block."""
        size, number = self.size.block_size, self._number + 1
        wait = min((place - number - job.ahead) % size for place in self._places)
        self._due[number + wait].append((job.order, job))

    def _start_decoding(self, job: Job) -> None:
        sequence = job.sequence
        job.ahead = sequence.computed - self._number - 1
        self._decoding[job] = None
        self._context += sequence.computed
        self._ending[len(sequence.tokens) - 2 - job.ahead].append((job.order, job))
        if self.size.window is None:
            self._schedule_next_block(job)
        else:
            # At the first token, the window moves out of blocks that the prompt's last chunk still needed.
            self._due[self._number + 1].append((job.order, job))

    def _stop_decoding(self, job: Job, number: int) -> None:
        del self._decoding[job]
        self._context -= number + job.ahead

    # --- prefill of prompts

    def _schedule_chunks(self, work: _StepWork) -> None:
        """Schedule the next chunks of prompts whose prefill began in earlier steps."""
        for job in list(self._prefilling):
            sequence = job.sequence
            chunk = min(sequence.remaining, work.budget)
            if not chunk or not job.order:
                continue
            if not self.cache.extend(sequence, chunk) and not self._make_room(job, chunk):
                break
            self._schedule_chunk(job, chunk, work)

    def _admit(self, work: _StepWork) -> None:
        while self._waiting and work.budget and self.running < self._step_limits.max_num_seqs:
            job = self._waiting[0]
            sequence = job.sequence
            if not self.cache.could_hold(len(sequence.tokens) - 1):  # the last token of an answer is never computed
                self._step.refused.append(self._waiting.popleft())
                continue
            prefix = self.cache.find(sequence)
            chunk = min(sequence.known - prefix.tokens, work.budget)
            position = self.cache.pending
            if not self.cache.admit(sequence, prefix, chunk):
                return
            self._waiting.popleft()
            self._admissions += 1
            job.order = self._admissions
            self._prefilling.append(job)
            self._step.lookups.append(Lookup(job, sequence.known, prefix.tokens, position, job.cached is None))
            if job.cached is None:
                job.cached = prefix.tokens
            work.loaded += prefix.loaded
            self._schedule_chunk(job, chunk, work)

    def _schedule_chunk(self, job: Job, tokens: int, work: _StepWork) -> None:
        sequence = job.sequence
        work.budget -= tokens
        work.prefilled += tokens
        work.pairs += tokens * (2 * sequence.computed - tokens) // 2
        if not sequence.remaining:
            self._prefilled.append(job)
            self._prefilling.remove(job)

    # --- answers

    def _record_first_token(self, job: Job, step: StepResult) -> None:
        """Record the token that ends a prefill. After a preemption, the known tokens of the answer are prefilled too."""
        sequence = job.sequence
        if sequence.known == sequence.prompt:
            step.first_token_jobs.append(job)
        sequence.known += 1
        if sequence.complete:
            self._finish(job, step)
        else:
            self._start_decoding(job)

    def _finish(self, job: Job, step: StepResult) -> None:
        self.cache.release(job.sequence)
        job.order = 0
        step.finished.append(job)


@dataclass(slots=True)
class _StepWork:
    budget: int
    """Number of tokens that the step can still compute."""
    prefilled: int = 0
    pairs: int = 0
    """Number of pairs of a prefilled token and a token that it attends to."""
    decoding: int = 0
    loaded: int = 0
    """Number of blocks that are loaded from host memory."""
