"""A thread that decodes a continuous batch, and its interface for asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from dataclasses import dataclass, field

from thinker.generation.batching.continuous_batch import ContinuousBatch, TextUpdate
from thinker.generation.engine import Generator
from thinker.generation.sequence import Sequence
from thinker.runtime.errors import RunError
from thinker.serving.allocator import return_free_memory
from thinker.serving.server_metrics import Metrics

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
    n_first: int = 0  # tokens that the first step added
    end: float | None = None


class Submission:
    """Texts that were submitted together: an asynchronous iterator over what is added to each.

    A reader that is slower than the steps gets what several of them added at once.
    """

    def __init__(self, engine: EngineThread, sequences: list[Sequence]) -> None:
        """Create it in the event loop that reads it."""
        self.loop = asyncio.get_running_loop()
        self.texts = [Text(sequence, self) for sequence in sequences]
        self._engine = engine
        self._n_left = len(sequences)  # texts whose end was not read
        self._unread: dict[int, TextUpdate] = {}  # by index of the sequence
        self._n_unread = 0  # tokens
        self._has_unread = asyncio.Event()

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> TextUpdate:
        if not self._n_left:
            raise StopAsyncIteration
        await self._has_unread.wait()
        # The text that has waited longest, so that no choice of a request starves.
        index = next(iter(self._unread))
        update = self._unread.pop(index)
        self._n_unread -= len(update.sampled)
        if not self._unread:
            self._has_unread.clear()
        if update.has_ended:
            self._n_left -= 1
        return update

    def put(self, update: TextUpdate) -> None:
        """Add what a step added to a text. Called in the event loop."""
        if not self._n_left or self._n_unread > MAX_UNREAD:
            return
        index = update.sequence.index
        self._n_unread += len(update.sampled)
        if self._n_unread > MAX_UNREAD:
            # The memory of the server is limited. The error takes the place of all that waits.
            reason = f"more than {MAX_UNREAD} of its tokens were not read"
            error = RunError(f"the text was cancelled, because {reason}")
            self._unread = {0: TextUpdate(update.sequence, "", [], True, error)}
            self._engine.remove(self.texts)
        elif index in self._unread:
            unread = self._unread[index]
            unread.text += update.text
            unread.sampled += update.sampled
            unread.has_ended = update.has_ended
            unread.error = update.error
        else:
            self._unread[index] = update
        self._has_unread.set()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all texts after those of their first steps, by the time that these took.

        None if a text has not ended, or if none has a second step.
        """
        n_after = 0
        starts = []
        ends = []
        for text in self.texts:
            if text.first_token is None or text.end is None:
                return None
            n_after += len(text.sequence.completion.token_ids) - text.n_first
            starts.append(text.first_token)
            ends.append(text.end)
        if n_after == 0:
            return None
        return n_after / (max(ends) - min(starts))

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
        """`max_batch`: texts decoded at once; `max_queue`: further texts that may wait.

        Raises UserError.
        """
        self.name = name
        self.generator = generator
        self.metrics = metrics
        self.max_batch = max_batch
        self.max_texts = max_batch + max_queue
        self._batch = ContinuousBatch(generator, max_batch)
        if generator.model.device.type == "cuda":
            self._batch.warm_up()
        self._texts: dict[int, Text] = {}  # by id of the sequence
        # What other threads ask for. The thread takes it over between two steps, because only it
        # may touch the batch.
        self._added: list[Text] = []
        self._removed: list[Text] = []
        self._stopping = False
        self._changed = threading.Condition()  # guards these three and _texts
        self._seconds_per_text = 1.0  # an average, for Retry-After
        self._thread = threading.Thread(target=self._run, name=f"engine of {name}", daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> Submission:
        """Queue sequences; call it in the event loop that reads their updates.

        Raises QueueFull.
        """
        submission = Submission(self, sequences)
        texts = submission.texts
        with self._changed:
            n_too_many = len(self._texts) + len(texts) - self.max_texts
            if n_too_many > 0:
                # The time after which this many texts have ended: max_batch of them run at once.
                seconds = self._seconds_per_text * n_too_many / self.max_batch
                raise QueueFull(max(1, math.ceil(seconds)))
            for text in texts:
                self._texts[id(text.sequence)] = text
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
        # A copy, because the thread goes on; the numbers may be of two neighboring steps.
        running = list(self._batch.running)
        n_cached = sum(row.n_read for row in running)
        context_len = min(self.generator.context_len, self.generator.config.max_seq_len)
        return {
            "running": len(running),
            "waiting": max(0, len(self._texts) - len(running)),
            "cache_used": n_cached / (self.max_batch * context_len),
        }

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
        """Decode until stop() is called: the body of the thread."""
        while True:
            with self._changed:
                self._wait_for_work()
                if self._stopping:
                    return
                added = self._added
                removed = self._removed
                self._added = []
                self._removed = []
            for text in added:
                self._batch.add(text.sequence)
            for text in removed:
                self._batch.remove(text.sequence)
                self._forget(text, "cancelled")
            self._deliver(self._step())

    def _wait_for_work(self) -> None:
        """Wait until there is something to do, and give back memory if that takes long."""
        timeout = IDLE_SECONDS
        while not (self._added or self._removed or self._stopping) and self._batch.is_idle:
            is_notified = self._changed.wait(timeout)
            if not is_notified:
                return_free_memory()
                timeout = None  # once per pause is enough

    def _step(self) -> list[TextUpdate]:
        try:
            return self._batch.step()
        except Exception:  # a bug, or no memory: nobody knows which text is at fault
            log.exception("decoding failed; all texts of %s end", self.name)
            return self._fail_all()

    def _fail_all(self) -> list[TextUpdate]:
        """End all texts that were given to the batch; those that wait may still succeed."""
        error = RunError("decoding failed; see the log of the server")
        self._batch.clear()
        failed = []
        with self._changed:
            # Not only those in the batch, which may have lost some.
            for text in self._texts.values():
                if text not in self._added:
                    failed.append(TextUpdate(text.sequence, "", [], True, error))
        return failed

    def _deliver(self, steps: list[TextUpdate]) -> None:
        now = time.perf_counter()
        # One call per event loop and step: each call wakes the loop up.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Submission, TextUpdate]]] = {}
        for update in steps:
            text = self._texts[id(update.sequence)]
            self._measure(text, update, now)
            submission = text.submission
            by_loop.setdefault(submission.loop, []).append((submission, update))
        for loop, deliveries in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, deliveries)

    def _measure(self, text: Text, update: TextUpdate, now: float) -> None:
        metrics = self.metrics
        completion = text.sequence.completion
        metrics.new_tokens.labels(self.name).inc(len(update.sampled))
        if text.first_token is None and update.sampled:
            text.first_token = now
            text.n_first = len(update.sampled)
            metrics.first_token.labels(self.name).observe(now - text.arrived)
            metrics.prompt_tokens.labels(self.name).inc(completion.prompt_tokens)
            metrics.cached_tokens.labels(self.name).inc(text.sequence.n_shared)
        if not update.has_ended:
            return
        text.end = now
        seconds = now - text.arrived
        metrics.whole.labels(self.name).observe(seconds)
        n_between = len(completion.token_ids) - 1
        if n_between > 0:
            mean = (now - text.first_token) / n_between
            metrics.per_token.labels(self.name).observe(mean)
        self._seconds_per_text += 0.1 * (seconds - self._seconds_per_text)
        reason = "error" if update.error else completion.finish_reason
        self._forget(text, reason)

    def _forget(self, text: Text, reason: str) -> None:
        with self._changed:
            # A text may have ended before its removal was seen; it counts once.
            if self._texts.pop(id(text.sequence), None) is not None:
                self.metrics.texts.labels(self.name, reason).inc()


def _put_all(deliveries: list[tuple[Submission, TextUpdate]]) -> None:
    for submission, update in deliveries:
        submission.put(update)
