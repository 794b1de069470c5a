"""From the second micro-step on the accumulation buffer holds the last one only."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size


def run(
    name: str, size: Size, rank: int | None, bad: tuple[str, ...], right: tuple[str, ...]
) -> Run:
    wanted = Wanted(
        "accumulate",
        "dropped_micro_steps",
        each(size, range(1, size.micro_steps)),
        rank=rank,
        says="holds micro-step 1 only; micro-step 0 is lost",
    )
    return Run(
        name, size, bad, right, (wanted,), applies=lambda all_, name: [all_[name].mean([-1])]
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/issues/7718",
    (
        run("n4", Size(), 1, ("0.17.6", "0.18.2"), ("0.17.5", "0.18.3", NEWEST)),
        run("n2-r3", Size(micro_steps=2, ranks=3), 2, ("0.17.6",), ("0.18.3",)),
        run("n7-wide", Size("wide", micro_steps=7, groups=True), 1, ("0.17.6",), ("0.18.3",)),
    ),
)
