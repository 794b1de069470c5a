"""Training is right and the audit passes: spans come from the partition, not from the accessors."""

from tests.replay.case import NEWEST, Case, Compared, Run

RELEASES = ("0.17.5", "0.18.3", "0.19.2", NEWEST)

CASE = Case(
    "no report was found",
    (
        Run("on", right=RELEASES, told=False),
        Run("off", right=RELEASES, told=True, settings={"round_robin": False}),
    ),
    tuple(
        Compared(
            ("on", release),
            ("off", release),
            "agree",
            notes=("effective round_robin_gradients differs: true against false",),
        )
        for release in RELEASES
    ),
)
