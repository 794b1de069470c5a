"""Train on the release that this process imports: python -m tests.replay.worker OUT SLUG/RUN ...

Each run is trained untraced, traced into ``OUT/SLUG/RUN/trace``, and by hand. What the weights say of
them is written to ``OUT/SLUG/RUN/seen.json``. Nothing is judged here.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import gradtrace
from gradtrace.testing.ranks import RankError, run_ranks
from tests.replay import problem
from tests.replay.by_hand import Weights, distance, locals_of
from tests.replay.case import Run
from tests.replay.cases import CASES
from tests.replay.seen import Seen


def weights_of(engine: Any) -> Weights:
    """Return the trained weights, flat."""
    return {
        name: parameter.detach().double().flatten().numpy().copy()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def train_rank(
    rank: int, train: ModuleType, run: Run, out: Path | None
) -> tuple[list[Weights], list[Any]]:
    """Train; return the weights before the first step and after each, and what the loop yields."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    size = run.size
    module = getattr(train, "model", problem.model)(size)
    engine = problem.initialize(module, size, train.config(size, **run.settings))
    tracer = None if out is None else gradtrace.wrap(engine, out, on_error="raise")
    weights, told = [weights_of(engine)], []
    for said in train.train(engine, size, rank, **run.loop):
        weights.append(weights_of(engine))
        told.append(said)
    if tracer is not None:
        tracer.close()
    return weights, [
        None if said is None else {n: t.double().flatten().numpy() for n, t in said.items()}
        for said in told
    ]


def see(train: ModuleType, run: Run, out: Path) -> Seen:
    """Run one training untraced, traced and by hand."""
    try:
        untraced = run_ranks(run.size.ranks, train_rank, train, run, None)
    except RankError as error:
        return Seen(error=str(error).strip().splitlines()[-1][:300])
    traced = run_ranks(run.size.ranks, train_rank, train, run, out)
    weights, told = untraced[0]
    right: list[dict[str, float]] = []
    bug: list[dict[str, float]] = []
    said: list[dict[str, float]] = []
    for step, gradients in enumerate(locals_of(train, run.size, weights, run.loop)):
        applied = {n: weights[step][n] - weights[step + 1][n] for n in gradients}
        wanted = {name: run.asked * local.mean() for name, local in gradients.items()}
        right.append({n: distance(applied[n], [wanted[n]]) for n in applied})
        if run.applies is not None:
            bug.append(
                {
                    name: distance(
                        applied[name], [run.asked * v for v in run.applies(gradients, name)]
                    )
                    for name in gradients
                }
            )
        if told[step] is not None:
            said.append({n: distance(told[step][n], [wanted[n]]) for n in applied})
    same = all(map(_same, untraced, traced))
    return Seen(None, same, tuple(right), tuple(bug), tuple(said))


def _same(one: tuple[list[Weights], list[Any]], two: tuple[list[Weights], list[Any]]) -> bool:
    return len(one[0]) == len(two[0]) and all(
        np.array_equal(before[name], after[name])
        for before, after in zip(one[0], two[0], strict=True)
        for name in before
    )


def main(arguments: Sequence[str]) -> None:
    """Run each SLUG/RUN that is named."""
    out, *names = arguments
    for name in names:
        slug, _, which = name.partition("/")
        train = importlib.import_module(f"tests.replay.{slug}.train")
        run = next(run for run in CASES[slug].runs if run.name == which)
        place = Path(out) / slug / which
        place.mkdir(parents=True)
        seen = see(train, run, place / "trace")
        (place / "seen.json").write_text(json.dumps(asdict(seen)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
