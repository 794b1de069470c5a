"""Hold what every law needs: what is judged, what was counted, and the check itself.

A law is a function of a `Scene` (and, for most, a parameter). It finds its inputs through the
alignment, recomputes its output as an `Estimate` and calls `check`. What cannot be judged is a
`Lack`: left out by the plan or the stage (counted as skipped), or lost (the verdict cannot be
``pass`` then).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from gradtrace.analysis.align import Alignment, Event
from gradtrace.analysis.bounds import Estimate, Judgement, judge
from gradtrace.analysis.diagnose import MOST_SCORE, Candidate, Tested, explain
from gradtrace.analysis.fit import Fit, fit
from gradtrace.analysis.hypotheses import WORLD, Context, Design, Hypothesis
from gradtrace.analysis.results import LAWS, Finding, LawCount
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64
from gradtrace.trace.records import Json

SHOWN: Final = 3  # how many wrong coefficients a sentence names


@dataclass(frozen=True, slots=True)
class Lack:
    """Say why a law cannot be judged somewhere.

    Attributes:
        kind: ``skip`` (never planned, or not there at this stage) or ``gap`` (lost).
        reason: a few words, without step or parameter, so that equal reasons are counted together.
    """

    kind: Literal["skip", "gap"]
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """Say what is being judged.

    Attributes:
        rank: the rank that holds the judged values, or ``None`` where it is several.
        param: index of the parameter, or ``None`` for scalars and padding.
        offset: first judged element in the full parameter.
    """

    law: str
    step: int
    micro_step: int | None
    rank: int | None
    param: int | None
    point: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """Hold a finding until findings are folded.

    Attributes:
        param: index of the parameter in the table.
        numel: how many elements were judged; few of them fit many causes.
        also: all that fits, some perhaps by chance.
        evidence: the sentence with the numbers, which goes with any cause.
        tested: what causes were tested on; ``None`` for facts.
    """

    finding: Finding
    param: int | None
    numel: int
    also: tuple[Candidate, ...] = ()
    evidence: str = ""
    tested: Tested | None = None


@dataclass
class Ledger:
    """Count what was checked and gather what broke, over a whole audit.

    Attributes:
        apart: parameters of which the steps that were judged left the ranks different copies; ``None``
            among them where one was left out by some ranks only, so that all may differ.
    """

    checked: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, Counter[str]] = field(
        default_factory=lambda: {law: Counter() for law in LAWS}
    )
    lost: dict[str, Counter[str]] = field(default_factory=lambda: {law: Counter() for law in LAWS})
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LAWS, 0.0))
    found: list[Found] = field(default_factory=list)
    apart: frozenset[int | None] = frozenset()

    def lack(self, law: str, lack: Lack, count: int = 1) -> None:
        """Count something that could not be judged."""
        (self.skipped if lack.kind == "skip" else self.lost)[law][lack.reason] += count

    def passed(self, law: str, worst_ratio: float = 0.0) -> None:
        """Count a check that holds."""
        self.checked[law] += 1
        self.worst[law] = max(self.worst[law], worst_ratio)

    def broke(self, found: Found, worst_ratio: float) -> None:
        """Count a check that does not hold, and keep its finding."""
        self.passed(found.finding.law, worst_ratio)
        self.broken[found.finding.law] += 1
        self.found.append(found)

    def counts(self) -> dict[str, LawCount]:
        """Return the counts of every law, lost ones among the skipped."""
        return {
            law: LawCount(
                checked=self.checked[law],
                broken=self.broken[law],
                skipped=self.skipped[law].total() + self.lost[law].total(),
                worst_ratio=self.worst[law],
                skip_reasons=dict(self.skipped[law] + self.lost[law]),
            )
            for law in LAWS
        }


@dataclass(frozen=True, slots=True)
class Norm:
    """Hold a recomputed L2 norm of the gradients given to the optimizers, loss scale included.

    Attributes:
        value: float64; not finite where a gradient is not.
        relative: how far DeepSpeed's own computation may lie from it, relative to it.
        absolute: the same by underflow.
    """

    value: float
    relative: float
    absolute: float


@dataclass(frozen=True)
class Scene:
    """Hold one step of a trace, and where the results go.

    Attributes:
        norms: members of a group -> the norm over their shards, once it was computed.
    """

    alignment: Alignment
    step: int
    ledger: Ledger
    norms: dict[tuple[int, ...], Norm | Lack] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the trace."""
        return self.alignment.ranks

    @property
    def micro_steps(self) -> range:
        """Return the backward passes of the step."""
        return self.alignment.micro_steps(self.step)

    @property
    def partial(self) -> bool:
        """Say whether the step was wrapped in the middle of its window."""
        return self.alignment.partial(self.step)

    def name(self, param: int) -> str:
        """Return a parameter's name."""
        return self.alignment.parameters[param].name

    def fact(self, rank: int, name: str) -> Json:
        """Return an effective setting of a rank, or ``None``."""
        return self.alignment.header(rank).effective.get(name)

    def settings_dtypes(self, rank: int, *names: str) -> tuple[Dtype, ...]:
        """Return the dtypes that effective settings name, those known to the format."""
        values = (self.fact(rank, name) for name in names)
        return tuple(DTYPES[value] for value in values if value in DTYPES)

    def replicated(self, rank: int) -> bool:
        """Say whether every rank holds every parameter whole (stage 0)."""
        return self.fact(rank, "replicated") is True

    def context(self, place: Place, dtype: Dtype, stored: Dtype, *, lost: float = 0.0) -> Context:
        """Return what an explanation of a place may refer to.

        Args:
            dtype: the coarsest dtype that the values passed through.
            stored: the dtype in which they were recorded.
            lost: the largest error of one operation by underflow, where a dtype other than the
                coarsest has the narrowest range.
        """
        rank = self.ranks[0] if place.rank is None else place.rank
        header = self.alignment.header(rank)
        end = self.alignment.step_end(self.step, rank)
        named = {
            WORLD: len(header.dp_ranks),
            "the accumulation steps": header.effective.get("gradient_accumulation_steps"),
            "the micro-steps": end.micro_steps,
            "the loss scale": end.facts.get("loss_scale"),
            "65536": 65536,
        }
        factors = {
            name: float(value)
            for name, value in named.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        }
        when = "" if place.micro_step is None else f" at micro-step {place.micro_step}"
        averages = place.law not in ("accumulate_local", "accumulate")
        return Context(f"{place.point}{when}", place.offset, dtype, stored, factors, lost, averages)

    def lack(
        self, point: str, micro_step: int | None, rank: int, param: int | None = None
    ) -> Lack | None:
        """Say why a point's records may be missing on a rank, or ``None`` if nothing is lost."""
        status = self.alignment.header(rank).points[point]
        if status != "recorded":
            return Lack("skip", f"{point} is {status}")
        gaps = self.alignment.gaps(self.step, point, micro_step, param=param, ranks=(rank,))
        if gaps:
            return Lack("gap", f"{point} was lost ({gaps[0].reason})")
        return None

    def gradients(self, micro_step: int, rank: int, param: int) -> tuple[Event, ...] | Lack:
        """Return the occurrences of ``local_grad``; none means that there was no gradient."""
        lack = self.lack("local_grad", micro_step, rank, param)
        if lack is not None:
            return lack
        if not self.alignment.parameters[param].captured:
            return Lack("skip", "the parameter is not captured")
        return self.alignment.events(self.step, micro_step, "local_grad", rank, param)


def coarsest(*dtypes: Dtype) -> Dtype:
    """Return the dtype with the largest unit roundoff."""
    return max(dtypes, key=lambda dtype: dtype.unit_roundoff)


def largest_before(events: Iterable[Event], order: int) -> Event | None:
    """Return the last event recorded before a position in the rank's causal order."""
    before = [event for event in events if event.record.order < order]
    return max(before, key=lambda event: event.record.order, default=None)


def last_of_previous(scene: Scene, event: Event) -> Event | None:
    """Return the last event of the same point, rank and parameter in the step before."""
    previous = scene.alignment.previous_step(scene.step)
    if previous is None:
        return None
    record = event.record
    if record.micro_step is None:
        events = scene.alignment.events(previous, None, record.point, record.rank, event.param)
    else:
        events = scene.alignment.step_events(previous, record.point, record.rank, event.param)
    return events[-1] if events else None


def check(
    scene: Scene,
    place: Place,
    found: Float64,
    estimate: Estimate,
    *,
    context: Context,
    designs: Sequence[Design] = (),
    hypotheses: Callable[[], Iterator[Hypothesis]],
) -> None:
    """Judge recorded values by both tests, and name the cause if either breaks.

    Args:
        found: 1-D recorded values.
        estimate: what the law says of them.
        context: names and dtypes; see `Scene.context`.
        designs: for the coefficient test, ways to split the expected value into labelled terms.
        hypotheses: what might have happened instead; asked for only when the law is broken.
    """
    judgement = judge(found, estimate)
    fits: list[Fit] = []
    if not judgement.broken:
        fits = [
            fit(found, design.terms, estimate, context.dtype, lost=context.lost)
            for design in designs
        ]
    off = next((result for result in fits if result.off), None)
    if not judgement.broken and off is None:
        scene.ledger.passed(place.law, judgement.worst_ratio)
        return
    why = explain(found, estimate, hypotheses(), designs, context)
    test = "bound" if judgement.broken else "coefficients"
    if judgement.broken and not estimate.error.any():
        test = "exact"
    evidence = _evidence(judgement, off, len(found))
    index = judgement.index
    finding = Finding(
        law=place.law,
        cause=why.cause,
        step=place.step,
        micro_step=place.micro_step,
        rank=place.rank,
        param=None if place.param is None else scene.name(place.param),
        point=place.point,
        index=None if index is None else place.offset + index,
        expected=judgement.expected,
        found=judgement.found,
        max_abs=judgement.max_abs,
        rel_l2=judgement.rel_l2,
        bound=None if test == "exact" else judgement.bound,
        detail=f"{why.detail} {evidence}",
        test=test,
        guilty=next(
            (c.rank for c in why.also if (c.cause, c.detail) == (why.cause, why.detail)), None
        ),
    )
    scene.ledger.broke(
        Found(finding, place.param, len(found), why.also, evidence, why.tested),
        judgement.worst_ratio,
    )


def _evidence(judgement: Judgement, off: Fit | None, numel: int) -> str:
    if off is None:
        return f"{judgement.broken} of {numel} elements are outside the rounding bound."
    wrong = sorted(off.off, key=lambda entry: -abs(entry.estimate - 1))
    parts = [
        f"{entry.label} counts {entry.estimate:.4g} times (±{entry.sigma:.1g})"
        for entry in wrong[:SHOWN]
    ]
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return f"Fitted over {off.rows} elements, {'; '.join(parts)}{more}; 1 is right."


def simple_finding(
    scene: Scene,
    place: Place,
    cause: str,
    detail: str,
    *,
    expected: float | None = None,
    found: float | None = None,
) -> None:
    """Report a broken law about facts instead of tensors."""
    error = None if expected is None or found is None else abs(found - expected)
    finding = Finding(
        law=place.law,
        cause=cause,
        step=place.step,
        micro_step=place.micro_step,
        rank=place.rank,
        param=None if place.param is None else scene.name(place.param),
        point=place.point,
        index=None,
        expected=expected,
        found=found,
        max_abs=error,
        rel_l2=None,
        bound=None,
        detail=detail,
        test="exact",
    )
    also = (Candidate(cause, detail, MOST_SCORE),)
    scene.ledger.broke(Found(finding, place.param, 0, also), float("inf"))
