"""Configurations of stage 0 (plain, FP16_Optimizer, FP16_UnfusedOptimizer), and of BF16_Optimizer."""

from __future__ import annotations

from typing import Any

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
# At stage 0 the loss is not multiplied by the loss scale: only a scale of 1 trains right.
SCALE_1 = {"fp16": {"enabled": True, "loss_scale": 1.0}}
NOT_SCALED = "https://github.com/deepspeedai/DeepSpeed/pull/8393"


def _bf16(**options: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **options}, **ACCUM32}


# engine.optimizer is torch's own
_PLAIN = (
    Setup(0),
    Setup(0, client="sgd"),
    Setup(0, client="adamw"),
    Setup(0, config={"gradient_clipping": 0.01}),
    Setup(0, config={"gradient_clipping": 0.0}),
    Setup(0, config={"gradient_clipping": 0.01}, groups=True),
    Setup(0, groups=True),
    Setup(0, mode="by_hand"),
    Setup(0, mode="no_sync"),
    Setup(0, mode="set_boundary"),
    Setup(0, mode="unmanaged"),
    Setup(0, model="tied"),
    Setup(0, model="one"),
    Setup(0, model="reentrant"),
    Setup(0, model="checkpointed"),
    Setup(0, ranks=1),
    Setup(0, ranks=3),
    Setup(0, micro_steps=1),
    Setup(0, config={"prescale_gradients": True}),
    Setup(0, config={"gradient_predivide_factor": 3.0}),
    Setup(0, config={"communication_data_type": "bf16"}),
)
_UNFUSED = (
    Setup(0, bf16=True),
    Setup(0, bf16=True, client="sgd"),
    Setup(0, bf16=True, client="sgd", config={"gradient_clipping": 0.01}),
    Setup(0, bf16=True, client="sgd", ranks=3),
    Setup(0, bf16=True, client="sgd", model="tied"),
    Setup(0, fp16=True, client="sgd", config=SCALE_1),
    Setup(0, bf16=True, mode="by_hand"),
    Setup(0, bf16=True, mode="no_sync"),
    Setup(0, bf16=True, mode="unmanaged"),
    Setup(0, bf16=True, model="tied"),
    Setup(0, bf16=True, model="reentrant"),
    Setup(0, bf16=True, groups=True, config={"gradient_clipping": 0.01}),
    Setup(0, bf16=True, ranks=3),
    Setup(0, bf16=True, micro_steps=12),
    Setup(0, bf16=True, config={"communication_data_type": "fp32"}),
    Setup(0, bf16=True, config={"prescale_gradients": True}),
    Setup(0, fp16=True, config=SCALE_1),
    Setup(0, fp16=True, config={"gradient_clipping": 0.01, **SCALE_1}),
    Setup(0, fp16=True, ranks=3, config={"gradient_predivide_factor": 1000.0, **SCALE_1}),
    Setup(0, fp16=True, config=SCALE_1, steps=4, overflow_in=(1,)),
)
# A FusedAdam by class, which builds no kernel: see tests/real/training.py
_FUSED = (
    Setup(0, bf16=True, client="fused"),
    Setup(0, bf16=True, client="fused_sgd"),
    Setup(0, bf16=True, client="fused_sgd", config={"gradient_clipping": 0.01}),
    Setup(0, fp16=True, client="fused_sgd", config=SCALE_1),
    Setup(0, bf16=True, client="fused", mode="by_hand"),
    Setup(0, bf16=True, client="fused", mode="no_sync"),
    Setup(0, bf16=True, client="fused", model="tied"),
    Setup(0, bf16=True, client="fused", model="one"),
    Setup(0, bf16=True, client="fused", model="checkpointed"),
    Setup(0, bf16=True, client="fused", groups=True, config={"gradient_clipping": 0.01}),
    Setup(0, bf16=True, client="fused", ranks=3),
    Setup(0, fp16=True, client="fused", config=SCALE_1),
    Setup(0, fp16=True, client="fused", config={"gradient_clipping": 0.01, **SCALE_1}),
    Setup(0, fp16=True, client="fused", config=SCALE_1, steps=4, overflow_in=(1, 2)),
)
_BF16 = (
    Setup(1, bf16=True, config=ACCUM32),
    Setup(1, bf16=True, config=ACCUM32, mode="by_hand"),
    Setup(1, bf16=True, config=ACCUM32, mode="no_sync"),
    Setup(1, bf16=True, config=ACCUM32, mode="unmanaged"),
    Setup(1, bf16=True, config=ACCUM32, model="tied"),
    Setup(1, bf16=True, config=ACCUM32, model="one"),
    Setup(1, bf16=True, config=ACCUM32, model="reentrant"),
    Setup(1, bf16=True, config=ACCUM32, model="checkpointed"),
    Setup(1, bf16=True, config=ACCUM32, ranks=3),
    Setup(1, bf16=True, config=ACCUM32, groups=True),
    Setup(1, bf16=True, config=ACCUM32, overflow_in=(1,), steps=4),
    Setup(1, bf16=True, config={"communication_data_type": "fp32", **ACCUM32}),
    Setup(1, bf16=True, config={"gradient_clipping": 0.01, **ACCUM32}),
    Setup(1, bf16=True, config={"prescale_gradients": True, **ACCUM32}),
    Setup(1, bf16=True, config={"gradient_predivide_factor": 3.0, **ACCUM32}),
    Setup(1, bf16=True, config=_bf16(immediate_grad_update=True)),
    Setup(1, bf16=True, config=_bf16(immediate_grad_update=True), model="tied"),
    Setup(1, bf16=True, config=_bf16(immediate_grad_update=True), model="reentrant"),
    Setup(1, bf16=True, config=_bf16(check_grad_overflow=False)),
    Setup(
        1, bf16=True, config=_bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    ),
)
_AUTOCAST_ON = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
_AUTOCAST = (
    Setup(0, config=_AUTOCAST_ON),
    Setup(0, config={"gradient_clipping": 0.01, **_AUTOCAST_ON}),
    Setup(0, config={"communication_data_type": "fp32", **_AUTOCAST_ON}),
    Setup(0, config=_AUTOCAST_ON, micro_steps=1, client="sgd"),
    Setup(0, config=_AUTOCAST_ON, ranks=3, model="tied"),
)
# Stages 1 and 2 with what this file looks after
_LOCAL = (
    Setup(1, model="reentrant"),
    Setup(1, model="checkpointed"),
    Setup(1, mode="no_sync"),
    Setup(1, bf16=True, mode="no_sync"),
)

ENTRIES: tuple[Entry, ...] = (
    *(Entry(setup) for setup in (*_PLAIN, *_UNFUSED, *_FUSED, *_BF16, *_AUTOCAST, *_LOCAL)),
    *(
        Entry(setup, finding=("seed", "scaled"), reference=NOT_SCALED)
        for setup in (
            Setup(0, fp16=True),
            Setup(0, fp16=True, client="fused"),
            Setup(0, fp16=True, client="fused", config={"gradient_clipping": 0.01}),
        )
    ),
    Entry(
        Setup(0, fp16=True, config={"fp16": {"enabled": True, "loss_scale": 1.0}}, model="sparse"),
        refused="sparse_gradients",
    ),
    Entry(
        Setup(0, config={"torch_autocast": {"enabled": True, "dtype": "float16"}}),
        refused="fp16 autocast at stage 0",
    ),
)
