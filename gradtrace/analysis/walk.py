"""Follow what is known of two runs' weights from step to step.

Until something differs, both runs provably begin each step with the same weights, and their local
gradients must be the same. After a difference within rounding they must not: it grows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradtrace.analysis.compare import Outcome, Step
from gradtrace.analysis.gate import Pair
from gradtrace.analysis.growth import grown
from gradtrace.analysis.judging import ratio
from gradtrace.analysis.series import Growth
from gradtrace.analysis.sides import Side
from gradtrace.trace.records import Json


@dataclass
class Walk:
    """Hold what is known of the two runs as the steps go by.

    Attributes:
        counts, growth, notes: what `results.DiffResult` will hold.
        same_start: nothing that was recorded before the step differs, so its weights are equal.
        drifted: earlier differences explain that they are not.
        last: the step before, or ``None``.
        doubts: what could not be compared or judged, in words; none means that the verdict is sure.
        by_size: something is called rounding because of its size alone.
        widest: the largest relative difference that rounding explains, and where.
        first: the first divergence.
        story: a cause and a sentence for it, should no law be broken.
    """

    counts: Counter[str] = field(default_factory=Counter)
    growth: list[Growth] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    same_start: bool = True
    drifted: bool = False
    last: int | None = None
    doubts: dict[str, None] = field(default_factory=dict)
    by_size: bool = False
    widest: tuple[float, str] = (0.0, "")
    first: Outcome | None = None
    story: tuple[str, str] = ("unknown", "")

    def doubt(self, text: str) -> None:
        """Add a note that makes the verdict inconclusive, once."""
        self.doubts[text] = None
        self.note(text)

    def note(self, text: str) -> None:
        """Add a note once."""
        self.notes[text] = None


def begin(walk: Walk, sides: tuple[Side, Side], step: int) -> None:
    """Decide what is known of the weights when a step begins."""
    if walk.last is None:
        walk.same_start = step == 0 and not any(side.align.partial(step) for side in sides)
        moved = [side.align.trace.manifest.perturbation for side in sides]
        if moved[0] != moved[1]:  # weights that differ on purpose, by the least that they can
            walk.same_start, walk.drifted = False, True
    elif step != walk.last + 1:
        walk.same_start = False


def end(walk: Walk, step: Step) -> None:
    """Remember whether anything that was recorded of a step differs."""
    walk.last = step.step
    facts = [side.align.step_end(step.step, side.align.ranks[0]).facts for side in step.sides]
    same = True
    for key in ("lr", "overflow"):
        one, two = facts[0].get(key), facts[1].get(key)
        if _plain(one) != _plain(two):
            same = False
            walk.note(f"{key} differs from step {step.step} on: {one} against {two}")
    optimizers = {
        str(side.align.header(side.align.ranks[0]).effective.get("base_optimizer"))
        for side in step.sides
    }
    counts = step.tally.counts
    same &= len(optimizers) == 1
    same &= not any(counts[name] for name in ("rounding", "undecided", "diverged"))
    walk.drifted |= not same
    walk.same_start = same and counts["equal"] > 0 and not step.partial and not step.tally.lost


def _plain(fact: Json) -> Json:
    """Return a fact so that one learning rate in two groups is the same as in one."""
    return sorted(set(map(str, fact))) if isinstance(fact, list) else fact


def growth_of(step: Step, pairs: Sequence[Pair]) -> Growth:
    """Return how far apart the runs are at a step that was compared."""
    local = [entry for entry in step.tally.samples if entry.point == "local_grad"]
    apart = math.fsum(entry.apart for entry in local)
    mine = math.fsum(entry.mine for entry in local)
    return grown(
        step.sides,
        pairs,
        step.step,
        step.tally.masters,
        local_grad=ratio(apart, mine) if local else None,
        weights=step.origins.weights,
    )
