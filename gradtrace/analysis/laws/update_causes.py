"""Say what an optimizer may have done instead of its rule, as weights and moments it would have left.

What is wrong with a step shows in the change that it made, not in the weight: hypotheses scale, turn or
leave out the change, or step with another gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gradtrace.analysis.bounds import Estimate, exact, gamma
from gradtrace.analysis.hypotheses import FEWEST_FREE, ULPS, Context, Hypothesis, weighted
from gradtrace.analysis.laws.optimizers import Adam, Kernel, Sgd, Updated, adam, sgd
from gradtrace.trace.dtypes import Dtype, Float64

_DIGITS: Final = (2, 4, 9)  # of a measured factor: a round one is the likelier
_ONE: Final = 1e-3
Others = Callable[[], Iterator[tuple[str, Float64]]]


@dataclass(frozen=True, slots=True)
class Step:
    """Hold one stretch of a parameter, and all that its step depends on.

    Attributes:
        weight: 1-D, before the step.
        grad: 1-D, as the optimizer was given it.
        moments: by torch's name, 1-D, before the step; without those that do not exist yet.
        settings: the rule and its settings.
        kernel: how Adam's implementation rounds.
        dtype: the coarsest in which any of these is held.
        before: what the optimizer was given in the step before, or ``None``.
        unclipped: the gradient before it was unscaled and clipped, or ``None``.
    """

    weight: Float64
    grad: Float64
    moments: Mapping[str, Float64]
    settings: Adam | Sgd
    kernel: Kernel
    dtype: Dtype
    before: Float64 | None = None
    unclipped: Float64 | None = None

    def take(self) -> Updated:
        """Return what the step must leave."""
        if isinstance(self.settings, Sgd):
            held = self.moments.get("momentum_buffer")
            return sgd(self.weight, self.grad, held, self.settings, self.dtype)
        zeros = np.zeros(len(self.weight))
        first, second = (self.moments.get(name, zeros) for name in ("exp_avg", "exp_avg_sq"))
        return adam(self.weight, self.grad, first, second, self.settings, self.dtype, self.kernel)


def of_weight(
    step: Step, nominal: Estimate, found: Float64, context: Context, others: Others
) -> Iterator[Hypothesis]:
    """Propose what a step may have done to the weights.

    Args:
        nominal: what it should have left.
        found: 1-D, what is recorded after it.
        others: gives (name, weights after the step) of other parameters of that length.
    """
    yield Hypothesis(
        "stale",
        "master_weight is what it was before the step: it was not updated.",
        exact(step.weight),
    )
    yield from _changed(step, nominal, found)
    yield from _other_settings(step)
    for cause, words, grad in _other_gradients(step, context):
        instead = replace(step, grad=grad).take().weight
        yield Hypothesis(cause, f"The optimizer stepped with {words}.", instead)
    if step.moments:
        zeros = dict.fromkeys(step.moments, np.zeros(len(step.weight)))
        instead = replace(step, moments=zeros).take().weight
        yield Hypothesis("zeroed", "The optimizer stepped as if its moments were zero.", instead)
    for name, values in others():
        words = f"The weights of {name} stand here."
        theirs = Estimate(values, nominal.error, nominal.overflow)
        yield Hypothesis("swapped", words, weighted([(1.0, theirs)], step.dtype))


def _changed(step: Step, nominal: Estimate, found: Float64) -> Iterator[Hypothesis]:
    """Propose that the change is right but for a factor, -1 among them."""
    yield Hypothesis(
        "sign_flipped",
        "The step goes the other way: the optimizer ascends.",
        _times(step, nominal, -1.0),
    )
    factor = _ratio(found - step.weight, nominal.value - step.weight, nominal)
    if factor is None:
        return
    lr = step.settings.lr
    for value in dict.fromkeys(float(f"{factor:.{digits}g}") for digits in _DIGITS):
        if min(abs(value - 1), abs(value + 1)) <= _ONE or value == 0:
            continue
        words = (
            f"The step is {value:g} times what the rule gives: it fits a learning rate of "
            f"{lr * value:.6g} where {lr:.6g} is recorded."
        )
        yield Hypothesis("scaled", words, _times(step, nominal, value))


def _times(step: Step, nominal: Estimate, factor: float) -> Estimate:
    """Return the weights that so many times the right change would have left."""
    with np.errstate(invalid="ignore", over="ignore"):
        change = factor * (nominal.value - step.weight)
        error = max(1.0, abs(factor)) * nominal.error
        error = error + gamma(ULPS, step.dtype.unit_roundoff) * (
            np.abs(step.weight) + np.abs(change)
        )
    return Estimate(step.weight + change, error, nominal.overflow)


def _ratio(moved: Float64, change: Float64, nominal: Estimate) -> float | None:
    """Return the factor between two changes, from the elements that rounding leaves alone."""
    usable = np.isfinite(moved) & np.isfinite(change) & np.isfinite(nominal.error)
    usable &= np.abs(change) > nominal.error
    if np.count_nonzero(usable) < FEWEST_FREE:
        return None
    power = float(change[usable] @ change[usable])
    factor = float(moved[usable] @ change[usable]) / power if power > 0 else np.inf
    return factor if np.isfinite(factor) else None


def _other_settings(step: Step) -> Iterator[Hypothesis]:
    settings = step.settings
    if settings.weight_decay:
        for times, words in ((0.0, "Weight decay was left out"), (2.0, "Weights decayed twice")):
            other = replace(settings, weight_decay=times * settings.weight_decay)
            words = f"{words} (it counts {times:g} times)."  # noqa: PLW2901
            yield Hypothesis("scaled", words, replace(step, settings=other).take().weight)
    if not isinstance(settings, Adam):
        return
    if settings.bias_correction:
        other = replace(settings, bias_correction=False)
        words = "The step was not corrected for the bias of the moments."
        yield Hypothesis("scaled", words, replace(step, settings=other).take().weight)
        for number in (settings.step - 1, settings.step + 1):
            if number < 1:
                continue
            other = replace(settings, step=number)
            words = (
                f"The step was corrected for the bias of step {number}; the optimizer's count makes it "
                f"step {settings.step}."
            )
            yield Hypothesis("scaled", words, replace(step, settings=other).take().weight)


def _other_gradients(step: Step, context: Context) -> Iterator[tuple[str, str, Float64]]:
    """Yield cause, words and gradient of what the optimizer may have been given instead."""
    grad = step.grad
    yield "zeroed", "a gradient of zero", np.zeros(len(grad))
    yield "sign_flipped", "the negative gradient", -grad
    if step.before is not None:
        yield "stale", "the gradient of the step before", step.before
    for name, value in context.factors.items():
        if value == 1:
            continue
        cause = "not_unscaled" if name == "the loss scale" else "scaled"
        yield cause, f"the gradient times {value:g} ({name})", value * grad
        yield "scaled", f"the gradient divided by {value:g} ({name})", grad / value
    if step.unclipped is not None:
        yield "wrong_clip", "the gradient as it was before it was clipped", step.unclipped


def of_moment(step: Step, moment: str, context: Context) -> Iterator[Hypothesis]:
    """Propose what may have gone wrong with a moment."""
    before = step.moments.get(moment)
    if before is not None:
        words = f"{moment} is what it was before the step: it was not updated."
        yield Hypothesis("stale", words, exact(before))
    for cause, words, grad in _other_gradients(step, context):
        instead = replace(step, grad=grad).take().moments[moment]
        yield Hypothesis(cause, f"{moment} was updated with {words}.", instead)
    if step.moments:
        zeros = dict.fromkeys(step.moments, np.zeros(len(step.weight)))
        instead = replace(step, moments=zeros).take().moments[moment]
        yield Hypothesis("zeroed", f"{moment} holds this step's gradient alone.", instead)
