"""A thread that decodes a continuous batch, and its interface for asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from dataclasses import dataclass, field

from thinker.generation.continuous_batch import ContinuousBatch, Progress
from thinker.generation.engine import Generator
from thinker.generation.sequence import Sequence
from thinker.runtime.errors import RunError
from thinker.serving.metrics import Metrics

log = logging.getLogger("thinker.serving")


class QueueFull(Exception):
    """Too many texts wait. `retry_after`: when to try again, in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__()
        self.retry_after = retry_after


@dataclass(eq=False)
class Text:
    """A sequence in the hands of the thread."""

    sequence: Sequence
    progress: asyncio.Queue[Progress]
    loop: asyncio.AbstractEventLoop
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None


class Submission:
    """Texts that were submitted together: an asynchronous iterator over what each step adds to each of them."""

    def __init__(self, engine: EngineThread, texts: list[Text], queue: asyncio.Queue[Progress]) -> None:
        self._engine, self._texts, self._queue, self._n_left = engine, texts, queue, len(texts)

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> Progress:
        if not self._n_left:
            raise StopAsyncIteration
        progress = await self._queue.get()
        self._n_left -= progress.has_ended
        return progress

    def cancel(self) -> None:
        """Give up what has not ended."""
        if self._n_left:
            self._n_left = 0
            self._engine.remove(self._texts)


class EngineThread:
    """Decodes the texts of one model. All public methods may be called from any thread."""

    def __init__(self, name: str, generator: Generator, max_batch: int, max_queue: int, metrics: Metrics) -> None:
        """`max_batch`: texts decoded at once; `max_queue`: further texts that may wait. Raises UserError."""
        self.name, self.generator, self.metrics = name, generator, metrics
        self.max_batch, self.max_texts = max_batch, max_batch + max_queue
        self._batch = ContinuousBatch(generator, max_batch)
        self._texts: dict[int, Text] = {}  # by id of the sequence
        self._added: list[Text] = []
        self._removed: list[Text] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._seconds_per_text = 1.0  # an average, for Retry-After
        self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> Submission:
        """Queue sequences; call it in the event loop that reads their progress. Raises QueueFull."""
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        texts = [Text(sequence, queue, loop) for sequence in sequences]
        with self._changed:
            n_too_many = len(self._texts) + len(texts) - self.max_texts
            if n_too_many > 0:
                raise QueueFull(max(1, math.ceil(self._seconds_per_text * n_too_many / self.max_batch)))
            self._texts |= {id(text.sequence): text for text in texts}
            self._added += texts
            self._changed.notify()
        return Submission(self, texts, queue)

    def remove(self, texts: list[Text]) -> None:
        """Give up texts; those that have not ended leave the batch before the next step."""
        with self._changed:
            self._removed += texts
            self._changed.notify()

    def state(self) -> dict[str, float]:
        """The numbers of running and waiting texts, and the used part of the cache."""
        running = list(self._batch.running)
        n_cached = sum(row.n_read for row in running)
        capacity = self.max_batch * min(self.generator.context_len, self.generator.config.max_seq_len)
        n_waiting = max(0, len(self._texts) - len(running))
        return {"running": len(running), "waiting": n_waiting, "cache_used": n_cached / capacity}

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._added or self._removed or self._stopping) and self._batch.is_idle:
                    self._changed.wait()
                if self._stopping:
                    return
                added, self._added, removed, self._removed = self._added, [], self._removed, []
            for text in added:
                self._batch.add(text.sequence)
            for text in removed:
                self._batch.remove(text.sequence)
                self._forget(text, "cancelled")
            self._deliver(self._step())

    def _step(self) -> list[Progress]:
        try:
            return self._batch.step()
        except Exception:  # a bug, or no memory: nobody knows which text is at fault
            log.exception("decoding failed; all texts of %s end", self.name)
            error = RunError("decoding failed; see the log of the server")
            sequences = [*self._batch.waiting, *(row.sequence for row in self._batch.running)]
            self._batch = ContinuousBatch(self.generator, self.max_batch)
            return [Progress(sequence, "", [], True, error) for sequence in sequences]

    def _deliver(self, steps: list[Progress]) -> None:
        now, by_loop = time.perf_counter(), {}
        for progress in steps:
            text = self._texts[id(progress.sequence)]
            self._measure(text, progress, now)
            by_loop.setdefault(text.loop, []).append((text.progress, progress))
        for loop, deliveries in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, deliveries)

    def _measure(self, text: Text, progress: Progress, now: float) -> None:
        metrics, completion = self.metrics, text.sequence.completion
        metrics.new_tokens.labels(self.name).inc(len(progress.sampled))
        if text.first_token is None and progress.sampled:
            text.first_token = now
            metrics.first_token.labels(self.name).observe(now - text.arrived)
            metrics.prompt_tokens.labels(self.name).inc(completion.prompt_tokens)
            metrics.cached_tokens.labels(self.name).inc(text.sequence.n_shared)
        if progress.has_ended:
            metrics.whole.labels(self.name).observe(now - text.arrived)
            if len(completion.token_ids) > 1:
                mean = (now - text.first_token) / (len(completion.token_ids) - 1)
                metrics.per_token.labels(self.name).observe(mean)
            self._seconds_per_text += 0.1 * (now - text.arrived - self._seconds_per_text)
            self._forget(text, "error" if progress.error else completion.finish_reason)

    def _forget(self, text: Text, reason: str) -> None:
        with self._changed:
            if self._texts.pop(id(text.sequence), None) is not None:
                self.metrics.texts.labels(self.name, reason).inc()


def _put_all(deliveries: list[tuple[asyncio.Queue[Progress], Progress]]) -> None:
    for queue, progress in deliveries:
        queue.put_nowait(progress)
