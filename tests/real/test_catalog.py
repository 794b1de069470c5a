"""Every configuration of the catalog: traced as it trains untraced, judged right, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradtrace
from gradtrace import errors
from tests.real.catalog import ENTRIES
from tests.real.catalog.entry import Entry
from tests.real.training import train

TRACED = [entry for entry in ENTRIES if entry.refused is None]
REFUSED = [entry for entry in ENTRIES if entry.refused is not None]


@pytest.mark.parametrize("entry", TRACED, ids=lambda entry: entry.name)
def test_traced_runs_train_as_if_untraced_and_are_judged_right(
    entry: Entry, tmp_path: Path
) -> None:
    assert train(entry.setup, tmp_path / "trace") == train(entry.setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    if entry.finding is None:
        assert result.verdict == "pass", (result.first, result.notes)
    else:
        assert result.first is not None
        assert (result.first.law, result.first.cause) == entry.finding, entry.reference
    assert result.laws["end_to_end"].checked > 0
    assert result.laws["reduce"].checked > 0
    assert result.laws["unscale_clip"].checked > 0


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
def test_what_cannot_be_traced_is_refused_by_name_before_anything_is_replaced(
    entry: Entry, tmp_path: Path
) -> None:
    assert entry.refused is not None
    with pytest.raises(errors.UnsupportedEngineError, match=entry.refused):
        train(entry.setup, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
