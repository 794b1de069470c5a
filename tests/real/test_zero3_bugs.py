"""True defects of stage 3 in the installed DeepSpeed, reproduced without gradtrace.

The catalog names this file beside each configuration that meets one; no upstream report was found for
any of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.real.catalog.zero3 import CPU, DYNAMIC, LIST, WHOLE
from tests.real.training import Setup, build, train


def _norms(setup: Setup) -> list[float]:
    return [float(norm) for norm in train(setup, None)[0].norms]


def _weights(setup: Setup) -> dict[str, Any]:
    names = [name for name, _ in build(setup.model).named_parameters()]
    values = train(setup, None)[0].weights
    return {n: np.frombuffer(v, "<f4") for n, v in zip(names, values, strict=True)}


@pytest.mark.parametrize(("zero", "ranks"), ((WHOLE, 2), ({**LIST, **WHOLE}, 3)))
def test_a_predivide_factor_of_the_world_size_is_never_multiplied_back(
    zero: dict[str, Any], ranks: int
) -> None:
    """The gradient is divided by the factor and by the world size, and multiplied only if they differ.

    Source: deepspeed 0.19.8, stage3.py:1885 and 1936. Stages 1 and 2 divide by the factor first and
    by world size / factor after the sum, where nothing is left to do when they are equal.
    """
    setup = Setup(3, zero=zero, ranks=ranks, steps=1)
    (right,) = _norms(setup)
    for factor in (2.0, 3.0):
        (norm,) = _norms(setup.at(config={"gradient_predivide_factor": factor}))
        wanted = right / factor if factor == ranks else right
        assert norm == pytest.approx(wanted, rel=1e-5), factor


def test_offload_loses_a_gradient_that_is_not_there_in_the_last_micro_step() -> None:
    """Only what is reduced in the boundary's micro-step is copied to the fp32 gradient on the CPU.

    Source: deepspeed 0.19.8, stage3.py:2041. ``managed_gradient_accumulation: false`` copies all
    that was reduced since the step before (1458), and is right; so is a run without offload.
    """
    names = {"early.weight", "early.bias"}
    start = {n: p.detach().numpy().ravel() for n, p in build("early").named_parameters()}
    setup = Setup(3, model="early", steps=1, client="sgd")
    for found, moves in (
        (_weights(setup), True),
        (_weights(setup.at(zero=CPU, mode="unmanaged")), True),
        (_weights(setup.at(zero=CPU)), False),
    ):
        for name in names:
            assert (np.abs(found[name] - start[name]).max() > 1e-4) is np.bool_(moves), name
        assert np.abs(found["head.weight"] - start["head.weight"]).max() > 1e-4


def test_a_parameter_reduced_twice_in_the_first_micro_step_keeps_the_last_reduction_only() -> None:
    """The second reduction of one backward pass is copied over the first, not added to it.

    Source: deepspeed 0.19.8, stage3.py:2026: ``copy_`` whenever ``micro_step_id == 0``. It takes a
    parameter in two reentrant checkpoints and a bucket that is full in between; in one bucket the two
    make DeepSpeed stop with an assertion (1662).
    """
    setup = Setup(3, model="twice", client="sgd", steps=1, micro_steps=1)
    right = _weights(setup)
    small = {"reduce_bucket_size": 10}
    wrong = _weights(setup.at(model="twice_recomputed", zero=small))
    apart = {name for name in right if np.abs(right[name] - wrong[name]).max() > 1e-4}
    assert apart == {"twice.weight", "twice.bias"}
    coalesced = _weights(setup.at(model="twice_recomputed", zero=small, mode="coalesce"))
    assert all(np.abs(right[name] - coalesced[name]).max() < 1e-6 for name in right)


def test_a_step_that_raises_the_loss_scale_divides_by_the_raised_one() -> None:
    """The scale is updated before gradients and norm are divided by it: both come out halved.

    Source: deepspeed 0.19.8, stage3.py:2807 (step): ``_loss_scale_update_and_overflow_cleanup`` comes
    before ``_global_grad_norm`` and ``unscale_and_clip_grads``.
    """
    setup = Setup(3, fp16=True, steps=3)
    dynamic = _norms(setup.at(config=DYNAMIC))
    static = _norms(setup.at(config={"fp16": {"enabled": True, "loss_scale": 256.0}}))
    ratios = [one / other for one, other in zip(dynamic, static, strict=True)]
    raised = next(at for at, ratio in enumerate(ratios) if abs(ratio - 1) > 0.25)
    assert ratios[raised] == pytest.approx(0.5, rel=1e-2)
    assert ratios[:raised] == pytest.approx([1.0] * raised, rel=1e-2)
