"""What frameworks reported: written, read, refused when it is wrong, set beside the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tracefiles import change_line, parameter, start

from gradtrace.analysis.reported import Quantity, pair_notes, paired_reports, reported
from gradtrace.analysis.reported import reported_notes as notes_of
from gradtrace.errors import DamagedTraceError
from gradtrace.trace.reader import open_trace
from gradtrace.trace.schema import encode_float
from gradtrace.trace.writer import RankWriter

LOSSES = ((1.0, 3.0), (2.0, 4.0))  # by step and micro-step


def write(
    path: Path, told: dict[str, Any], *, step: int = 1, steps: int = 2, wrt_gas: bool | None = True
) -> Path:
    """Write a trace of one rank and two steps of two micro-steps, with one report."""
    writer = start(path, (parameter(0, (3,)),))
    for number, losses in enumerate(LOSSES):
        for micro_step, loss in enumerate(losses):
            facts = {"loss": loss, "gas": 2, "scale_wrt_gas": wrt_gas, "output_dtypes": []}
            writer.add_record(number, micro_step, "loss", "loss", 0, facts=facts)
        _end(writer, number, {"grad_norm": 0.5 + number, "lr": [0.1 * (number + 1)]})
    writer.add_report(step, steps=steps, source="someone", framework_step=7, values=told)
    writer.seal("closed")
    return path


def _end(writer: RankWriter, step: int, facts: dict[str, Any]) -> None:
    writer.end_step(step, micro_steps=2, records=2, gaps=0, partial=False, facts=facts)


def read(path: Path) -> dict[str, Quantity]:
    (entry,) = reported(open_trace(path))
    assert entry.framework_step == 7
    return dict(entry.quantities)


@pytest.mark.parametrize(
    ("wrt_gas", "recorded"), [(True, 2.5), (False, 5.0)], ids=("divided", "not divided")
)
def test_a_loss_is_averaged_as_it_was_asked_for(
    wrt_gas: bool, recorded: float, tmp_path: Path
) -> None:
    found = read(write(tmp_path / "t", {"loss": recorded}, wrt_gas=wrt_gas))
    assert found["loss"] == Quantity(recorded, recorded, True)
    assert found["grad_norm"] == Quantity(None, 1.5, None)


@pytest.mark.parametrize(
    ("loss", "agrees"),
    [
        (2.5 * (1 + 2**-24), True),
        (2.5001, False),
        (2.50004321, False),
        (5.0, False),
        (2.49999, False),
        (float("nan"), None),
        (float("inf"), None),
    ],
)
def test_what_rounding_does_not_explain_disagrees(
    loss: float, agrees: bool | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "t", {"loss": encode_float(loss)})
    found = read(path)["loss"]
    assert (found.recorded, found.agrees) == (2.5, agrees)
    notes = list(notes_of(reported(open_trace(path))))
    assert len(notes) == (agrees is False)
    if loss == 5.0:
        assert notes == [
            "someone reported a loss of 5 at step 1, and 2.5 is recorded: 2 times as much"
        ]


@pytest.mark.parametrize(
    ("told", "step", "agrees"),
    [
        ({"grad_norm": 1.5}, 1, True),
        ({"grad_norm": 0.75}, 1, False),
        ({"grad_norm": 0.5}, 1, False),  # that was the step before
        ({"lr": 0.1}, 0, True),
        ({"lr": 0.2}, 0, True),  # the next step's: reported after the schedule moved
        ({"lr": 0.3}, 0, False),
        ({"lr": 0.2}, 1, True),
        ({"lr": 0.3}, 1, None),  # the next step is not known
    ],
)
def test_norms_and_rates(
    told: dict[str, float], step: int, agrees: bool | None, tmp_path: Path
) -> None:
    found = read(write(tmp_path / "t", told, step=step, steps=1))
    assert found[next(iter(told))].agrees is agrees


def test_a_loss_that_is_not_wholly_recorded_is_not_compared(tmp_path: Path) -> None:
    unknown = read(write(tmp_path / "weight", {"loss": 9.0}, wrt_gas=None))
    assert unknown["loss"] == Quantity(9.0, None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"step": -1},
        {"steps": 0},
        {"steps": 3},
        {"source": 1},
        {"framework_step": "7"},
        {"values": []},
        {"values": {"loss": "much"}},
        {"values": {"lr": [0.1]}},
    ],
)
def test_a_wrong_report_is_damage(change: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"loss": 2.5})
    segment = sorted((path / "rank-00000").glob("index-*.jsonl"))[-1]
    change_line(segment, lambda body: body["kind"] == "report", lambda body: body.update(change))
    with pytest.raises(DamagedTraceError):
        open_trace(path)


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    one = open_trace(write(tmp_path / "one", {"loss": 2.5, "lr": 0.2}))
    two = open_trace(write(tmp_path / "two", {"loss": 2.25, "lr": 0.2}))
    pairs = paired_reports(one, two)
    assert [(a.step, b.step) for a, b in pairs] == [(1, 1)]
    assert list(pair_notes(pairs)) == ["reported loss: first differs at step 1, 2.5 against 2.25"]
