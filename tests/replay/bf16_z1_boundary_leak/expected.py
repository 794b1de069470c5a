"""The bucket of the boundary lacks the boundary's own micro-step, which the optimizer gets unreduced."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size

LATE = "it was added after the collective, and stays on the rank"


def run(name: str, size: Size, bad: tuple[str, ...], right: tuple[str, ...]) -> Run:
    last = size.micro_steps - 1
    wanted = Wanted("pack", "dropped_micro_steps", each(size, [last]), rank=None, says=LATE)
    if last == 0:
        wanted = Wanted(
            "pack",
            "zeroed",
            each(size, [0]),
            rank=None,
            says="own gradients: they were not reduced",
        )
    return Run(
        name,
        size,
        bad,
        right,
        (wanted,),
        applies=lambda all_, name: [
            all_[name].mean(range(last)) + own[last] for own in all_[name].gradients
        ],
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/pull/7985",
    (
        run("n4", Size(), ("0.18.5", "0.18.9"), ("0.17.5", "0.19.0", "0.19.2", NEWEST)),
        run("n2-r3-tied", Size("tied", micro_steps=2, ranks=3), ("0.18.5",), ("0.19.2",)),
        run("n1", Size(micro_steps=1), ("0.18.5",), ("0.19.2",)),
        # One rank alone shows nothing, for nothing is wrong there.
        Run("r1", Size(ranks=1), right=("0.18.5", "0.19.2")),
    ),
)
