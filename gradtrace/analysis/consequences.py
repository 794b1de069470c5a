"""Tell the findings that follow from another one, so that a fault is reported once.

Every hop is judged by its own recorded inputs, so a fault breaks one law. What is listed here is all
that may break behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gradtrace.analysis.agree import said_too
from gradtrace.analysis.laws import replicate
from gradtrace.analysis.laws.common import Found, Scene
from gradtrace.analysis.results import Finding

_AFTER: Final = frozenset({"update", "publish"})  # what comes after a step's gradient
_NO_HOP: Final = frozenset({"unscale_clip", "end_to_end", "seed", "replicate"}) | _AFTER
_GIVEN: Final = ("master_grad", "clipped_grad")
_LAST: Final = 2**62  # sorts behind every micro-step


def drop_consequences(scene: Scene, seen: int) -> Counter[str]:
    """Take out of a step's findings those that an earlier broken hop explains.

    Within a step: the end-to-end law contains all others; where the ranks' buckets hold different
    parameters, the sum of neither is what it should be; what differs between ranks came from a hop
    that broke on one; a norm was taken of something else where ``master`` is broken; a rank that
    takes another micro-step for the last one starts its accumulation anew after it; what the bucket
    lacks may have been added after the collective; a rank whose gradient became infinite or NaN
    leaves the step out alone where ranks do not tell each other; a weight that did not reach one
    rank differs from the others'; and an optimizer that did something else with the weights than its
    rule also leaves other moments.

    From step to step, where every rank updates its own copy of the weights (stage 0): ranks that were
    given different gradients, or updated differently, begin the next step with different weights; a
    step that some of them left out also parts their loss scales and learning rates. Once apart they
    stay so. What is not known to have parted them is a finding of its own.

    Args:
        scene: the step that was judged.
        seen: how many of the ledger's findings are of the steps before it.

    Returns:
        How many broken checks of each law were taken out.
    """
    ledger = scene.ledger
    now = _gather(scene, ledger.found[seen:])
    kept: list[Found] = []
    dropped: Counter[str] = Counter()
    for entry in ledger.found[seen:]:
        if _follows_within(now, entry) or _follows_from_before(scene, entry):
            dropped[entry.finding.law] += 1
        elif entry.finding.law == "pack" and entry.param in now.late:
            kept.append(said_too(entry, now.late[entry.param]))
        else:
            kept.append(entry)
    ledger.apart = _apart(ledger.apart, now, ledger.found[seen:])
    ledger.found[seen:] = kept
    return dropped


@dataclass(frozen=True, slots=True)
class _Known:
    """Hold what findings can explain others by.

    Attributes:
        hops: parameters of which a hop broke.
        judged: parameters of which the gradient broke, but for ``seed`` and ``replicate``.
        updated: parameters whose weights the optimizer's step left wrong.
        published: parameters whose weights at the start of the step are wrong.
        given: parameters of which the ranks' optimizers were given different gradients.
        mixed: (micro-step, parameter) where the ranks' buckets hold different parameters.
        claims: ranks that were wrong about the boundary.
        parted_norm: whether the ranks' gradients differed before they were clipped, by norms that then
            differ for all parameters.
        laws: laws that broke.
        late: parameters whose bucket lacks what was added after the collective, and the words for it.
        infinite: whether something became infinite or NaN, or a step was left out by some ranks.
    """

    hops: frozenset[int | None]
    judged: frozenset[int | None]
    updated: frozenset[int | None]
    published: frozenset[int | None]
    given: frozenset[int | None]
    parted_norm: bool
    mixed: frozenset[tuple[int | None, int | None]]
    claims: tuple[Finding, ...]
    laws: frozenset[str]
    late: Mapping[int | None, str]
    infinite: bool


def _gather(scene: Scene, found: Sequence[Found]) -> _Known:
    mixed: set[tuple[int | None, int | None]] = set()
    if any(entry.finding.cause == "order_mismatch" for entry in found):
        mixed.update(replicate.mismatched(scene))
    hops = {entry.param for entry in found if entry.finding.law not in _NO_HOP}
    return _Known(
        hops=frozenset(hops | {param for _, param in mixed}),
        judged=frozenset(
            e.param for e in found if e.finding.law not in {"seed", "replicate"} | _AFTER
        ),
        updated=frozenset(
            e.param
            for e in found
            if (e.finding.law, e.finding.point) == ("update", "master_weight")
        ),
        published=frozenset(e.param for e in found if e.finding.law == "publish"),
        given=frozenset(
            e.param
            for e in found
            if e.finding.law == "replicate" and e.finding.point in _GIVEN and e.param is not None
        ),
        parted_norm=any(
            (e.finding.law, e.finding.point) == ("replicate", "master_grad") and e.param is not None
            for e in found
        ),
        mixed=frozenset(mixed),
        claims=tuple(e.finding for e in found if e.finding.cause == "boundary_mismatch"),
        laws=frozenset(entry.finding.law for entry in found),
        late=_added_late(found),
        infinite=any(
            e.finding.cause == "non_finite" or replicate.is_overflow(e.finding) for e in found
        ),
    )


def _follows_within(now: _Known, entry: Found) -> bool:
    """Say whether another finding of the same step explains this one."""
    finding = entry.finding
    if finding.law == "end_to_end":
        return entry.param in now.hops
    if finding.law == "replicate":
        if replicate.is_overflow(finding):
            return now.infinite and now.laws != {"replicate"}
        if finding.cause == "weights_differ" and entry.param in now.published:
            return True
        if finding.point == "clipped_grad" and entry.param is not None and now.parted_norm:
            return True
        return entry.numel > 0 and entry.param in now.judged
    if finding.law == "update" and finding.point == "optimizer_state":
        return entry.param in now.updated
    if finding.law == "unscale_clip" and entry.param is None:
        return "master" in now.laws
    if finding.law == "reduce" and (finding.micro_step, entry.param) in now.mixed:
        return True
    if finding.law == "master" and entry.param in now.late:
        return True
    return _after_boundary(finding, now.claims)


def _added_late(found: Sequence[Found]) -> dict[int | None, str]:
    """Return the parameters whose bucket lacks what the optimizer is given all the same, unreduced.

    That is one fault, an addition after the collective: the bucket shows it first. The words for it
    go with them.
    """
    lacking = {entry.param for entry in found if entry.finding.law == "pack"}
    return {
        entry.param: next(c.detail for c in entry.also if c.cause == "not_reduced")
        for entry in found
        if entry.finding.law == "master"
        and entry.param in lacking
        and any(candidate.cause == "not_reduced" for candidate in entry.also)
    }


def _follows_from_before(scene: Scene, entry: Found) -> bool:
    """Say whether the step before left the ranks apart, in a trace whose ranks share no weights."""
    finding, apart = entry.finding, scene.ledger.apart
    if finding.law != "replicate" or not all(scene.replicated(rank) for rank in scene.ranks):
        return False
    if finding.cause == "weights_differ":
        return bool({None, entry.param} & apart)
    return entry.param is None and finding.point in ("loss", "clipped_grad") and None in apart


def _apart(
    before: frozenset[int | None], now: _Known, found: Sequence[Found]
) -> frozenset[int | None]:
    """Return the parameters of which the ranks hold different copies after a step.

    What the model shows of them may be equal for a while, in 16 bits.
    """
    differ = [entry for entry in found if entry.finding.law == "replicate"]
    left_out = any(replicate.is_overflow(entry.finding) for entry in differ)
    params = {entry.param for entry in differ if entry.finding.cause == "weights_differ"}
    everything = {None} if left_out else set()
    return before | now.given | now.updated | params | everything


def _after_boundary(finding: Finding, claims: Sequence[Finding]) -> bool:
    """Say whether micro-steps are lost because a rank had taken an earlier one for the last."""
    if finding.cause != "dropped_micro_steps":
        return False
    micro_step = _LAST if finding.micro_step is None else finding.micro_step
    return any(
        claim.micro_step is not None
        and claim.micro_step < micro_step
        and claim.rank in (None, finding.rank)
        for claim in claims
    )
