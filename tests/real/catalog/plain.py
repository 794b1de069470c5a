"""Configurations of stage 0, and of BF16_Optimizer."""

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}

ENTRIES: tuple[Entry, ...] = (
    Entry(Setup(1, bf16=True, config=ACCUM32)),
    Entry(Setup(1, bf16=True, config=ACCUM32, mode="by_hand")),
    Entry(Setup(1, bf16=True, config={"communication_data_type": "fp32", **ACCUM32})),
    Entry(Setup(1, bf16=True, config={"gradient_clipping": 0.01, **ACCUM32})),
)
