"""Settings that change the gradient path: traced, audited, and bitwise untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradtrace
from tests.real.training import Setup, train

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SETTINGS = [
    Setup(1, zero={"overlap_comm": True}),
    Setup(2, zero={"overlap_comm": True, "reduce_bucket_size": 60}),
    Setup(3, zero={"overlap_comm": False, "reduce_bucket_size": 60}),
    Setup(1, zero={"reduce_bucket_size": 60}),
    Setup(1, bf16=True, zero={"reduce_scatter": False}),
    Setup(2, zero={"reduce_scatter": False}),
    Setup(3, zero={"reduce_scatter": False}),
    Setup(2, zero={"round_robin_gradients": True}),
    Setup(1, bf16=True, zero={"round_robin_gradients": True}),
    Setup(2, zero={"use_multi_rank_bucket_allreduce": False}),
    Setup(3, zero={"sub_group_size": 100}),
    Setup(1, bf16=True, config=ACCUM32),
    Setup(1, bf16=True, config=ACCUM32, mode="by_hand"),
    Setup(2, bf16=True, config=ACCUM32),
    Setup(2, bf16=True, config=ACCUM32, mode="by_hand"),
    Setup(3, bf16=True, config=ACCUM32),
    Setup(2, bf16=True, config={"communication_data_type": "fp32"}),
    Setup(2, bf16=True, config={"communication_data_type": "fp32", **ACCUM32}),
    Setup(3, bf16=True, config={"communication_data_type": "fp32"}),
    Setup(1, bf16=True, config={"communication_data_type": "fp32", **ACCUM32}),
    Setup(1, config={"gradient_clipping": 0.01}),
    Setup(1, bf16=True, config={"gradient_clipping": 0.01, **ACCUM32}),
    Setup(2, config={"gradient_clipping": 0.01}, groups=True),
    Setup(3, config={"gradient_clipping": 0.01}, groups=True),
    Setup(1, groups=True, bf16=True),
    Setup(1, model="one"),
    Setup(2, model="one", bf16=True),
    Setup(3, model="one"),
    Setup(1, ranks=3, bf16=True),
    Setup(2, ranks=3),
    Setup(3, ranks=3, bf16=True),
    Setup(3, mode="scale"),
    Setup(3, mode="tensor_backward", bf16=True),
    Setup(3, mode="by_hand"),
    Setup(1, model="tied"),
    Setup(2, model="tied"),
    Setup(2, model="tied", bf16=True),
    Setup(2, bf16=True, micro_steps=12),
    Setup(3, bf16=True, micro_steps=12),
]


@pytest.mark.parametrize("setup", SETTINGS, ids=lambda setup: setup.name)
def test_clean_settings_pass_and_train_as_if_untraced(setup: Setup, tmp_path: Path) -> None:
    assert train(setup, tmp_path / "trace") == train(setup, None)
    result = gradtrace.audit(tmp_path / "trace")
    assert result.verdict == "pass", (result.first, result.notes)
    assert result.laws["end_to_end"].checked > 0
    assert result.laws["reduce"].checked > 0
    assert result.laws["unscale_clip"].checked > 0
