"""List the defects of DeepSpeed that the catalog's configurations meet, by release.

A release is bad from ``first_bad`` up to, not including, ``first_right``: of the releases that
`tests.real.releases` runs, the first of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from tests.real.training import Setup


@dataclass(frozen=True)
class Defect:
    """Describe one defect: where it applies, and what audit must find first.

    Attributes:
        slug: its name in tables.
        applies: whether a configuration meets it.
        first_bad, first_right: releases; ``first_right`` is ``None`` while none is right.
        law, cause: audit's first finding.
        reference: where it is reported, or what reproduces it without gradtrace.
    """

    slug: str
    applies: Callable[[Setup], bool]
    first_bad: str
    first_right: str | None
    law: str
    cause: str
    reference: str

    def concerns(self, release: str) -> bool:
        """Say whether a release is bad."""
        version = Version(release)
        if version < Version(self.first_bad):
            return False
        return self.first_right is None or version < Version(self.first_right)


def accumulates_separately(setup: Setup) -> bool:
    """Say whether the configuration asks for fp32 accumulation of 16-bit gradients."""
    wanted = setup.config.get("data_types", {}).get("grad_accum_dtype")
    return wanted == "fp32" and (setup.bf16 or setup.fp16)


def in_bf16_optimizer(setup: Setup) -> bool:
    """Say whether the configuration asks for BF16_Optimizer."""
    return setup.stage == 1 and setup.bf16 and accumulates_separately(setup)


def by_hand(setup: Setup) -> bool:
    """Say whether the caller accumulates with a configuration that says 1."""
    return setup.mode in {"by_hand", "tensor_backward", "mixed", "scale"} and setup.micro_steps > 1


def unfused(setup: Setup) -> bool:
    """Say whether the configuration asks for FP16_UnfusedOptimizer under bf16."""
    return setup.stage == 0 and setup.bf16 and "fused" not in setup.client


OPEN_INSTRUCT = "https://github.com/allenai/open-instruct/pull/1498"
PULL_7839 = "https://github.com/deepspeedai/DeepSpeed/pull/7839"
PULL_7985 = "https://github.com/deepspeedai/DeepSpeed/pull/7985"

# Where a configuration meets several, the first is what audit finds first.
DEFECTS: tuple[Defect, ...] = (
    Defect(
        "noncontiguous_not_reduced",
        lambda s: s.stage in {1, 2} and s.zero.get("contiguous_gradients") is False,
        "0.14.4",
        "0.19.8",
        "reduce",
        "not_reduced",
        "https://github.com/deepspeedai/DeepSpeed/pull/8382",
    ),
    # In 0.17.6 to 0.18.3 stage 1 with fp32 accumulation gives FP16_UnfusedOptimizer too.
    Defect(
        "unfused_norm_not_unscaled",
        lambda s: unfused(s) or in_bf16_optimizer(s),
        "0.17.6",
        "0.18.3",
        "unscale_clip",
        "not_unscaled",
        "https://github.com/deepspeedai/DeepSpeed/pull/8588",
    ),
    Defect(
        "unfused_loss_not_scaled",
        unfused,
        "0.18.3",
        "0.18.6",
        "seed",
        "scaled",
        PULL_7839,
    ),
    Defect(
        "unfused_loss_not_scaled, stage 1",
        in_bf16_optimizer,
        "0.18.3",
        "0.18.5",
        "seed",
        "scaled",
        PULL_7839,
    ),
    Defect(
        "z2_offload_middle_lost",
        lambda s: s.stage == 2 and "offload_optimizer" in s.zero and s.micro_steps > 2,
        "0.15.4",
        "0.19.0",
        "accumulate",
        "dropped_micro_steps",
        "https://github.com/deepspeedai/DeepSpeed/pull/7967",
    ),
    Defect(
        "z2_gas_last_only",
        lambda s: s.stage == 2 and s.micro_steps > 1,
        "0.17.6",
        "0.18.3",
        "accumulate",
        "dropped_micro_steps",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
    ),
    # 0.17.6 to 0.18.2 stop with an error at the second backward pass of such a window.
    Defect(
        "z12_manual_last_only",
        lambda s: s.stage in {1, 2} and by_hand(s) and not accumulates_separately(s),
        "0.18.3",
        None,
        "accumulate",
        "dropped_micro_steps",
        OPEN_INSTRUCT,
    ),
    Defect(
        "z2_manual_last_only, fp32 accumulation",
        lambda s: s.stage == 2 and by_hand(s) and accumulates_separately(s),
        "0.18.3",
        "0.19.8",
        "accumulate",
        "dropped_micro_steps",
        OPEN_INSTRUCT,
    ),
    Defect(
        "bf16_z1_boundary_leak",
        lambda s: in_bf16_optimizer(s) and not by_hand(s),
        "0.18.5",
        "0.19.0",
        "pack",
        "dropped_micro_steps",
        PULL_7985,
    ),
    Defect(
        "bf16_z1_boundary_leak, by hand",
        lambda s: in_bf16_optimizer(s) and by_hand(s),
        "0.18.5",
        "0.19.0",
        "pack",
        "zeroed",
        PULL_7985,
    ),
    Defect(
        "z2_accumulation_dtype_ignored",
        lambda s: s.stage == 2 and s.bf16 and accumulates_separately(s) and s.micro_steps > 1,
        "0.14.4",
        "0.19.8",
        "accumulate",
        "low_precision",
        "none found; stage_1_and_2.py of 0.19.7 adds in the model's dtype whatever is asked for",
    ),
    Defect(
        "z3_carried_over",
        lambda s: s.stage == 3 and s.model == "tied" and s.micro_steps > 1 and s.mode != "coalesce",
        "0.14.4",
        None,
        "accumulate",
        "carried_over",
        "tests/real/test_upstream_bugs.py",
    ),
)
