"""Configurations of stages 1 and 2 (DeepSpeedZeroOptimizer)."""

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}

ENTRIES: tuple[Entry, ...] = tuple(
    Entry(setup)
    for setup in (
        Setup(1, zero={"overlap_comm": True}),
        Setup(2, zero={"overlap_comm": True, "reduce_bucket_size": 60}),
        Setup(1, zero={"reduce_bucket_size": 60}),
        Setup(1, bf16=True, zero={"reduce_scatter": False}),
        Setup(2, zero={"reduce_scatter": False}),
        Setup(2, zero={"round_robin_gradients": True}),
        Setup(1, bf16=True, zero={"round_robin_gradients": True}),
        Setup(2, zero={"use_multi_rank_bucket_allreduce": False}),
        Setup(2, bf16=True, config=ACCUM32),
        Setup(2, bf16=True, config=ACCUM32, mode="by_hand"),
        Setup(2, bf16=True, config={"communication_data_type": "fp32"}),
        Setup(2, bf16=True, config={"communication_data_type": "fp32", **ACCUM32}),
        Setup(1, config={"gradient_clipping": 0.01}),
        Setup(2, config={"gradient_clipping": 0.01}, groups=True),
        Setup(1, groups=True, bf16=True),
        Setup(1, model="one"),
        Setup(2, model="one", bf16=True),
        Setup(1, ranks=3, bf16=True),
        Setup(2, ranks=3),
        Setup(1, model="tied"),
        Setup(2, model="tied"),
        Setup(2, model="tied", bf16=True),
        Setup(2, bf16=True, micro_steps=12),
    )
)
