"""Recompute the norm of all that the optimizers of a group are given, in float64, with a bound.

DeepSpeed squares in float32 (or float64) and adds up in an order of its own: over a tensor, over the
tensors of a rank, over the ranks. A sum of n squares, each rounded, has a relative error of at most
gamma(n + 1), and the root no more; each tensor's norm may be rounded, squared and added again (4
roundings a tensor), the sum rounded, divided by the number of ranks and added over them. A square
may be lost to underflow.

Source: deepspeed 0.19.8, runtime/utils.py, clip_grad_norm_ (356) and get_global_norm_of_tensors
(909); stage_1_and_2.py:2648; Higham, Accuracy and Stability, 4.2.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from gradtrace.analysis.bounds import gamma
from gradtrace.analysis.laws.common import Lack, Norm, Scene
from gradtrace.trace.dtypes import DTYPES

LARGEST_NORM: Final = 1e15  # far from where a float32 sum of squares overflows
_FP32 = DTYPES["float32"]
_TENSOR = 4  # the root of its sum, its square, its sum with the others, a cast
_REST = 16  # the sum's root, casts, and the products that a rescaling makes


def gradient_norm(scene: Scene, rank: int) -> Norm | Lack:
    """Return the norm over all shards of a rank's group, if every one of them was recorded."""
    members = (rank,) if scene.replicated(rank) else scene.alignment.header(rank).dp_ranks
    if members not in scene.norms:
        scene.norms[members] = _gradient_norm(scene, members)
    return scene.norms[members]


def averaged_norm(scene: Scene, rank: int) -> Norm | Lack:
    """Return the mean of the norms of a group's ranks, as a plain optimizer of stage 0 is clipped with.

    The ranks' gradients are the same unless something broke before, and then their norms are not.
    """
    if not scene.replicated(rank):
        return gradient_norm(scene, rank)
    members = scene.alignment.header(rank).dp_ranks
    if not set(members) <= set(scene.ranks):
        return Lack("skip", "ranks of the group are not in the trace")
    norms: list[Norm] = []
    for member in members:
        norm = gradient_norm(scene, member)
        if isinstance(norm, Lack):
            return norm
        norms.append(norm)
    # The mean of numbers that are not negative: no error of it is relatively larger than theirs.
    return Norm(
        math.fsum(norm.value for norm in norms) / len(norms),
        max(norm.relative for norm in norms),
        max(norm.absolute for norm in norms),
    )


def _gradient_norm(scene: Scene, members: tuple[int, ...]) -> Norm | Lack:
    alignment = scene.alignment
    if not set(members) <= set(scene.ranks):
        return Lack("skip", "ranks of the group are not in the trace")
    total, count, tensors = 0.0, 0, 0
    for parameter in alignment.parameters:
        if not parameter.trainable or parameter.group is None:
            continue
        if not parameter.captured:
            return Lack("skip", "the norm is of parameters that were not captured too")
        for member in members:
            lack = scene.lack("master_grad", None, member)
            if lack is not None:
                return lack
            events = alignment.events(scene.step, None, "master_grad", member, parameter.index)
            held = sum(span.numel for span in alignment.own_spans(member, parameter.index))
            if sum(event.numel for event in events) != held:
                return Lack("skip", "the norm is of gradients that were not recorded too")
            for event in events:
                for span in event.spans:
                    values = alignment.fetch(event, span)
                    with np.errstate(over="ignore", invalid="ignore"):
                        total += float(values @ values)
                    count += len(values)
                    tensors += 1
    world = len(alignment.header(members[0]).dp_ranks)
    roundings = count + 1 + _TENSOR * tensors + world + _REST
    relative = gamma(roundings, _FP32.unit_roundoff) + gamma(count + 4, 2.0**-53)
    lost = math.sqrt((count + 2 * tensors) * _FP32.smallest_normal)
    return Norm(math.sqrt(total) if total >= 0 else math.nan, relative, lost)
