"""Micro-steps 1 to n - 2 are not added; the last is."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size


def run(
    name: str, size: Size, rank: int | None, bad: tuple[str, ...], right: tuple[str, ...]
) -> Run:
    wanted = Wanted(
        "accumulate",
        "dropped_micro_steps",
        each(size, range(1, size.micro_steps - 1)),
        rank=rank,
        says="holds micro-step 0 only; micro-step 1 is lost",
    )
    return Run(
        name, size, bad, right, (wanted,), applies=lambda all_, name: [all_[name].mean([0, -1])]
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/pull/7967",
    (
        run(
            "n4",
            Size(),
            1,
            ("0.15.4", "0.17.5", "0.18.3", "0.18.6"),
            ("0.15.1", "0.19.0", "0.19.2", NEWEST),
        ),
        run("n3-r3", Size(micro_steps=3, ranks=3), 2, ("0.17.5",), ("0.19.2",)),
        run("n7-wide", Size("wide", micro_steps=7, groups=True), 1, ("0.17.5",), ("0.19.2",)),
        Run("n2", Size(micro_steps=2), right=("0.17.5", "0.19.2")),  # right by accident
    ),
)
