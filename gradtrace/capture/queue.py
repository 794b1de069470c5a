"""Write records in a thread of its own, behind a queue that is bounded in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from gradtrace.trace.writer import RankWriter

QUEUE_BYTES: Final = 256 * 1024 * 1024

Job = Callable[[RankWriter], None]


class WriterQueue:
    """Hand jobs to the one thread that touches the trace's files.

    A full queue blocks the caller: a record is never dropped because the disk is slow. When a write
    fails, what was pending becomes gaps, later jobs are discarded, and `failure` says why; nothing
    is raised into the training.

    Args:
        writer: the rank's writer; only the thread uses it from now on.
        max_bytes: copies waiting in the queue may hold this much.
    """

    def __init__(self, writer: RankWriter, max_bytes: int = QUEUE_BYTES) -> None:
        self.failure: BaseException | None = None
        self._writer = writer
        self._max_bytes = max_bytes
        self._jobs: deque[tuple[Job, int]] = deque()
        self._waiting_bytes = 0
        self._closing: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gradtrace-writer", daemon=True)
        self._thread.start()

    def put(self, job: Job, size_bytes: int = 0) -> None:
        """Add a job, waiting while the queue holds more than its bound."""
        with self._changed:
            while (
                self._waiting_bytes > 0
                and self._waiting_bytes + size_bytes > self._max_bytes
                and self._thread.is_alive()
            ):
                self._changed.wait(0.5)
            if not self._thread.is_alive():
                self.failure = self.failure or RuntimeError("the writer thread is dead")
                return
            self._jobs.append((job, size_bytes))
            self._waiting_bytes += size_bytes
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Write all that waits, seal it with this reason, and end the thread."""
        with self._changed:
            self._closing = reason
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and self._closing is None:
                    self._changed.wait()
                if not self._jobs:
                    break
                job, size_bytes = self._jobs.popleft()
            self._attempt(job)
            del job  # its copy is freed before the next one is waited for
            with self._changed:
                self._waiting_bytes -= size_bytes
                self._changed.notify_all()
        reason = self._closing
        if self.failure is not None:
            reason = f"writing failed: {self.failure}"[:500]
        self._attempt(lambda writer: writer.seal(reason), last=True)

    def _attempt(self, job: Job, *, last: bool = False) -> None:
        if self.failure is not None and not last:
            return
        try:
            job(self._writer)
        except Exception as error:  # the thread must outlive any failure, to say what was lost
            first = self.failure is None
            ending = f"writing failed: {error}"[:500]
            self.failure = self.failure or error
            self._writer.drop_pending("write_failed", f"{type(error).__name__}: {error}")
            if first and last:
                self._attempt(lambda writer: writer.seal(ending), last=True)
