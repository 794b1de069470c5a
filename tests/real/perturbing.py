"""Train from weights one unit in the last place away, as `gradtrace run --perturb-ulp` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace.testing.ranks import run_ranks
from tests.real.training import Outcome, Setup, train_rank


def _rank(
    rank: int, setup: Setup, out_dir: Path | None, sample: int, options: dict[str, Any]
) -> Outcome:
    from gradtrace.capture.adapters.select import patch_initialize
    from gradtrace.capture.perturb import perturb_ulp

    restore = patch_initialize(lambda engine: None, lambda model: perturb_ulp(model, sample))
    try:
        return train_rank(rank, setup, out_dir, options, None)
    finally:
        restore()


def train_perturbed(
    setup: Setup, out_dir: Path | None, sample: int, **options: Any
) -> list[Outcome]:
    """Train on all ranks from perturbed weights; traced into ``out_dir`` unless it is None."""
    options.setdefault("on_error", "raise")
    return run_ranks(setup.ranks, _rank, setup, out_dir, sample, options)
