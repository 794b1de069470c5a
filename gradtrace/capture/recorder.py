"""Turn sightings into records of the open step, and trouble into gaps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from gradtrace.capture.clock import StepClock
from gradtrace.capture.digest import Digest, summarize
from gradtrace.capture.options import CaptureOptions
from gradtrace.capture.queue import Job, WriterQueue
from gradtrace.capture.snapshot import Sighting, Snapshot, dtype_name, resolve, take
from gradtrace.errors import CaptureError
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.points import BY_NAME, DIGESTED, LATER
from gradtrace.trace.writer import RankWriter


class Recorder:
    """Record one rank's steps.

    Attributes:
        recording: whether sightings are recorded now; probes look at this first and do nothing else.

    Args:
        rank: global rank, for warnings.
        options: the capture options.
        clock: the tracer's clock.
        captured: indices of the parameters in the plan.
        queue: where copies go.
    """

    def __init__(
        self,
        rank: int,
        options: CaptureOptions,
        clock: StepClock,
        captured: frozenset[int],
        queue: WriterQueue,
    ) -> None:
        self.recording = options.selects_step(0)
        self._step_open = self.recording
        self._rank = rank
        self._options = options
        self._clock = clock
        self._captured = captured
        self._queue = queue
        self._ended: int | None = None  # the last step that was closed
        self._records = 0
        self._gaps = 0
        self._seen = 0  # sightings of gradients, whether or not the plan selects anything of them
        self._occurrences: Counter[tuple[int | None, str, str]] = Counter()
        self._tensor_bytes = 0
        self._disarmed = False
        self._warned = False

    @property
    def step_open(self) -> bool:
        """Return whether this step was selected and can still be closed."""
        return self._step_open and self._queue.failure is None

    def stop(self) -> None:
        """Record nothing more."""
        self.recording = self._step_open = False
        self._disarmed = True

    def record(self, point: str, sighting: Sighting) -> None:
        """Copy what was seen and hand it to the writer thread."""
        self._seen += point not in LATER or self._options.points <= LATER
        micro_step = self._clock.micro_step if BY_NAME[point].per_micro_step else None
        snapshot: Snapshot | None = None
        digest: Digest | None = None
        if sighting.parts and self._digests(point, sighting):
            digest = summarize(sighting, self._captured)
            if digest is None:
                return
        elif sighting.parts:
            limit = self._options.max_bytes
            if limit is not None and self._tensor_bytes >= limit:
                self.gap(point, sighting.unit, "over_budget", f"max_bytes = {limit}")
                return
            snapshot = take(sighting, self._captured)
            if snapshot is None:
                return
            self._tensor_bytes += snapshot.size_bytes
        key = (micro_step, point, sighting.unit)
        occurrence = self._occurrences[key]
        self._occurrences[key] += 1
        self._records += 1
        step, unit, facts = self._clock.step, sighting.unit, dict(sighting.facts)
        if digest is not None:
            facts["digest"] = digest.values
        kept = snapshot or digest

        def job(writer: RankWriter) -> None:
            writer.add_record(
                step,
                micro_step,
                point,
                unit,
                occurrence,
                dtype=None if kept is None else kept.dtype,
                layout=None if kept is None else kept.layout,
                data=None if snapshot is None else snapshot.raw(),
                facts=resolve(facts),
            )

        self._put(job, 0 if snapshot is None else snapshot.size_bytes)

    def _digests(self, point: str, sighting: Sighting) -> bool:
        """Say whether a digest is kept: as planned, or of a dtype that the format has no values of."""
        return point in self._options.digested or (
            point in DIGESTED and dtype_name(sighting.parts[0][0].dtype) not in DTYPES
        )

    def gap(
        self,
        point: str | None,
        unit: str | None,
        reason: str,
        detail: str,
        *,
        whole_step: bool = False,
    ) -> None:
        """State that something planned is not recorded, of this micro-step or of all, and warn once."""
        per_micro_step = not whole_step and (point is None or BY_NAME[point].per_micro_step)
        micro_step = self._clock.micro_step if per_micro_step else None
        self._gaps += 1
        step = self._clock.step
        self._put(lambda writer: writer.add_gap(step, micro_step, point, unit, reason, detail), 0)
        self.warn(f"a gap in step {step}: {reason} ({detail})")

    def end_step(self, facts: Mapping[str, Any], *, partial: bool) -> None:
        """Close the open step with its scalars."""
        if self._seen + self._gaps == 0:
            self.trouble("no_records", "no probe fired in a finished step")
        step, micro_steps = self._clock.step, self._clock.micro_steps
        records, gaps = self._records, self._gaps
        # The optimizer may change a 0-d tensor before the writer thread resolves it.
        held = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in facts.items()
        }

        def job(writer: RankWriter) -> None:
            writer.end_step(
                step,
                micro_steps=micro_steps,
                records=records,
                gaps=gaps,
                partial=partial,
                facts=resolve(held),
            )

        self._ended = step
        self._put(job, 0)

    def report(
        self, values: Mapping[str, Any], *, steps: int, source: str, framework_step: int | None
    ) -> None:
        """Note what a framework reported, if the step that ended last is in the trace."""
        step = self._clock.step - 1
        if step != self._ended or steps > step + 1:
            return

        def job(writer: RankWriter) -> None:
            writer.add_report(
                step,
                steps=steps,
                source=source,
                framework_step=framework_step,
                values=resolve(values),
            )

        self._put(job, 0)

    def next_step(self) -> None:
        """Begin the step that the clock now shows."""
        self._records = self._gaps = self._seen = 0
        self._occurrences.clear()
        self._step_open = self.recording = (
            not self._disarmed
            and self._queue.failure is None
            and self._options.selects_step(self._clock.step)
        )

    def seal_soon(self) -> None:
        """Ask the writer thread to seal all that waits, without waiting for it."""
        self._put(lambda writer: writer.seal(), 0)

    def guard(self, point: str | None, unit: str | None = None) -> Guard:
        """Return a context that keeps an observer's exception out of the training."""
        return Guard(self, point, unit)

    def trouble(
        self, reason: str, detail: str, point: str | None = None, unit: str | None = None
    ) -> None:
        """Record a gap and stop recording; raise instead if the options ask for it.

        Raises:
            CaptureError: under ``on_error="raise"``.
        """
        self.gap(point, unit, reason, detail)
        self._disarmed = True
        self.recording = False
        if self._options.on_error == "raise":
            raise _capture_error(f"{reason}: {detail}", f"step {self._clock.step}")

    def warn(self, text: str) -> None:
        """Warn, once a rank."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"gradtrace, rank {self._rank}: {text}", RuntimeWarning, stacklevel=2)

    def _put(self, job: Job, size_bytes: int) -> None:
        self._queue.put(job, size_bytes)
        error = self._queue.failure
        if error is not None and not self._disarmed:
            self.stop()
            self.warn(f"writing failed, tracing stops: {type(error).__name__}: {error}")
            if self._options.on_error == "raise":
                raise _capture_error(f"{type(error).__name__}: {error}", "the writer thread")


class Guard:
    """Keep an exception inside a probe out of the training, unless asked to raise it."""

    def __init__(self, recorder: Recorder, point: str | None, unit: str | None) -> None:
        self._recorder = recorder
        self._point = point
        self._unit = unit

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, CaptureError):
            return False
        detail = f"{type(error).__name__}: {error}"
        self._recorder.trouble("probe_failed", detail, self._point, self._unit)
        return True


def _capture_error(found: str, where: str) -> CaptureError:
    return CaptureError(
        found,
        where=where,
        expected="every planned record (on_error='raise')",
        remedy="Fix the cause, or use on_error='disarm' to train on untraced.",
    )
