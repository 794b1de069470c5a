"""Neither release breaks a law; the two part where gradients are clipped."""

from collections.abc import Mapping

import numpy as np

from tests.replay.by_hand import Array, Local
from tests.replay.case import NEWEST, Case, Compared, Run
from tests.replay.problem import Size

SIZE = Size(micro_steps=1)  # its norms are above 1


def clipped_to_1(all_: Mapping[str, Local], name: str) -> list[Array]:
    means = [local.mean() / SIZE.micro_steps for local in all_.values()]
    norm = float(np.sqrt(sum(float(m @ m) for m in means)))
    return [all_[name].mean() / max(1.0, norm + 1e-6)]


def parted(before: str, after: str) -> Compared:
    return Compared(
        ("default", before),
        ("default", after),
        "diverged",
        point="clipped_grad",
        step=0,
        cause="scaled",
        says="clip",
        notes=("effective gradient_clipping differs: 0.0 against 1.0",),
    )


CASE = Case(
    "https://github.com/deepspeedai/DeepSpeed/pull/8068",
    (Run("default", SIZE, ("0.19.3", NEWEST), ("0.18.3", "0.19.2"), (), applies=clipped_to_1),),
    (parted("0.19.2", "0.19.3"), parted("0.19.2", NEWEST)),
)
