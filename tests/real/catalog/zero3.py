"""Configurations of stage 3 (DeepSpeedZeroOptimizer_Stage3)."""

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}

ENTRIES: tuple[Entry, ...] = tuple(
    Entry(setup)
    for setup in (
        Setup(3, zero={"overlap_comm": False, "reduce_bucket_size": 60}),
        Setup(3, zero={"reduce_scatter": False}),
        Setup(3, zero={"sub_group_size": 100}),
        Setup(3, bf16=True, config=ACCUM32),
        Setup(3, bf16=True, config={"communication_data_type": "fp32"}),
        Setup(3, config={"gradient_clipping": 0.01}, groups=True),
        Setup(3, model="one"),
        Setup(3, ranks=3, bf16=True),
        Setup(3, mode="scale"),
        Setup(3, mode="tensor_backward", bf16=True),
        Setup(3, mode="by_hand"),
        Setup(3, bf16=True, micro_steps=12),
    )
)
