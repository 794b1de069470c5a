"""Read the rule that an optimizer follows from what `optimizer_state` records of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gradtrace.analysis.laws.common import Lack
from gradtrace.analysis.laws.optimizers import KERNELS, Adam, Kernel, Sgd
from gradtrace.trace.records import Facts
from gradtrace.trace.schema import decode_float

MOMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Hold how a parameter is stepped."""

    settings: Adam | Sgd
    kernel: Kernel
    name: str


def rule_of(facts: Facts, param: int) -> Rule | Lack:
    """Return how a parameter is stepped, or why that is not known."""
    if facts.get("rule") not in MOMENTS:
        return Lack("skip", f"no rule is known of the optimizer {facts['class']}")
    if facts.get("amsgrad"):
        return Lack("skip", "no rule is known of amsgrad")
    kernel = KERNELS.get(str(facts.get("kernel")))
    if kernel is None:
        return Lack("skip", f"no bound is known of the kernel {facts.get('kernel')}")
    name = str(facts["rule"])
    settings = _adam(facts, param) if name == "adam" else _sgd(facts)
    if settings is None:
        return Lack("skip", "the optimizer's settings are not known, or out of their range")
    return Rule(settings, kernel, name)


def _adam(facts: Facts, param: int) -> Adam | None:
    betas = facts.get("betas")
    numbers = _numbers(facts, "lr", "eps", "weight_decay")
    if numbers is None or not isinstance(betas, list):
        return None
    beta1, beta2 = (decode_float(beta) for beta in betas)
    counted = count_of(facts, param) or 0.0
    if beta1 is None or beta2 is None or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        return None
    if not 0 <= counted < 2**31 or counted != int(counted):
        return None
    return Adam(
        **numbers,
        beta1=beta1,
        beta2=beta2,
        step=int(counted) + 1,
        decoupled=facts.get("decoupled") is True,
        maximize=facts.get("maximize") is True,
        bias_correction=facts.get("bias_correction") is not False,
    )


def _sgd(facts: Facts) -> Sgd | None:
    numbers = _numbers(facts, "lr", "momentum", "weight_decay")
    dampening = decode_float(facts.get("dampening"))
    if numbers is None or dampening is None or not np.isfinite(dampening):
        return None
    return Sgd(
        **numbers,
        dampening=dampening,
        nesterov=facts.get("nesterov") is True,
        maximize=facts.get("maximize") is True,
    )


def _numbers(facts: Facts, *names: str) -> dict[str, float] | None:
    """Return settings that must be there, finite and not negative."""
    found: dict[str, float] = {}
    for name in names:
        value = decode_float(facts.get(name))
        if value is None or not (np.isfinite(value) and value >= 0):
            return None
        found[name] = float(value)
    return found


def count_of(facts: Facts, param: int) -> float | None:
    """Return how many steps of a parameter the optimizer had counted; ``None`` for no state."""
    each = facts.get("steps")
    value = each.get(str(param)) if isinstance(each, dict) else facts.get("step")
    return decode_float(value)
