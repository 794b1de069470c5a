"""Step 0 is right. From step 1 on the buffer begins with what the step before left in it.

These releases have another defect in the same optimizer. Up to 0.18.2 it reports the norm with the loss
scale in it (https://github.com/deepspeedai/DeepSpeed/pull/8588); from 0.18.3 on the loss is not
multiplied by the scale that gradients are divided by
(https://github.com/deepspeedai/DeepSpeed/pull/7839). Both are findings of their own.
"""

from collections.abc import Mapping

from tests.replay.by_hand import Array, Local, mean
from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size

NOT_DIVIDED = "the loss scale (65536) was not divided out"


def sum_of_steps(all_: Mapping[str, Local], name: str) -> list[Array]:
    return [all_[name].mean() + sum(mean(step) for step in all_[name].before)]


def carried(size: Size) -> Wanted:
    return Wanted(
        "accumulate_local",
        "carried_over",
        each(size, [0], range(1, size.steps)),
        says="what the step before left there: the buffer was not cleared",
    )


def norm(size: Size) -> Wanted:
    return Wanted("unscale_clip", "not_unscaled", each(size, [None]), params=(), says=NOT_DIVIDED)


def run(name: str, size: Size, bad: tuple[str, ...], right: tuple[str, ...]) -> Run:
    return Run(name, size, bad, right, (carried(size), norm(size)), applies=sum_of_steps)


UNSCALED = Size()
CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/issues/7837",
    (
        run("n4", Size(steps=3), ("0.17.6", "0.18.2"), ("0.17.5", "0.18.6", "0.19.2", NEWEST)),
        run("n1-r3", Size(micro_steps=1, ranks=3), ("0.17.6",), ("0.19.2",)),
        Run(
            "two_bugs",
            UNSCALED,
            ("0.18.5",),
            (),
            (
                Wanted(
                    "seed",
                    "scaled",
                    each(UNSCALED, range(4)),
                    params=(),
                    says="the loss scale is missing",
                ),
                carried(UNSCALED),
                norm(UNSCALED),
            ),
        ),
    ),
)
