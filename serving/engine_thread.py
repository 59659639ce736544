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
from thinker.serving.allocator import return_free_memory
from thinker.serving.metrics import Metrics

log = logging.getLogger("thinker.serving")


IDLE_SECONDS = 1.0  # after which memory is given back
MAX_UNREAD = 1 << 14  # tokens of a request that wait for its client to read them


class QueueFull(Exception):
    """Too many texts wait. `retry_after`: when to try again, in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__()
        self.retry_after = retry_after


@dataclass(eq=False)
class Text:
    """A sequence in the hands of the thread."""

    sequence: Sequence
    submission: Submission
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None


class Submission:
    """Texts that were submitted together: an asynchronous iterator over what is added to each of them.

    A reader that is slower than the steps gets what several of them added at once.
    """

    def __init__(self, engine: EngineThread, sequences: list[Sequence]) -> None:
        """Create it in the event loop that reads it."""
        self.loop = asyncio.get_running_loop()
        self.texts = [Text(sequence, self) for sequence in sequences]
        self._engine, self._n_left = engine, len(sequences)
        self._unread: dict[int, Progress] = {}  # by index of the sequence
        self._n_unread, self._has_unread = 0, asyncio.Event()

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> Progress:
        if not self._n_left:
            raise StopAsyncIteration
        await self._has_unread.wait()
        progress = self._unread.pop(next(iter(self._unread)))
        self._n_unread -= len(progress.sampled)
        if not self._unread:
            self._has_unread.clear()
        self._n_left -= progress.has_ended
        return progress

    def put(self, progress: Progress) -> None:
        """Add what a step added to a text. Called in the event loop."""
        if not self._n_left or self._n_unread > MAX_UNREAD:
            return
        self._n_unread += len(progress.sampled)
        if self._n_unread > MAX_UNREAD:  # the memory of the server is limited
            error = RunError(
                f"the text was cancelled, because more than {MAX_UNREAD} of its tokens were not read"
            )
            self._unread = {0: Progress(progress.sequence, "", [], True, error)}
            self._engine.remove(self.texts)
        elif progress.sequence.index in self._unread:
            unread = self._unread[progress.sequence.index]
            unread.text += progress.text
            unread.sampled += progress.sampled
            unread.has_ended, unread.error = progress.has_ended, progress.error
        else:
            self._unread[progress.sequence.index] = progress
        self._has_unread.set()

    def cancel(self) -> None:
        """Give up what has not ended."""
        if self._n_left:
            self._n_left = 0
            self._engine.remove(self.texts)


class EngineThread:
    """Decodes the texts of one model. All public methods may be called from any thread."""

    def __init__(
        self, name: str, generator: Generator, max_batch: int, max_queue: int, metrics: Metrics
    ) -> None:
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
        submission = Submission(self, sequences)
        texts = submission.texts
        with self._changed:
            n_too_many = len(self._texts) + len(texts) - self.max_texts
            if n_too_many > 0:
                raise QueueFull(
                    max(1, math.ceil(self._seconds_per_text * n_too_many / self.max_batch))
                )
            self._texts |= {id(text.sequence): text for text in texts}
            self._added += texts
            self._changed.notify()
        return submission

    def remove(self, texts: list[Text]) -> None:
        """Give up texts; those that have not ended leave the batch before the next step."""
        with self._changed:
            self._removed += texts
            self._changed.notify()

    def state(self) -> dict[str, float]:
        """The numbers of running and waiting texts, and the used part of the cache."""
        running = list(self._batch.running)
        n_cached = sum(row.n_read for row in running)
        capacity = self.max_batch * min(
            self.generator.context_len, self.generator.config.max_seq_len
        )
        n_waiting = max(0, len(self._texts) - len(running))
        return {"running": len(running), "waiting": n_waiting, "cache_used": n_cached / capacity}

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; only a bug ends it."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                has_trimmed = False
                while not (self._added or self._removed or self._stopping) and self._batch.is_idle:
                    is_still_idle = not self._changed.wait(None if has_trimmed else IDLE_SECONDS)
                    if is_still_idle:
                        return_free_memory()
                        has_trimmed = True
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
            self._batch.clear()
            with self._changed:  # not only those in the batch, which may have lost some
                failed = [text.sequence for text in self._texts.values() if text not in self._added]
            return [Progress(sequence, "", [], True, error) for sequence in failed]

    def _deliver(self, steps: list[Progress]) -> None:
        now, by_loop = time.perf_counter(), {}
        for progress in steps:
            text = self._texts[id(progress.sequence)]
            self._measure(text, progress, now)
            by_loop.setdefault(text.submission.loop, []).append((text.submission, progress))
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


def _put_all(deliveries: list[tuple[Submission, Progress]]) -> None:
    for submission, progress in deliveries:
        submission.put(progress)
