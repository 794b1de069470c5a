"""The ranks' buckets list the two layers in different orders; the head is right."""

from tests.replay.case import NEWEST, Case, Run, Wanted, each
from tests.replay.problem import Size

MIXED = ("left.bias", "left.weight", "right.bias", "right.weight")
EVERY = ("0.17.5", "0.18.3", "0.19.2", NEWEST)


def run(name: str, size: Size, rank: int | None, releases: tuple[str, ...]) -> Run:
    wanted = Wanted(
        "replicate",
        "order_mismatch",
        each(size, range(size.micro_steps)),
        params=MIXED,
        rank=rank,
        says="adds up right.bias of rank 0 with left.bias of rank 1",
    )
    return Run(name, size, releases, (), (wanted,), off=MIXED)


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/issues/2343",
    (
        run("r2", Size(), None, EVERY),
        run("r3", Size(ranks=3, micro_steps=2), 1, (NEWEST,)),  # rank 1 is the odd one
        Run("r1", Size(ranks=1), right=EVERY),
    ),
)
