"""Examine one configuration on forked CPU ranks, and make one result of what they answer."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

from gradtrace.errors import EngineBuildError, GradtraceError, ProbeError
from gradtrace.integrations.doctor import cost, rank
from gradtrace.integrations.doctor.rank import Answer, Order
from gradtrace.integrations.doctor.results import STAND_IN, Check, Reason, Verdict
from gradtrace.testing.ranks import RankError, run_ranks


def check(
    name: str, order: Order, parameters: int | None, progress: Callable[[str], None]
) -> Check:
    """Build the engine, examine it, and trace the stand-in with it.

    Args:
        name: what to call the configuration.
        order: what to build; where to trace is chosen here.
        parameters: scale the cost to so many, or None.
        progress: told of each stage in one line.

    Raises:
        BadOptionError: the model or a capture option cannot be used.
        EngineBuildError: DeepSpeed makes no engine.
    """
    model = order.model
    with tempfile.TemporaryDirectory(prefix="gradtrace-doctor-") as directory:
        place = Path(directory)
        trace = place / "trace"
        order = dataclasses.replace(order, trace=None if model else trace, log=place / "log")
        answer = measured = _run(name, order)
        if model is not None and answer.refusal is None:
            progress("tracing two steps of the stand-in model")
            measured = _run(
                name, dataclasses.replace(order, model=None, trace=trace, params=("*",))
            )
        found = Check(
            name=name,
            verdict=_verdict(answer.refusal or measured.refusal),
            model=model or STAND_IN,
            optimizer=answer.optimizer,
            adapter=answer.adapter,
            reason=_reason(answer.refusal or measured.refusal),
            changes=answer.changes,
            probes=answer.probes,
            effective=answer.effective,
            notes=tuple(dict.fromkeys((*answer.notes, *measured.notes))),
        )
        if found.verdict != "traced":
            return found
        if measured.trained is not None:
            reason = Reason(
                "training_failed",
                measured.trained,
                "the stand-in model to train for two steps",
                "Look whether this DeepSpeed and this torch go together.",
            )
            return dataclasses.replace(found, verdict="unknown", reason=reason)
        target = parameters or (answer.parameters if model else None)
        source = "--parameters" if parameters else "--model"
        return cost.with_cost(found, trace, measured.parameters, target, source)


def _verdict(refusal: GradtraceError | None) -> Verdict:
    if refusal is None:
        return "traced"
    return "unbound" if isinstance(refusal, ProbeError) else "refused"


def _reason(error: GradtraceError | None) -> Reason | None:
    if error is None:
        return None
    return Reason(error.slug, error.found, error.expected, error.remedy)


def _run(name: str, order: Order) -> Answer:
    """Build the engine on all ranks; rank 0 answers.

    Raises:
        EngineBuildError: it could not be built.
    """
    try:
        answers = run_ranks(order.ranks, rank.look_on, order)
        failure = next((a.failure for a in answers if a.failure is not None), None)
    except RankError as error:
        failure = f"{_last_line(str(error))}; {_last_line(_read(order.log))}"
    if failure is not None:
        raise EngineBuildError(
            f"an engine that DeepSpeed did not make: {rank.short(failure)}",
            where=name,
            expected=f"deepspeed.initialize to succeed on {order.ranks} CPU ranks",
            remedy="Correct the ds_config, or give --ranks a number that fits it.",
        )
    answer: Answer = answers[0]
    return answer


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
