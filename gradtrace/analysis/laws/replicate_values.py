"""Law `replicate`, for values: model weights, learning rates, loss scale and clip value.

Where every rank holds a parameter whole, its bits are the same on all ranks of a data-parallel group:
partitioned optimizers gather them from their owners, replicated ones compute them from the same
gradient. Where parameters are partitioned, no two ranks hold the same elements, and nothing is checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradtrace.analysis.laws.common import Lack, Place, Scene, simple_finding
from gradtrace.analysis.laws.replicate import LAW, odd_one, told
from gradtrace.analysis.origins import Hashed, whole_weights

# What a step's facts say of settings that all ranks must share.
_SCALARS = (("lr", "learning rates"), ("loss_scale", "loss scale"), ("clip", "clip value"))


def check(scene: Scene) -> None:
    """Compare the values that all ranks of a step share."""
    if len(scene.ranks) < 2:
        return
    _weights(scene)
    _scalars(scene)
    for micro_step in scene.micro_steps:
        _loss_scale(scene, micro_step)


def _weights(scene: Scene) -> None:
    held: dict[int, dict[int, Hashed]] = {}
    for rank in scene.ranks:
        lack = scene.lack("weight", None, rank)
        if lack is not None:
            scene.ledger.lack(LAW, lack)
            return
        held[rank] = whole_weights(scene.alignment, scene.step, rank)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in scene.ranks:
        groups.setdefault(scene.alignment.header(rank).dp_ranks, []).append(rank)
    for ranks in groups.values():
        for parameter in scene.alignment.parameters:
            values = {r: held[r][parameter.index] for r in ranks if parameter.index in held[r]}
            if len(values) > 1:
                _equal(scene, parameter.index, values)
            elif len(ranks) > 1 and parameter.captured:
                scene.ledger.lack(LAW, Lack("skip", "weights are partitioned"))


def _equal(scene: Scene, param: int, values: Mapping[int, Hashed]) -> None:
    if len(set(values.values())) == 1:
        scene.ledger.passed(LAW)
        return
    hashes = {rank: mixed for rank, (_, mixed) in values.items()}
    if len({dtype for dtype, _ in values.values()}) > 1:
        hashes = {rank: f"{mixed} ({dtype})" for rank, (dtype, mixed) in values.items()}
    detail = (
        f"The ranks begin the step with different weights of {scene.name(param)}; the hashes are "
        f"{told(hashes)}."
    )
    place = Place(LAW, scene.step, None, odd_one(values), param, "weight")
    simple_finding(scene, place, "weights_differ", detail)


def _scalars(scene: Scene) -> None:
    ends = {rank: scene.alignment.step_end(scene.step, rank).facts for rank in scene.ranks}
    wrong: list[str] = []
    rank: int | None = None
    for name, words in _SCALARS:
        values = {rank: str(facts.get(name)) for rank, facts in ends.items()}
        if any(facts.get(name) is None for facts in ends.values()):
            continue
        if len(set(values.values())) == 1:
            scene.ledger.passed(LAW)
            continue
        rank = odd_one(values)
        wrong.append(f"The ranks do not agree on the {words}: {told(values)}.")
    if wrong:
        place = Place(LAW, scene.step, None, rank, None, "clipped_grad")
        simple_finding(scene, place, "unknown", " ".join(wrong))


def _loss_scale(scene: Scene, micro_step: int) -> None:
    values: dict[int, str] = {}
    for rank in scene.ranks:
        records = scene.alignment.records(scene.step, "loss", rank, micro_step)
        if records and records[-1].facts.get("loss_scale") is not None:
            values[rank] = str(records[-1].facts["loss_scale"])
    if len(values) < 2:
        return  # boundary flags of the same records say what was lost
    if len(set(values.values())) == 1:
        scene.ledger.passed(LAW)
        return
    place = Place(LAW, scene.step, micro_step, odd_one(values), None, "loss")
    detail = f"The ranks do not agree on the loss scale: {told(values)}."
    simple_finding(scene, place, "unknown", detail)
