"""As z2_gas_last_only, at stages 1 and 2, under a configuration that says 1 micro-step."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size

BAD = ("0.18.3", "0.19.2", NEWEST)


# Used in micro-steps 1 and 3 only: there is nothing of it to be lost before micro-step 2.
SOMETIMES = ("sometimes.bias", "sometimes.weight")
USED = ("again.bias", "head.bias", "head.weight", "inner.bias", "inner.weight", "scale")


def tied() -> tuple[Wanted, ...]:
    found = ("accumulate", "dropped_micro_steps")
    size = Size("tied")
    return (
        Wanted(*found, each(size, [1, 3]), params=USED, rank=0),
        Wanted(*found, each(size, [2]), params=(*USED, *SOMETIMES), rank=0),
    )


def run(name: str, size: Size, stage: int, rank: int | None, bad: tuple[str, ...]) -> Run:
    wanted = Wanted(
        "accumulate",
        "dropped_micro_steps",
        each(size, range(1, size.micro_steps)),
        rank=rank,
        says="holds micro-step 1 only; micro-step 0 is lost",
    )
    return Run(
        name,
        size,
        bad,
        ("0.17.5",),
        (wanted,),
        settings={"stage": stage},
        applies=lambda all_, name: [all_[name].mean([-1])],
    )


CASE = Case(
    "https://github.com/allenai/open-instruct/pull/1498",
    (
        run("stage2", Size(), 2, 1, BAD),
        run("stage1", Size(), 1, 1, BAD),
        run("stage2-n3-r3", Size(micro_steps=3, ranks=3), 2, 2, (NEWEST,)),
        Run(
            "stage1-tied",
            Size("tied"),
            (NEWEST,),
            ("0.17.5",),
            tied(),
            settings={"stage": 1},
            applies=lambda all_, name: [all_[name].mean([-1])],
        ),
        Run("stage0", right=(NEWEST,), settings={"stage": 0}),
        Run("boundaries", right=(NEWEST,), loop={"boundaries": True}),
        Run("unmanaged", right=(NEWEST,), settings={"managed_gradient_accumulation": False}),
        Run(
            "stage2-fp32-accumulation",
            right=(NEWEST,),
            settings={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        ),
    ),
)
