"""Small configurations that meet, or just miss, the known defects of one release or another."""

from tests.real.catalog.entry import Entry
from tests.real.training import Setup

DROPPED = ("accumulate", "dropped_micro_steps")
PULL_1498 = "https://github.com/allenai/open-instruct/pull/1498"

ENTRIES: tuple[Entry, ...] = (
    Entry(Setup(2)),
    Entry(Setup(2, mode="set_boundary", bf16=True)),
    Entry(Setup(1, mode="by_hand"), finding=DROPPED, reference=PULL_1498),
    Entry(Setup(2, mode="by_hand"), finding=DROPPED, reference=PULL_1498),
    Entry(Setup(1, mode="mixed"), finding=DROPPED, reference=PULL_1498),
    Entry(Setup(2, mode="tensor_backward"), finding=DROPPED, reference=PULL_1498),
    Entry(Setup(3)),
    Entry(
        Setup(3, model="tied"),
        finding=("accumulate", "carried_over"),
        reference="tests/real/test_upstream_bugs.py",
    ),
)
