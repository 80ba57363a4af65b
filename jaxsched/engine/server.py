"""`Engine`: continuous batching over any model step, in one loop with the cache.

    engine = Engine(model_step, EngineConfig(...))
    first = engine.submit([1, 2, 3], max_new_tokens=16)
    while engine.is_busy:
        for output in engine.step():
            ...  # output.request_id, output.token_ids, output.finish_reason

A request's tokens depend on its prompt, its parameters and its seed alone, whatever
else is served and however its prompt is cut. One that is preempted is computed again
the way it was computed before: its prompt as a prompt, its answer token by token, so
that it goes on with the very bits it had.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxsched.core.config import Phase
from jaxsched.engine.admission import admit, leave
from jaxsched.engine.config import EngineConfig
from jaxsched.engine.model import ModelStep
from jaxsched.engine.requests import (
    Output,
    RequestRecord,
    SamplingParams,
    candidate_of,
    check_request,
)
from jaxsched.engine.state import empty_state
from jaxsched.engine.steps import Column, Total, decode_call, mixed_step

_MS_PER_STEP = 20
_GREEDY = SamplingParams()


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Sums over all steps of an engine."""

    num_steps: int = 0
    num_calls: int = 0  # of the model's executables
    num_computed_tokens: int = 0  # counted in what the model was given to compute
    num_prefilled_tokens: int = 0  # by the plans
    num_decoded_tokens: int = 0
    num_restored_tokens: int = 0  # taken from the cache at admissions
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_evicted_snapshots: int = 0


class Engine:
    """Requests in, tokens out."""

    def __init__(
        self,
        model: ModelStep,
        config: EngineConfig | None = None,
        clock: Callable[[], int] | None = None,
    ):
        """Allocates the pools; nothing is compiled before the first step.

        Args:
          model: what computes.
          config: sizes and choices.
          clock: milliseconds for the cache's eviction; default 20 a step, so that a
            run repeats exactly.
        """
        self.model, self.config = model, config or EngineConfig()
        self.stats = EngineStats()
        self.records: dict[int, RequestRecord] = {}
        self.compilations: dict[str, int] = {}
        self._clock = clock
        self._waiting: list[RequestRecord] = []
        self._rows: list[RequestRecord | None] = [None] * self.config.max_num_seqs
        self._prefilling: set[int] = set()
        self._is_closed = False
        self._cancelled: list[int] = []
        self._state = empty_state(self.model, self.config)
        both = (self.model, self.config)
        self._admit = self._jitted("admit", functools.partial(admit, *both))
        self._mixed = self._jitted("mixed", functools.partial(mixed_step, *both))
        self._decode = self._jitted("decode", functools.partial(decode_call, *both))
        self._leave = self._jitted("leave", functools.partial(leave, self.config))

    def _jitted(self, name: str, function: Callable) -> Callable:
        """The function compiled, its state donated, its compilations counted."""

        def traced(state, *args):
            self.compilations[name] = self.compilations.get(name, 0) + 1
            return function(state, *args)

        return jax.jit(traced, donate_argnums=0)

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs, or has an output to be taken."""
        return bool(self._waiting or self._cancelled) or any(self._rows)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return sum(record is not None for record in self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    def submit(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = _GREEDY,
        stop_tokens: Sequence[int] = (),
        snapshot_points: Sequence[int] = (),
        priority: int = 0,
        use_cache: bool = True,
    ) -> int:
        """Queues a request; returns the id that its outputs carry.

        Args:
          token_ids: its prompt.
          max_new_tokens: most tokens of the answer.
          sampling: how they are drawn.
          stop_tokens: the answer ends with the first of them.
          snapshot_points: positions of the prompt whose states are kept for others.
          priority: larger is more urgent; equals are served as submitted.
          use_cache: False: it reuses nothing, and nothing of it is kept.

        Raises:
          ValueError: naming the field and the value, if it could never be served.
        """
        record = check_request(
            self.config,
            self.model.vocab_size,
            token_ids,
            max_new_tokens,
            sampling,
            stop_tokens,
            snapshot_points,
            priority,
            use_cache,
            request_id=len(self.records),
        )
        self.records[record.request_id] = record
        self._enqueue(record)
        return record.request_id

    def cancel(self, request_id: int) -> bool:
        """Ends a request; what it had computed of its prompt stays cached.

        The next step reports it as `cancelled`. False: it has ended already.

        Raises:
          KeyError: if there is no such request.
        """
        record = self.records[request_id]
        if record.finish_reason is not None:
            return False
        record.finish_reason = "cancelled"
        self._cancelled.append(request_id)
        if record in self._waiting:
            self._waiting.remove(record)
            return True
        row = self._rows.index(record)
        gone = np.arange(len(self._rows)) == row
        self._state = self._leave(self._state, gone)
        self._free(row)
        return True

    def step(self) -> list[Output]:
        """Admits what fits, runs one call of the model, and returns what came of it.

        A call is one mixed step, or up to `decode_steps` steps of decoding while no
        prompt is to be computed.

        Raises:
          RuntimeError: if the model finds no room for a plan, or nothing can go on:
            an error of the model's adapter, not of a request.
        """
        outputs = [
            Output(request_id=gone, token_ids=(), finish_reason="cancelled")
            for gone in self._cancelled
        ]
        self._cancelled = []
        self._admit_waiting()
        if not self.num_running:
            return outputs
        state, weights, now = self._state, self.model.weights, self._now()
        if self._prefilling:
            self._state, report = self._mixed(state, weights, now)
        else:
            steps = np.int32(self.config.decode_steps)
            self._state, report = self._decode(state, weights, now, steps)
        return outputs + self._read(np.asarray(report))

    def run(self) -> dict[int, list[int]]:
        """Steps until nothing is left; answers by request id."""
        while self.is_busy:
            self.step()
        return {key: list(record.output) for key, record in self.records.items()}

    def _now(self) -> np.int32:
        if self._clock is not None:
            return np.int32(self._clock())
        return np.int32(min(self.stats.num_steps * _MS_PER_STEP, 2**30))

    def _enqueue(self, record: RequestRecord) -> None:
        self._waiting.append(record)
        self._waiting.sort(key=lambda record: (-record.priority, record.request_id))

    def _free(self, row: int) -> None:
        self._rows[row] = None
        self._prefilling.discard(row)
        self._is_closed = False

    def _admit_waiting(self) -> None:
        """Gives rows to the most urgent requests, until one does not fit.

        Then nobody enters until a row ends: whoever was preempted would take its
        blocks back at once.
        """
        while self._waiting and not self._is_closed and None in self._rows:
            record = self._waiting[0]
            candidate = candidate_of(self.config, record)
            self._state, answer = self._admit(self._state, candidate, self._now())
            granted, row, cached, kv, states, reason = np.asarray(answer).tolist()
            if not granted:
                if not self.num_running:
                    raise RuntimeError(
                        f"request {record.request_id} finds no room in an empty pool"
                    )
                self._is_closed = True
                return
            self._waiting.pop(0)
            self._rows[row] = record
            self._prefilling.add(row)
            if record.num_admissions == 0:
                record.num_cached_tokens, record.miss_reason = cached, reason
                record.num_kv_matched_tokens = kv
                record.num_state_matched_tokens = states
            record.num_admissions += 1
            record.num_sampled = 0
            record.num_restored_tokens += cached
            self.stats.num_restored_tokens += cached

    def _read(self, report: np.ndarray) -> list[Output]:
        totals = report[-1]
        if totals[Total.NUM_MISSED]:
            raise RuntimeError(
                f"{totals[Total.NUM_MISSED]} pieces of work found no room in the "
                "model's step: it must hold whatever the configuration can plan"
            )
        preempted = np.flatnonzero(report[:-1, Column.IS_PREEMPTED])
        if not totals[Total.NUM_STEPS] and not len(preempted):
            raise RuntimeError("no request can go on: raise max_num_batched_tokens")
        self._count(totals)
        outputs = []
        for row, record in enumerate(self._rows):
            if record is None:
                continue
            if report[row, Column.IS_PREEMPTED]:
                self.stats.num_preemptions += 1
                self._free(row)
                self._is_closed = True
                self._enqueue(record)
                continue
            output = self._read_row(row, record, report[row])
            if output is not None:
                outputs.append(output)
        return outputs

    def _count(self, totals: np.ndarray) -> None:
        stats = self.stats
        stats.num_calls += 1
        stats.num_steps += int(totals[Total.NUM_STEPS])
        stats.num_computed_tokens += int(totals[Total.NUM_TOKENS])
        stats.num_evicted_blocks = int(totals[Total.NUM_EVICTED_BLOCKS])
        stats.num_evicted_snapshots = int(totals[Total.NUM_EVICTED_SNAPSHOTS])

    def _read_row(
        self, row: int, record: RequestRecord, line: np.ndarray
    ) -> Output | None:
        chunk, sampled = int(line[Column.NUM_PREFILLED]), int(line[Column.NUM_SAMPLED])
        first = len(Column) + self.config.num_filed
        points = line[len(Column) : first]
        record.snapshots.update(points[points >= 0].tolist())
        if chunk:
            record.chunks.append(int(line[Column.START]) + chunk)
        decoded = 0 if chunk else sampled
        record.num_prefilled_tokens += chunk
        record.num_decoded_tokens += decoded
        self.stats.num_prefilled_tokens += chunk
        self.stats.num_decoded_tokens += decoded
        tokens = line[first : first + sampled].tolist()
        # What a preempted request computes again has been handed out already.
        known = len(record.output) - record.num_sampled
        record.num_sampled += sampled
        new = tokens[max(known, 0) :]
        record.output += new
        phase = int(line[Column.PHASE])
        if phase != Phase.PREFILL:
            self._prefilling.discard(row)
        if phase == Phase.FINISHED:
            record.finish_reason = "stop" if line[Column.IS_STOPPED] else "length"
            self._free(row)
        if not new and record.finish_reason is None:
            return None
        return Output(
            request_id=record.request_id,
            token_ids=tuple(new),
            finish_reason=record.finish_reason,
        )
