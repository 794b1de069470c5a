"""Say laws, causes and places in words that a newcomer understands, and write numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gradtrace.trace.points import BY_NAME

LAW_WORDS: Final = {
    "replicate": "equal on every rank",
    "seed": "loss gradient as asked",
    "accumulate_local": "buffer = before + local",
    "pack": "bucket = local gradients",
    "reduce": "reduced = mean of buckets",
    "partition": "shard = own reduced part",
    "accumulate": "buffer = before + shard",
    "master": "master = accumulated",
    "unscale_clip": "clipped = master / factor",
    "end_to_end": "master = mean of locals",
    "update": "weights = optimizer's rule",
    "publish": "model's weights = master",
}

# The point that each law explains, in causal order: what a hop leads to.
LAW_POINTS: Final = {
    "seed": "loss",
    "accumulate_local": "local_accum",
    "pack": "bucket",
    "reduce": "reduced",
    "partition": "partition",
    "accumulate": "accumulated",
    "master": "master_grad",
    "unscale_clip": "clipped_grad",
    "end_to_end": "master_grad",
    "update": "master_weight",
    "publish": "weight",
}

CAUSE_WORDS: Final = {
    "dropped_micro_steps": "gradients of earlier micro-steps are missing from the sum",
    "double_counted": "something was added more than once",
    "carried_over": "the buffer still held values from before it should have been cleared",
    "not_averaged": "summed over the ranks, but not divided by their number",
    "averaged_twice": "divided by the number of ranks twice",
    "scaled": "everything is off by one constant factor",
    "not_reduced": "the ranks' gradients were not combined: what left is what came in",
    "rank_missing": "the gradient of at least one rank is missing from the mean",
    "shifted": "the values are right, but stand some elements away from their place",
    "swapped": "the values of two parameters stand in each other's place",
    "stale": "the values of an earlier step or micro-step stand there again",
    "zeroed": "zeros stand where a gradient should be",
    "sign_flipped": "the sign is turned around",
    "non_finite": "NaN or infinity stands where a number should be",
    "low_precision": "the values are right, but kept in a coarser format than recorded",
    "partly_overwritten": "a part of the values was overwritten",
    "not_unscaled": "the loss scale was not divided out",
    "wrong_clip": "clipped by another factor than the norm asks for",
    "inputs_differ": "the forward passes worked on different data",
    "weights_differ": "the two runs already hold different weights",
    "boundary_mismatch": "ranks or runs disagree on where the accumulation ends",
    "order_mismatch": "the ranks combine different parameters with each other",
    "unknown": "no known mistake explains the numbers",
}


def number(value: float | None) -> str:
    """Write a number with the seven digits that float32 can tell apart."""
    return "-" if value is None else f"{value:.7g}"


def brief(value: float | None) -> str:
    """Write the size of an error: two digits are plenty."""
    return "-" if value is None else f"{value:.2g}"


def size(count: int) -> str:
    """Write a number of bytes."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def plural(count: int, word: str) -> str:
    """Write ``1 step``, ``2 steps``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def place(step: int | None, micro_step: int | None) -> str:
    """Write when something happened."""
    if step is None:
        return "in no single step"
    return f"step {step}" if micro_step is None else f"step {step}, micro-step {micro_step}"


def thing(point: str, param: str | None) -> str:
    """Write what is wrong: ``accumulated of layers.0.weight``."""
    return point if param is None else f"{point} of {param}"


def about(point: str) -> str:
    """Explain a point in one line."""
    known = BY_NAME.get(point)
    return point if known is None else f"{point} ({known.what})"


def cause(slug: str) -> str:
    """Explain a cause in one line."""
    return CAUSE_WORDS.get(slug, slug)


def listing(words: Iterable[str], most: int) -> str:
    """Write some of many names, and how many are left out."""
    names = list(words)
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
