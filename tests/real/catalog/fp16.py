"""Configurations of stages 1 to 3 in fp16: static and dynamic loss scale, steps that overflow."""

from __future__ import annotations

from typing import Any

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

# The scale that grew in a step is the one that its gradients are divided by.
GROWN_TOO_EARLY = "https://github.com/deepspeedai/DeepSpeed/pull/8588 (second half of the comment)"


def dynamic(**options: int) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, **options}}


# The scale grows at every second step; with a clip value that binds, the scale drops out.
GROWS = dynamic(hysteresis=1, loss_scale_window=2)
# Nothing grows; every overflow (the first of two with hysteresis 2) halves the scale.
FALLS = dynamic(hysteresis=1, loss_scale_window=1000)
FALLS_LATE = dynamic(hysteresis=2, loss_scale_window=1000)
TOO_HIGH = dynamic(initial_scale_power=20, hysteresis=1)  # the first steps overflow by themselves
ODD = {"fp16": {"enabled": True, "loss_scale": 100.0}}  # no power of two: unscaling rounds
ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def _entries(stage: int) -> tuple[Entry, ...]:
    clean = (
        Setup(stage, fp16=True),
        Setup(stage, fp16=True, client="sgd"),
        Setup(stage, fp16=True, config=ODD),
        Setup(stage, fp16=True, config={"fp16": {"enabled": True, "loss_scale": 1.0}}),
        Setup(stage, fp16=True, config={"gradient_clipping": 0.01}),
        Setup(stage, fp16=True, config={"gradient_clipping": 0.0}, groups=True),
        Setup(stage, fp16=True, config=ACCUM32),
        Setup(stage, fp16=True, ranks=3),
        Setup(stage, fp16=True, model="one"),
        Setup(stage, fp16=True, micro_steps=1, steps=4, overflow_in=(1,)),
        Setup(stage, fp16=True, steps=4, overflow_in=(1,)),
        Setup(stage, fp16=True, config=FALLS, steps=5, overflow_in=(1, 2)),
        Setup(stage, fp16=True, config=FALLS_LATE, steps=5, overflow_in=(1, 3)),
        Setup(stage, fp16=True, config=TOO_HIGH, steps=6),
        Setup(stage, fp16=True, zero={"overlap_comm": True, "reduce_bucket_size": 60}),
    )
    grown = (
        Setup(stage, fp16=True, config=GROWS, steps=6),
        Setup(stage, fp16=True, config={"gradient_clipping": 0.0, **GROWS}, steps=6),
    )
    binding = Setup(stage, fp16=True, config={"gradient_clipping": 0.01, **GROWS}, steps=6)
    finding = ("unscale_clip", "scaled")
    return (
        *(Entry(setup) for setup in clean),
        *(Entry(setup, finding=finding, reference=GROWN_TOO_EARLY) for setup in grown),
        # Stage 3 still reports half the norm.
        Entry(binding, finding=finding, reference=GROWN_TOO_EARLY)
        if stage == 3
        else Entry(binding),
    )


ENTRIES: tuple[Entry, ...] = tuple(entry for stage in (1, 2, 3) for entry in _entries(stage))
