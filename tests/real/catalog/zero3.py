"""Configurations of stage 3 (DeepSpeedZeroOptimizer_Stage3)."""

from __future__ import annotations

from typing import Any

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32 = {"data_types": {"grad_accum_dtype": "fp32"}}
ACCUM16 = {"data_types": {"grad_accum_dtype": "fp16"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
DYNAMIC = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}
CPU: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PARAM_CPU: dict[str, Any] = {"offload_param": {"device": "cpu"}}
PAGEABLE = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
WHOLE = {"reduce_scatter": False}
LIST = {"contiguous_gradients": False}
LEAF = {"leaf_module": {"classes": ["tests.real.models.Experts"]}}
ZENFLOW = {
    "topk_ratio": 0.1,
    "select_strategy": "step",
    "select_interval": 2,
    "update_interval": 2,
    "full_warm_up_rounds": 0,
    "overlap_step": False,
}

REDUCTIONS = (
    Setup(3, zero={"overlap_comm": False, "reduce_bucket_size": 60}),
    Setup(3, zero={"overlap_comm": True, "reduce_bucket_size": 60}, bf16=True),
    Setup(3, zero=WHOLE),
    Setup(3, zero=LIST),
    Setup(3, zero={**LIST, **WHOLE}, bf16=True),
    Setup(3, zero={**WHOLE, "reduce_bucket_size": 60}),
    Setup(3, zero=WHOLE, config={"gradient_predivide_factor": 3.0}),
    Setup(3, zero={**LIST, **WHOLE}, config={"gradient_predivide_factor": 3.0}, bf16=True),
    Setup(3, zero=WHOLE, config={"gradient_predivide_factor": 2.0}, ranks=3, batch=2),
    Setup(3, zero=WHOLE, config={"prescale_gradients": True}),
    Setup(3, zero={**LIST, **WHOLE}, config={"prescale_gradients": True}),
    Setup(3, bf16=True, config={"communication_data_type": "fp32"}),
    Setup(3, bf16=True, config={"communication_data_type": "fp16"}),
    Setup(3, config={"communication_data_type": "bf16"}),
    Setup(3, config={"communication_data_type": "fp16"}),
    Setup(3, bf16=True, zero=LIST, config={"communication_data_type": "fp32"}),
    Setup(3, bf16=True, config=ACCUM32),
    Setup(3, bf16=True, config={"communication_data_type": "fp32", **ACCUM32}),
    Setup(3, bf16=True, config=ACCUM16),
    Setup(3, config={"data_types": {"grad_accum_dtype": "bf16"}}),
    Setup(3, bf16=True, config={"keep_in_fp32_modules": ["4"]}),
    Setup(3, ranks=3, bf16=True),
    Setup(3, ranks=4, zero={"zero_hpz_partition_size": 2}),
    Setup(3, bf16=True, micro_steps=12),
)

PARAMETERS = (
    Setup(3, zero={"sub_group_size": 100}),
    Setup(3, config={"gradient_clipping": 0.01}, groups=True),
    Setup(3, zero={"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}),
    Setup(3, bf16=True, zero={"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}),
    Setup(3, bf16=True, zero={"stage3_gather_16bit_weights_on_model_save": True}),
    Setup(3, zero={"stage3_use_all_reduce_for_fetch_params": True}),
    Setup(3, zero={"stage3_module_granularity_threshold": 1000}),
    Setup(3, zero_init=True),
    Setup(3, model="one"),
    Setup(3, model="one", bf16=True, zero=CPU, client="sgd"),
    Setup(3, model="early"),
    Setup(3, model="twice", bf16=True),
    Setup(3, model="reentrant"),
    Setup(3, model="checkpointed", bf16=True),
    Setup(3, model="leaf", zero=LEAF),
    Setup(3, client="adamw", groups=True),
    Setup(3, client="sgd", bf16=True),
)

MODES = (
    Setup(3, mode="scale"),
    Setup(3, mode="tensor_backward", bf16=True),
    Setup(3, mode="by_hand"),
    Setup(3, mode="coalesce"),
    Setup(3, mode="coalesce", bf16=True, zero=CPU, client="sgd"),
    Setup(3, mode="coalesce", model="tied"),
    Setup(3, mode="unmanaged", zero=CPU, client="adamw"),
    Setup(3, mode="set_boundary", zero=CPU, client="adamw", bf16=True),
    Setup(3, mode="unmanaged", model="early", zero=CPU, client="adamw"),
)

OFFLOADED = (
    Setup(3, zero=CPU, client="adamw"),
    Setup(3, zero=CPU, client="adamw", micro_steps=1),
    Setup(3, zero=CPU, client="adamw", micro_steps=2, bf16=True, config=ACCUM32),
    Setup(3, zero=CPU, client="adamw", bf16=True, ranks=3),
    Setup(3, zero=PAGEABLE, client="sgd"),
    Setup(3, zero={**CPU, "sub_group_size": 100}, client="adamw", groups=True, bf16=True),
    Setup(3, zero=CPU, client="adamw", config={"gradient_clipping": 0.01}),
    Setup(3, zero={**CPU, **WHOLE, "reduce_bucket_size": 60}, client="adamw"),
    Setup(3, zero=PARAM_CPU),
    Setup(3, zero={"offload_param": {"device": "cpu", "max_in_cpu": 0}}, bf16=True),
    Setup(3, zero={**PARAM_CPU, "stage3_param_persistence_threshold": 0}),
    Setup(3, zero={**CPU, **PARAM_CPU}, client="adamw", bf16=True),
    Setup(3, zero={**CPU, **PARAM_CPU}, client="sgd", zero_init=True),
)

AUTOCASTS = (
    Setup(3, config=AUTOCAST),
    Setup(3, config=AUTOCAST, zero=LIST),
    Setup(3, config=AUTOCAST, zero={**WHOLE, "reduce_bucket_size": 60}),
    Setup(3, config=AUTOCAST, zero=CPU, client="sgd"),
    Setup(3, config=AUTOCAST, mode="coalesce"),
)

FP16 = (
    Setup(3, fp16=True, config=ACCUM32, micro_steps=12),
    Setup(3, fp16=True, mode="scale"),
    Setup(3, fp16=True, zero=CPU, client="adamw", overflow_in=(1,)),
)

CARRIED = ("accumulate", "carried_over")
LOST_AT_BOUNDARY = ("master", "zeroed")
BUGS = "tests/real/test_zero3_bugs.py"
OLD_BUGS = "tests/real/test_upstream_bugs.py"

FOUND = (
    Entry(Setup(3, zero=WHOLE, config={"gradient_predivide_factor": 2.0}), None,
          ("reduce", "averaged_twice"), BUGS),
    Entry(Setup(3, zero={**LIST, **WHOLE}, config={"gradient_predivide_factor": 3.0}, ranks=3), None,
          ("reduce", "averaged_twice"), BUGS),
    Entry(Setup(3, model="early", zero=CPU, client="adamw"), None, LOST_AT_BOUNDARY, BUGS),
    Entry(Setup(3, model="twice_recomputed", zero={"reduce_bucket_size": 10}), None,
          ("accumulate", "dropped_micro_steps"), BUGS),
    Entry(Setup(3, fp16=True, config=DYNAMIC, overflow_in=(1,), steps=6), None,
          ("unscale_clip", "scaled"), BUGS),
    Entry(Setup(3, model="tied", zero=CPU, client="adamw"), None, CARRIED, OLD_BUGS),
    Entry(Setup(3, model="tied", config=AUTOCAST), None, CARRIED, OLD_BUGS),
    Entry(Setup(3, model="leaf"), None, CARRIED, OLD_BUGS),
)  # fmt: skip

REFUSED = (
    Entry(Setup(3, zero={"zero_quantized_gradients": True}), "zero_quantized_gradients"),
    Entry(Setup(3, zero={**CPU, "zenflow": ZENFLOW}, client="adamw"), "ZenFlow"),
    Entry(Setup(3, config={"compile": {"deepcompile": True}}), "DeepCompile"),
    Entry(
        Setup(3, config={"torch_autocast": {"enabled": True, "dtype": "float16"}}),
        "torch_autocast in fp16",
    ),
)

ENTRIES: tuple[Entry, ...] = (
    *map(Entry, (*REDUCTIONS, *PARAMETERS, *MODES, *OFFLOADED, *AUTOCASTS, *FP16)),
    *FOUND,
    *REFUSED,
)
