"""Measure the smallest relative error that each law detects, and write docs/sensitivity.md.

    python benchmarks/sensitivity.py [--seeds 3] [--output docs/sensitivity.md]

For each law, dtype, size and kind of error, what the run would have recorded is computed with every
rounding, the error is planted, and its size is bisected on half octaves between 2**-30 and 1. A
number stands for the worst of the seeds: every one of them detects an error of that size.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gradtrace.analysis import bounds
from gradtrace.analysis.audit import audit
from gradtrace.analysis.bounds import Estimate
from gradtrace.analysis.fit import fit
from gradtrace.analysis.laws import end_to_end, optimizers, publish, reduce, unscale_clip
from gradtrace.analysis.laws.common import Norm
from gradtrace.testing.arithmetic import ORDERS, Arithmetic, mean
from gradtrace.testing.synthetic import Fault, Run, write_run
from gradtrace.trace.dtypes import DTYPES, Dtype, Float64

GRID = [2.0 ** (-k / 2) for k in range(60, -1, -1)]
SIZES = (100, 1_000, 100_000)
WORLDS = (2, 8, 64)
NAMES = ("float32", "bfloat16", "float16")
MICRO_STEPS = 4
SINGLE = DTYPES["float32"]
Terms = tuple[tuple[str, Float64], ...]


@dataclass(frozen=True)
class Case:
    """Hold one correct hop, and how a wrong one comes about.

    Attributes:
        estimate: what the law says.
        right: what is recorded if all is well.
        wrong: kind of error -> its size -> what is recorded then; ``global`` and ``element`` are
            made from ``right``.
        designs: the splits into terms that the coefficient test is made on.
        stored: dtype of the record.
        dtype, lost: what the coefficient test is told of the path.
    """

    estimate: Estimate
    right: Float64
    wrong: dict[str, Callable[[float], Float64]]
    designs: tuple[Terms, ...]
    stored: Dtype
    dtype: Dtype
    lost: float = 0.0

    def record(self, kind: str, size: float) -> Float64:
        """Return what is recorded with an error of that kind and size."""
        if kind in self.wrong:
            return self.wrong[kind](size)
        found = self.right.copy()
        if kind == "global factor":
            found *= 1 + size
        else:  # the element of median size
            at = int(np.argsort(np.abs(found), kind="stable")[len(found) // 2])
            found[at] *= 1 + size
        return Arithmetic().round(found, self.stored)

    def convicts(self, kind: str, size: float) -> str | None:
        """Return the test that convicts: ``b`` for the bound, ``c`` for the coefficients."""
        found = self.record(kind, size)
        if bounds.breaks(found, self.estimate).any():
            return "b"
        for terms in self.designs:
            if fit(found, terms, self.estimate, self.dtype, lost=self.lost).off:
                return "c"
        return None


def _gradients(rng: np.random.Generator, count: int, numel: int, dtype: Dtype) -> list[Float64]:
    return [Arithmetic().round(row, dtype) for row in rng.standard_normal((count, numel))]


def _sum(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    """Add one micro-step to a buffer that holds three."""
    plain = Arithmetic()
    parts = _gradients(np.random.default_rng(seed), MICRO_STEPS, numel, dtype)
    carry = parts[0]
    for part in parts[1:-1]:
        carry = plain.add(carry, part, dtype)
    estimate = bounds.add_up([bounds.exact(carry), bounds.exact(parts[-1])], dtype)

    def off(size: float) -> Float64:
        return plain.add(carry, plain.round((1 - size) * parts[-1], dtype), dtype)

    terms = (("before", carry), ("now", parts[-1]))
    return Case(estimate, off(0), {"one micro-step": off}, (terms,), dtype, dtype)


def _reduce(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    rng = np.random.default_rng(seed)
    rows = _gradients(rng, world, numel, dtype)
    how = Arithmetic(order=ORDERS[seed % len(ORDERS)], seed=seed)
    guilty = int(rng.integers(world))
    entered = [(rank, bounds.exact(row), dtype) for rank, row in enumerate(rows)]
    result = reduce.combine(entered, 0, reduce.Way(dtype, 1 / world, 1.0, False), dtype)

    def off(size: float) -> Float64:
        wrong = how.round((1 - size) * rows[guilty], dtype)
        return mean([*rows[:guilty], wrong, *rows[guilty + 1 :]], dtype, how)

    terms = tuple((f"rank {rank}", term.value) for rank, term in result.terms)
    wrong = {"one rank": off}
    return Case(result.estimate, off(0), wrong, (terms,), dtype, result.dtype, result.lost)


def _end_to_end(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    """Reduce each micro-step in the model's dtype and accumulate in float32, as ZeRO-2 does."""
    rng = np.random.default_rng(seed)
    rows = _gradients(rng, world * MICRO_STEPS, numel, dtype)
    how = Arithmetic(order=ORDERS[seed % len(ORDERS)], seed=seed)
    guilty, late = int(rng.integers(world)), MICRO_STEPS - 1

    def run(rank_size: float, step_size: float) -> Float64:
        total = np.zeros(numel)
        for step in range(MICRO_STEPS):
            sent = rows[step * world : (step + 1) * world]
            sent = [
                how.round((1 - rank_size) * row, dtype) if rank == guilty and rank_size else row
                for rank, row in enumerate(sent)
            ]
            part = mean(sent, dtype, how)
            total = how.add(total, part * (1 - step_size) if step == late else part, SINGLE)
        return total

    path = end_to_end.path_of(
        [dtype, SINGLE], factor=1 / world, predivide=1.0, world=world, most=MICRO_STEPS, again=1
    )
    table = np.stack(rows).reshape(MICRO_STEPS, world, numel) / world
    by_rank = dict(enumerate(table.sum(axis=0)))
    estimate = end_to_end.estimate_of(
        by_rank, world * np.abs(table).sum(axis=(0, 1)), path, world * MICRO_STEPS
    )
    designs = (
        tuple((f"rank {rank}", values) for rank, values in by_rank.items()),
        tuple((f"micro-step {m}", values) for m, values in enumerate(table.sum(axis=1))),
    )
    wrong = {"one rank": lambda size: run(size, 0), "one micro-step": lambda size: run(0, size)}
    return Case(estimate, run(0, 0), wrong, designs, SINGLE, path.dtype, path.underflow)


def _copy(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    (row,) = _gradients(np.random.default_rng(seed), 1, numel, dtype)
    return Case(bounds.exact(row), row, {}, (), dtype, dtype)


def _cast(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    """Round float32 to the dtype: a bucket of another dtype, or a published weight."""
    (row,) = _gradients(np.random.default_rng(seed), 1, numel, SINGLE)
    return Case(
        publish.expect(row, SINGLE, dtype), Arithmetic().round(row, dtype), {}, (), dtype, dtype
    )


def _clip(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    (row,) = _gradients(np.random.default_rng(seed), 1, numel, dtype)
    factor = unscale_clip.factor_of(1.0, 1.0, Norm(3.7, 0.0, 0.0))
    right = Arithmetic().times(row, factor.value, dtype)
    return Case(unscale_clip.estimate_of(row, factor, dtype), right, {}, (), dtype, dtype)


def _update(
    seed: int,
    numel: int,
    world: int,
    dtype: Dtype,
    *,
    kernel: str = "torch",
    what: str = "weight",
) -> Case:
    """AdamW at step 100: weights of order 0.02, learning rate 1e-3; the weight or a moment after it."""
    rng = np.random.default_rng(seed)
    grad, first = _gradients(rng, 2, numel, dtype)
    weight = Arithmetic().round(0.02 * rng.standard_normal(numel), dtype)
    second = Arithmetic().round(rng.random(numel), dtype)

    def step(size: float, gradient: float = 0.0) -> Estimate:
        rule = optimizers.Adam(1e-3 * (1 + size), 0.9, 0.999, 1e-8, 0.1, 100, decoupled=True)
        found = optimizers.adam(
            weight, (1 + gradient) * grad, first, second, rule, dtype, optimizers.KERNELS[kernel]
        )
        return found.weight if what == "weight" else found.moments[what]

    wrong = {
        "learning rate": lambda size: Arithmetic().round(step(size).value, dtype),
        "the gradient": lambda size: Arithmetic().round(step(0, size).value, dtype),
    }
    return Case(step(0), Arithmetic().round(step(0).value, dtype), wrong, (), dtype, dtype)


def _sgd(seed: int, numel: int, world: int, dtype: Dtype) -> Case:
    """SGD with momentum and weight decay: weights of order 0.02, learning rate 1e-3."""
    rng = np.random.default_rng(seed)
    grad, held = _gradients(rng, 2, numel, dtype)
    weight = Arithmetic().round(0.02 * rng.standard_normal(numel), dtype)

    def step(size: float, gradient: float = 0.0) -> Estimate:
        rule = optimizers.Sgd(1e-3 * (1 + size), 0.9, weight_decay=0.1)
        return optimizers.sgd(weight, (1 + gradient) * grad, held, rule, dtype).weight

    wrong = {
        "learning rate": lambda size: Arithmetic().round(step(size).value, dtype),
        "the gradient": lambda size: Arithmetic().round(step(0, size).value, dtype),
    }
    return Case(step(0), Arithmetic().round(step(0).value, dtype), wrong, (), dtype, dtype)


ANY = ("global factor", "one element")
STEP = ("learning rate", "the gradient")
# law -> (how to make a hop, kinds of error, dtypes, world sizes)
LAWS: dict[str, tuple[Callable[[int, int, int, Dtype], Case], tuple[str, ...], tuple[str, ...],
                      tuple[int, ...]]] = {
    "accumulate_local, accumulate": (_sum, (*ANY, "one micro-step"), NAMES, (1,)),
    "pack, partition, master, publish (same dtype)": (_copy, ANY, NAMES, (1,)),
    "pack, publish (float32 to the dtype)": (_cast, ANY, ("bfloat16", "float16"), (1,)),
    "reduce": (_reduce, (*ANY, "one rank"), NAMES, WORLDS),
    "unscale_clip": (_clip, ANY, ("float32", "bfloat16"), (1,)),
    "end_to_end (4 micro-steps)": (
        _end_to_end, (*ANY, "one rank", "one micro-step"), NAMES, WORLDS),
    "update (AdamW)": (_update, (*ANY, *STEP), ("float32", "bfloat16"), (1,)),
    "update (AdamW, DeepSpeedCPUAdam)": (
        partial(_update, kernel="DeepSpeedCPUAdam"), (*ANY, *STEP), ("float32",), (1,)),
    "update (SGD with momentum)": (_sgd, (*ANY, *STEP), ("float32", "bfloat16"), (1,)),
    "update (exp_avg)": (
        partial(_update, what="exp_avg"), (*ANY, "the gradient"), ("float32", "bfloat16"), (1,)),
    "update (exp_avg_sq)": (
        partial(_update, what="exp_avg_sq"), (*ANY, "the gradient"), ("float32", "bfloat16"), (1,)),
}  # fmt: skip


def smallest(detects: Callable[[float], str | None]) -> tuple[float, str] | None:
    """Return the smallest error of the grid that is detected, and by which test."""
    low, high = -1, len(GRID) - 1
    test = detects(GRID[high])
    if test is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = detects(GRID[middle])
        if found is None:
            low = middle
        else:
            high, test = middle, found
    return GRID[high], test


def seed_law(name: str) -> tuple[float, str] | None:
    """Measure the law of the seed on whole traces."""

    def detects(size: float) -> str | None:
        with tempfile.TemporaryDirectory() as root:
            run = Run(
                model_dtype=name, faults=(Fault("wrong_seed", "seed", amount=1 + size),),
                points=("loss", "local_grad", "bucket"),
            )  # fmt: skip
            result = audit(write_run(Path(root) / "run", run))
        return "b" if any(finding.law == "seed" for finding in result.findings) else None

    return smallest(detects)


def measure(seeds: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for name in NAMES:
        cell = _shown([seed_law(name)])
        yield "seed", name, "", "the seed", cell, cell, cell
    for law, (make, kinds, names, worlds) in LAWS.items():
        for name, world in itertools.product(names, worlds):
            cells: dict[str, list[str]] = {kind: [] for kind in kinds}
            for numel in SIZES:
                found: dict[str, list[tuple[float, str] | None]] = {kind: [] for kind in kinds}
                for seed in range(seeds):
                    case = make(seed, numel, world, DTYPES[name])
                    clean = case.convicts(kinds[-1], 0.0) or case.convicts("one element", 0.0)
                    if clean:
                        raise AssertionError(f"false alarm: {law} {name} {world} {numel} {seed}")
                    for kind in kinds:
                        found[kind].append(smallest(lambda size: case.convicts(kind, size)))  # noqa: B023
                for kind in kinds:
                    cells[kind].append(_shown(found[kind]))
                print(
                    law, name, world, numel, {k: v[-1] for k, v in cells.items()}, file=sys.stderr
                )
            for kind in kinds:
                yield law, name, str(world) if len(worlds) > 1 else "", kind, *cells[kind]


def _shown(found: Sequence[tuple[float, str] | None]) -> str:
    known = [entry for entry in found if entry is not None]
    if len(known) < len(found):
        return "none"
    size, test = max(known)
    return f"{size:.1e} {test}" if not math.isclose(size, 1) else f"1 {test}"


PAGE = """\
# Sensitivity

The smallest relative error that each law detects, measured by `python benchmarks/sensitivity.py`.
The run's own arithmetic is simulated with every rounding, an error is planted in what it leaves, and
its size is bisected on half octaves. Each number is the worst of {seeds} seeds: every one of them
detects an error of that size, and none raises an alarm without one. Gradients are normal with variance
1 (as loss scaling lets float16 hold them), independent on each rank; a collective adds in another order
with each seed.

- `b`: the proven bound convicts; `c`: the coefficients do. `none`: not even an error of 1.
- *global factor*: the whole record times 1 + e. *one element*: the element of median size times 1 + e.
- *learning rate*, *the gradient*: the step is taken with so much more of it. No error of a step is seen
  that stays below the weight's own unit in the last place.
- *one rank*, *one micro-step*: its coefficient is 1 - e before it is added up; 1 is a lost one.
- No error is seen that the record's dtype rounds away: half a unit in the last place is 6e-8 in float32,
  4e-3 in bfloat16, 5e-4 in float16. Over many elements a smaller one moves some of them by a whole unit.
- A finding by coefficients must exceed 2e-2 in bfloat16, 3e-3 in float16 and 2e-4 in float32
  ([derivation](laws/bounds.md)). Ranks whose gradients are alike are told apart less well: the error must
  exceed eight of the fit's own standard errors.

| law | dtype | ranks | error | 100 elements | 1 000 | 100 000 |
|---|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("docs/sensitivity.md"))
    options = parser.parse_args()
    rows = "\n".join("| " + " | ".join(row) + " |" for row in measure(options.seeds))
    options.output.write_text(PAGE.format(seeds=options.seeds, rows=rows))
    print(options.output)


if __name__ == "__main__":
    main()
