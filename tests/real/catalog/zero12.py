"""Configurations of stages 1 and 2 (DeepSpeedZeroOptimizer)."""

from typing import Any

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

ACCUM32: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PINNED: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
LISTED: dict[str, Any] = {"contiguous_gradients": False}
OVERLAP: dict[str, Any] = {"overlap_comm": True}
WHOLE: dict[str, Any] = {"reduce_scatter": False}
TO_OWNER: dict[str, Any] = {"use_multi_rank_bucket_allreduce": False}
ROUND_ROBIN: dict[str, Any] = {"round_robin_gradients": True}
SMALL: dict[str, Any] = {"reduce_bucket_size": 60}
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


LOW_MASTER: dict[str, Any] = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
}


def _accumulates_in(dtype: str) -> dict[str, Any]:
    return {"data_types": {"grad_accum_dtype": dtype}}


def _wire(dtype: str) -> dict[str, Any]:
    return {"communication_data_type": dtype}


CONTIGUOUS = (
    Setup(1, zero=OVERLAP),
    Setup(2, zero=OVERLAP | SMALL),
    Setup(1, zero=SMALL),
    Setup(1, zero=OVERLAP | SMALL),
    Setup(2, zero={"reduce_bucket_size": 1}),  # every parameter is larger than the bucket
    Setup(1, zero={"reduce_bucket_size": 1}),
    Setup(1, bf16=True, zero=WHOLE),
    Setup(2, zero=WHOLE),
    Setup(2, zero=WHOLE | OVERLAP | SMALL),
    Setup(2, zero=ROUND_ROBIN),
    Setup(1, bf16=True, zero=ROUND_ROBIN),
    Setup(2, zero=ROUND_ROBIN | OVERLAP, groups=True),
    Setup(1, zero=ROUND_ROBIN | SMALL, groups=True),
    Setup(2, zero=TO_OWNER),
    Setup(1, zero=TO_OWNER | OVERLAP),
    Setup(2, zero=TO_OWNER | OVERLAP, bf16=True),
    Setup(1, config={"gradient_clipping": 0.01}),
    Setup(2, config={"gradient_clipping": 0.01}, groups=True),
    Setup(2, config={"gradient_clipping": 0.0}, zero={"compute_grad_norm": False}),
    Setup(1, groups=True, bf16=True),
    Setup(2, groups=True, bf16=True, zero=OVERLAP),
    Setup(1, model="one"),
    Setup(2, model="one", bf16=True),
    Setup(1, ranks=3, bf16=True),
    Setup(2, ranks=3),
    Setup(2, ranks=1, zero=SMALL),
    Setup(1, model="tied"),
    Setup(2, model="tied"),
    Setup(2, model="tied", bf16=True),
    Setup(2, model="tied", zero=OVERLAP | ROUND_ROBIN),
    Setup(1, model="tied", zero=OVERLAP | SMALL),
    Setup(2, bf16=True, micro_steps=12),
    Setup(1, client="adamw"),
    Setup(2, client="sgd"),
    Setup(2, client="adamw", groups=True, bf16=True),
)
SCALINGS = (
    Setup(2, zero=WHOLE, config={"gradient_predivide_factor": 2.0}),
    Setup(2, zero=WHOLE, config={"gradient_predivide_factor": 3.0}),
    Setup(2, ranks=3, zero=WHOLE, config={"gradient_predivide_factor": 3.0}),
    Setup(2, ranks=3, bf16=True, zero=WHOLE, config={"gradient_predivide_factor": 7.0}),
    Setup(2, ranks=3, zero=WHOLE | OVERLAP, config={"prescale_gradients": True}),
    Setup(1, bf16=True, zero=WHOLE, config={"prescale_gradients": True}),
    Setup(1, config={"gradient_predivide_factor": 3.0}),  # ignored: reduce_scatter
    Setup(2, bf16=True, config=ACCUM32 | {"gradient_predivide_factor": 3.0}, zero=WHOLE),
    Setup(2, batch=7, config={"gradient_allreduce_op": "sum"}),
    Setup(1, batch=7, config={"gradient_allreduce_op": "sum"}, zero=LISTED),
    Setup(2, batch=7, config={"gradient_allreduce_op": "sum"}, zero=WHOLE | OVERLAP),
)
DTYPES = (
    Setup(2, bf16=True, config=ACCUM32),
    Setup(2, bf16=True, config=ACCUM32, mode="by_hand"),
    Setup(2, bf16=True, config=ACCUM32, zero=WHOLE),
    Setup(2, bf16=True, config=ACCUM32, zero=OVERLAP | SMALL),
    Setup(2, bf16=True, config=ACCUM32, zero=TO_OWNER | ROUND_ROBIN, groups=True),
    Setup(2, bf16=True, config=ACCUM32, model="tied"),
    Setup(2, bf16=True, config=_wire("fp32")),
    Setup(2, bf16=True, config=_wire("fp32") | ACCUM32),
    Setup(2, bf16=True, config=_wire("fp16")),
    Setup(1, bf16=True, config=_wire("fp16"), zero=WHOLE),
    Setup(1, config=_wire("bf16")),
    Setup(2, config=_wire("bf16"), zero=WHOLE),
    Setup(2, ranks=3, config=_wire("bf16"), zero=LISTED),
    Setup(2, config=_wire("fp16"), zero=OVERLAP),
    Setup(1, config=_wire("fp16"), zero=WHOLE | {"overlap_comm": True}),
    Setup(1, config=_accumulates_in("bf16")),
    Setup(2, config=_accumulates_in("bf16")),
    Setup(1, config=_accumulates_in("fp16"), zero=OVERLAP),
    Setup(2, config=_accumulates_in("fp16"), model="tied"),
    Setup(1, config=_accumulates_in("bf16"), zero=LISTED | OVERLAP),
    Setup(1, bf16=True, config=_accumulates_in("fp16")),
    Setup(2, bf16=True, config=_accumulates_in("fp16")),
    Setup(1, bf16=True, config=LOW_MASTER, batch=7),
    Setup(2, bf16=True, config=LOW_MASTER, batch=7),
    Setup(2, bf16=True, config={"bf16": {"enabled": True, "check_grad_overflow": False}}),
    Setup(2, zero={"zero_quantized_gradients": True}),  # which only stage 3 heeds
    Setup(1, zero={"zero_quantized_weights": True}),
)
NON_CONTIGUOUS = (
    Setup(1, zero=LISTED),
    Setup(2, zero=LISTED),
    Setup(1, zero=LISTED | OVERLAP),
    Setup(1, zero=LISTED | OVERLAP | SMALL),
    Setup(2, zero=LISTED | OVERLAP | SMALL),
    Setup(1, zero=LISTED | SMALL, bf16=True),
    Setup(2, zero=LISTED | WHOLE, bf16=True),
    Setup(2, zero=LISTED | TO_OWNER | OVERLAP),
    Setup(2, zero=LISTED | ROUND_ROBIN, groups=True),
    Setup(1, zero=LISTED, ranks=3, bf16=True),
    Setup(2, zero=LISTED, ranks=3),
    Setup(2, zero=LISTED, bf16=True, config=ACCUM32),
    Setup(2, zero=LISTED | OVERLAP, bf16=True, config=ACCUM32, groups=True),
    Setup(1, zero=LISTED, model="tied"),
    Setup(2, zero=LISTED | OVERLAP, model="tied"),
    Setup(2, zero=LISTED, model="one"),
    Setup(1, zero=LISTED, mode="set_boundary"),
    Setup(1, zero=LISTED, mode="no_sync"),
    Setup(2, zero=LISTED, mode="coalesce"),
    Setup(2, zero=LISTED, mode="unmanaged"),
    Setup(1, zero=LISTED, mode="unmanaged"),
)
MODES = (
    Setup(1, mode="no_sync"),
    Setup(1, mode="no_sync", bf16=True, zero=SMALL),
    Setup(1, mode="coalesce"),
    Setup(2, mode="coalesce"),
    Setup(2, mode="coalesce", zero=OVERLAP | SMALL),
    Setup(1, mode="coalesce", zero=OVERLAP, bf16=True),
    Setup(1, mode="coalesce", zero=OVERLAP, bf16=True, config=_accumulates_in("fp16")),
    Setup(2, mode="coalesce", bf16=True, config=ACCUM32),
    Setup(2, mode="coalesce", model="tied"),
    Setup(2, mode="unmanaged", zero=OVERLAP),
    Setup(1, mode="unmanaged", zero=ROUND_ROBIN),
    Setup(2, mode="unmanaged", bf16=True, config=ACCUM32),
    Setup(1, model="reentrant"),
    Setup(2, model="reentrant"),
    Setup(2, model="reentrant", zero=OVERLAP | SMALL),
    Setup(2, model="reentrant", bf16=True, config=ACCUM32),
    Setup(2, model="reentrant", zero=LISTED),
    Setup(1, model="checkpointed", bf16=True),
    Setup(2, model="checkpointed", zero=OVERLAP),
)
OFFLOAD = (
    Setup(1, zero=HOST, client="adamw"),
    Setup(2, zero=HOST, client="adamw"),
    Setup(2, zero=PINNED, client="sgd"),
    Setup(1, zero=PINNED, client="adamw", bf16=True),
    # Other accumulation counts, of other batches: `diff` cannot know what a caller divides by.
    Setup(1, zero=HOST, client="adamw", micro_steps=1, batch=4),
    Setup(2, zero=HOST, client="adamw", micro_steps=1, batch=4),
    Setup(2, zero=HOST, client="adamw", micro_steps=2, batch=2),
    Setup(2, zero=HOST, client="adamw", bf16=True, micro_steps=12),
    Setup(2, zero=HOST | OVERLAP | SMALL, client="adamw"),
    Setup(1, zero=HOST | OVERLAP, client="adamw"),
    Setup(2, zero=HOST | WHOLE, client="adamw", config={"gradient_predivide_factor": 2.0}),
    Setup(2, zero=HOST | ROUND_ROBIN, client="adamw", groups=True, bf16=True),
    Setup(2, zero=HOST | TO_OWNER, client="adamw", groups=True),
    Setup(2, zero=HOST | LISTED, client="adamw"),  # which offload makes contiguous
    Setup(2, zero=HOST, client="sgd", ranks=3),
    Setup(1, zero=HOST, client="sgd", ranks=3, bf16=True),
    Setup(2, zero=HOST, client="adamw", model="one"),
    Setup(2, zero=HOST, client="adamw", bf16=True, config=ACCUM32),
    Setup(2, zero=HOST | OVERLAP, client="adamw", bf16=True, config=ACCUM32 | _wire("fp32")),
    Setup(1, zero=HOST, client="adamw", bf16=True, config=ACCUM32),
    Setup(1, zero=HOST | OVERLAP, client="adamw", bf16=True, config=ACCUM32),
    Setup(1, zero=HOST, client="sgd", model="tied"),
    Setup(2, zero=HOST, client="sgd", model="tied", bf16=True, config=ACCUM32),
    Setup(2, zero=HOST, client="adamw", mode="unmanaged"),
    Setup(2, zero=HOST, client="adamw", mode="unmanaged", bf16=True, config=ACCUM32),
    Setup(1, zero=HOST, client="adamw", mode="unmanaged"),
    Setup(2, zero=HOST, client="adamw", mode="set_boundary"),
    Setup(2, zero=HOST, client="adamw", mode="coalesce"),
    Setup(1, zero=HOST, client="adamw", mode="no_sync"),
    Setup(1, zero=HOST, client="adamw", mode="coalesce", bf16=True, config=ACCUM32),
    Setup(2, zero=HOST, client="adamw", model="reentrant"),
    Setup(2, zero=HOST, client="adamw", config={"gradient_clipping": 0.01}),
    Setup(2, zero=HOST, client="adamw", ranks=1),
)
AUTOCASTS = (
    Setup(1, config=AUTOCAST),
    Setup(2, config=AUTOCAST),
    Setup(1, config=AUTOCAST, model="tied"),
    Setup(2, config=AUTOCAST, model="tied"),  # two buckets: its scale is in no Linear
    Setup(2, config=AUTOCAST, model="tied", zero=OVERLAP | SMALL),
    Setup(1, config=AUTOCAST, model="tied", zero=LISTED),
    Setup(2, config=AUTOCAST, zero=OVERLAP | LISTED),
    Setup(2, config=AUTOCAST, zero=WHOLE, ranks=3),
    Setup(2, config=AUTOCAST | {"gradient_predivide_factor": 3.0}, zero=WHOLE, groups=True),
    Setup(1, config=AUTOCAST, ranks=3),
    Setup(2, config=AUTOCAST, zero=HOST, client="adamw"),
    Setup(1, config=AUTOCAST, mode="set_boundary"),
    Setup(2, config=AUTOCAST, mode="coalesce"),
    Setup(2, config=AUTOCAST, model="reentrant"),
    Setup(
        2,
        model="tied",
        config={
            "torch_autocast": {
                **AUTOCAST["torch_autocast"],
                "lower_precision_safe_modules": ["torch.nn.Conv1d"],
            }
        },
    ),
)

DROPPED = ("accumulate", "dropped_micro_steps")
CARRIED = ("accumulate", "carried_over")
UNFED = ("master", "zeroed")
STALE = ("master", "stale")
OPEN_INSTRUCT = "https://github.com/allenai/open-instruct/pull/1498"
HOST_KEEPS = (
    "tests/real/test_zero12.py: test_offload_keeps_what_it_should_not_without_gradtrace_too"
)
OVERLAP_SKIPS = (
    "tests/real/test_zero12.py: test_overlap_leaves_out_at_stage_1_without_gradtrace_too"
)

FOUND = (
    Entry(Setup(2, mode="by_hand", zero=OVERLAP), finding=DROPPED, reference=OPEN_INSTRUCT),
    Entry(Setup(2, mode="by_hand", zero=LISTED), finding=DROPPED, reference=OPEN_INSTRUCT),
    Entry(Setup(2, mode="by_hand", config=AUTOCAST), finding=DROPPED, reference=OPEN_INSTRUCT),
    Entry(
        Setup(2, mode="by_hand", zero=HOST, client="adamw"),
        finding=DROPPED,
        reference=OPEN_INSTRUCT,
    ),
    # Reduced by the hooks of the last micro-step alone; without a gradient there, by nobody.
    Entry(
        Setup(1, zero=OVERLAP, client="sgd", model="tied", micro_steps=3),
        finding=("accumulate", "not_reduced"),
        reference=OVERLAP_SKIPS,
    ),
    Entry(
        Setup(1, zero=OVERLAP | LISTED, model="tied", micro_steps=3, bf16=True),
        finding=("accumulate", "not_reduced"),
        reference=OVERLAP_SKIPS,
    ),
    # Without a gradient in the first micro-step, but in a later one.
    Entry(Setup(2, zero=HOST, client="sgd", model="tied"), finding=CARRIED, reference=HOST_KEEPS),
    # Without a gradient in the last micro-step, but in an earlier one.
    Entry(
        Setup(2, zero=HOST, client="sgd", model="tied", micro_steps=3),
        finding=UNFED,
        reference=HOST_KEEPS,
    ),
    Entry(
        Setup(2, zero=HOST, client="sgd", model="tied", micro_steps=3, bf16=True, config=ACCUM32),
        finding=UNFED,
        reference=HOST_KEEPS,
    ),
    # Without a gradient in the whole step, but in the one before.
    Entry(
        Setup(1, zero=HOST, client="sgd", model="tied", micro_steps=1),
        finding=STALE,
        reference=HOST_KEEPS,
    ),
)
REFUSED = (
    Entry(
        Setup(2, config={"torch_autocast": {"enabled": True, "dtype": "float16"}}),
        refused="torch_autocast in fp16",
    ),
    Entry(
        Setup(2, model="one", config={"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
        refused="the Muon optimizer",
    ),
    Entry(Setup(1, model="moe"), refused="mixture-of-experts layers"),
    Entry(Setup(2, model="moe"), refused="mixture-of-experts layers"),
    Entry(
        Setup(
            2,
            zero=HOST | {"zenflow": {"update_interval": 4}},
            config={
                "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        ),
        refused="ZenFlow",
    ),
)

ENTRIES: tuple[Entry, ...] = (
    *(
        Entry(setup)
        for setup in (
            *CONTIGUOUS,
            *SCALINGS,
            *DTYPES,
            *NON_CONTIGUOUS,
            *MODES,
            *OFFLOAD,
            *AUTOCASTS,
        )
    ),
    *FOUND,
    *REFUSED,
)
