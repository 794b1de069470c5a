"""Draw faults from a fixed seed, plant them into live runs, and score what audit says of them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import gradtrace
from gradtrace.analysis.results import AuditResult, Finding
from gradtrace.testing import live
from gradtrace.testing.mutators import Fault
from gradtrace.testing.ranks import RankError
from gradtrace.trace.points import POINT_NAMES
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.spans import PADDING
from tests.real.training import Setup, train

STEPS: Final = 2
OPTIMIZER_HOPS: Final = ("master", "unscale_clip", "update", "publish")
WEIGHTS: Final = ("update", "publish")
SCALE: Final = 64.0  # the loss scale of runs that plant `not_unscaled`
# A stretch that moved less than this many roundings may stay below the bounds of any law; one that
# moved more than `CERTAIN` never does here, where a bound counts fewer than 40 roundings.
VISIBLE: Final = 4.0
CERTAIN: Final = 64.0


@dataclass(frozen=True)
class Kind:
    """Say what can be planted at a hop, and what audit must call it.

    Attributes:
        hop: where it is planted; the law that it breaks.
        kind: of `gradtrace.testing.mutators`.
        cause: of `gradtrace.analysis.results.CAUSES`.
        amounts: one is drawn.
        least: elements that the stretch must have, so that the cause can be told at all.
        micro_steps: where it can strike, of `MICRO_STEPS`.
        steps: in which steps.
        everywhere: it strikes every rank and parameter, or none.
    """

    hop: str
    kind: str
    cause: str
    amounts: tuple[float, ...] = (0.0,)
    least: int = 1
    micro_steps: tuple[int, ...] = (0, 1, 2, 3)
    steps: tuple[int, ...] = (0, 1)
    everywhere: bool = False


MICRO_STEPS: Final = 4
_FACTORS: Final = (1.5, 0.3, 5.0)


def _any(hop: str, *, later: bool = False) -> Iterator[Kind]:
    """Yield what may happen to the tensors of any hop."""
    yield Kind(hop, "zeroed", "zeroed")
    yield Kind(hop, "sign_flipped", "sign_flipped")
    yield Kind(hop, "scaled", "scaled", _FACTORS, least=4)
    yield Kind(hop, "shifted", "shifted", (1, 3, -2), least=16)
    yield Kind(hop, "swapped", "swapped", least=5)
    yield Kind(hop, "non_finite", "non_finite", (0, 3))
    yield Kind(hop, "low_precision", "low_precision", least=16)
    yield Kind(hop, "partly_overwritten", "partly_overwritten", least=16)
    # At an accumulation, what was there before is the sum so far, except when a step begins.
    yield Kind(hop, "stale", "stale", steps=(1,), micro_steps=(0,) if later else (0, 1, 2, 3))


def _sum(hop: str) -> Iterator[Kind]:
    yield from _any(hop, later=True)
    yield Kind(hop, "dropped_micro_steps", "dropped_micro_steps", micro_steps=(1, 2, 3))
    yield Kind(hop, "skipped_micro_step", "dropped_micro_steps", micro_steps=(1, 2, 3))
    yield Kind(hop, "lost_micro_step", "dropped_micro_steps", (0,), micro_steps=(2, 3))
    yield Kind(hop, "lost_micro_step", "dropped_micro_steps", (1,), micro_steps=(3,))
    yield Kind(hop, "double_counted", "double_counted")
    yield Kind(hop, "carried_over", "carried_over", steps=(1,), micro_steps=(0,))


def _reduction(hop: str) -> Iterator[Kind]:
    yield from _any(hop)
    yield Kind(hop, "not_averaged", "not_averaged")
    yield Kind(hop, "averaged_twice", "averaged_twice")
    yield Kind(hop, "not_reduced", "not_reduced")
    yield Kind(hop, "rank_missing", "rank_missing", (0, 1, 2))


def _weights() -> Iterator[Kind]:
    """Yield what may happen to weights: an optimizer adds a change, what it scales is that alone."""
    for hop, steps in (("update", (0, 1)), ("publish", (1,))):
        yield Kind(hop, "stale", "stale", steps=steps)
        yield Kind(hop, "zeroed", "zeroed", steps=steps)
        yield Kind(hop, "sign_flipped", "sign_flipped", steps=steps)
        yield Kind(hop, "scaled", "scaled", _FACTORS, least=8, steps=steps)
        yield Kind(hop, "shifted", "shifted", (1, 3, -2), least=16, steps=steps)
        yield Kind(hop, "swapped", "swapped", least=5, steps=steps)
        yield Kind(hop, "low_precision", "low_precision", least=16, steps=steps)
        yield Kind(hop, "partly_overwritten", "partly_overwritten", least=16, steps=steps)
    yield Kind("update", "scaled", "sign_flipped", (-1.0,), least=8)
    yield Kind("update", "non_finite", "non_finite", (0, 3), steps=(1,))


KINDS: Final = (
    Kind("seed", "wrong_seed", "scaled", (1.5, 3.0), everywhere=True),
    Kind("seed", "wrong_seed", "averaged_twice", (1 / MICRO_STEPS,), everywhere=True),
    Kind("seed", "wrong_seed", "not_averaged", (float(MICRO_STEPS),), everywhere=True),
    Kind("seed", "wrong_seed", "sign_flipped", (-1.0,), everywhere=True),
    *_sum("accumulate_local"),
    *_any("pack"),
    *_reduction("reduce"),
    *_any("partition"),
    *_sum("accumulate"),
    *_any("master"),
    Kind("unscale_clip", "not_unscaled", "not_unscaled", (SCALE,)),
    Kind("unscale_clip", "wrong_clip", "wrong_clip", (2.0, 0.6), least=4),
    *_weights(),
    Kind("replicate", "order_mismatch", "order_mismatch"),
    Kind("replicate", "boundary_mismatch", "boundary_mismatch", micro_steps=(0, 1, 2)),
)

ACCUM32: Final = {"data_types": {"grad_accum_dtype": "fp32"}}
# Another family is one more line here and a table in `gradtrace.testing.sites`.
SETUPS: Final[dict[str, Setup]] = {
    "z0-fp32": Setup(0, model="wide"),
    "z0-bf16": Setup(0, model="wide", bf16=True),
    "z0-bf16-fused": Setup(0, model="wide", bf16=True, client="fused"),
    "z1-fp32": Setup(1, model="wide"),
    "z1-bf16": Setup(1, model="wide", bf16=True),
    "z1-bf16-accum32": Setup(1, model="wide", bf16=True, config=ACCUM32),
    "z2-fp32": Setup(2, model="wide"),
    "z2-bf16": Setup(2, model="wide", bf16=True),
    "z2-bf16-accum32": Setup(2, model="wide", bf16=True, config=ACCUM32),
    "z3-fp32": Setup(3, model="wide"),
    "z3-bf16": Setup(3, model="wide", bf16=True),
    "z3-bf16-accum32": Setup(3, model="wide", bf16=True, config=ACCUM32),
}


def hops_of(name: str) -> dict[str, tuple[int, ...]]:
    """Return the hops that a setup has, each with the micro-steps in which it runs."""
    every, last = tuple(range(MICRO_STEPS)), (MICRO_STEPS - 1,)
    hops = {"seed": every, **dict.fromkeys(OPTIMIZER_HOPS, last)}
    if name == "z0-bf16-fused":
        del hops["update"]  # an optimizer of the caller's own: no rule is known of it
    if name.startswith("z0"):
        hops |= {"accumulate_local": every, "pack": last, "reduce": last}
    elif name.startswith("z1"):
        hops |= {"accumulate_local": every, "pack": last, "reduce": last}
        if "accum32" not in name:
            hops |= {"partition": last, "accumulate": last, "replicate": last}
    else:
        hops |= {"pack": every, "reduce": every, "accumulate": every, "replicate": every}
        if name == "z2-bf16-accum32":
            del hops["reduce"]  # what is reduced is added up inside the same method
        elif name.startswith("z2"):
            hops["partition"] = every
    return hops


@dataclass(frozen=True)
class Draw:
    """Hold one planted fault: a line of the table."""

    number: int
    config: str
    setup: Setup
    kind: Kind
    fault: Fault

    @property
    def title(self) -> str:
        fault = self.fault
        return (
            f"{self.config}-r{self.setup.ranks} {fault.law} {fault.kind}({fault.amount:g}) "
            f"step {fault.step} micro {fault.micro_step} rank {fault.rank} {fault.param}"
        )


@dataclass(frozen=True)
class Score:
    """Say what audit made of a planted fault.

    Attributes:
        struck: (rank, parameter) -> how far it moved, in roundings.
        wrong: what is not as planted; the cause is judged apart.
        failed: the run itself did not end.
    """

    draw: Draw
    struck: dict[tuple[int, str], float]
    findings: tuple[Finding, ...]
    wrong: tuple[str, ...] = ()
    failed: bool = False

    @property
    def detected(self) -> bool:
        return bool(self.findings)

    @property
    def cause(self) -> bool:
        return self.detected and self.findings[0].cause == self.draw.kind.cause


@functools.cache
def owners(name: str, ranks: int) -> dict[tuple[int, str], int]:
    """Return (rank, parameter) -> elements in the rank's shard, from a clean run, which must pass."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clean"
        train(SETUPS[name].at(ranks=ranks, steps=1), path)
        assert gradtrace.audit(path).verdict == "pass"
        return _owners(open_trace(path))


def _owners(trace: Trace) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for rank, index in trace.ranks.items():
        for number in index.header.partitions.values():
            for span in index.layouts[number]:
                if span.param != PADDING:
                    key = (rank, trace.manifest.parameters[span.param].name)
                    found[key] = found.get(key, 0) + span.numel
    return found


def possible(name: str) -> list[Kind]:
    hops = hops_of(name)
    kinds = [kind for kind in KINDS if kind.hop in hops]
    kinds = [kind for kind in kinds if set(kind.micro_steps) & set(hops[kind.hop])]
    if name.startswith("z1"):
        # A rank that is wrong about the boundary takes part in other collectives: the run hangs.
        kinds = [kind for kind in kinds if kind.kind != "boundary_mismatch"]
        # The buffer is filled once a step: there is nothing to lose or to add to.
        one = ("stale", "carried_over", "zeroed", "swapped", "double_counted")
        kinds = [k for k in kinds if k.hop != "accumulate" or k.kind in one or k.kind in _PLAIN]
    if name == "z1-bf16-accum32" or name.startswith("z0"):
        kinds = [kind for kind in kinds if kind.kind != "not_unscaled"]  # they have no loss scale
    return kinds


_AFTER_REDUCE: Final = ("reduce", "master", "unscale_clip")
_PLAIN: Final = ("sign_flipped", "scaled", "shifted", "non_finite", "low_precision")


def draw(rng: np.random.Generator, number: int, name: str, kind: Kind) -> Draw:
    """Draw step, micro-step, rank, parameter and amount for a kind of fault."""
    ranks = int(rng.choice((2, 2, 2, 3)))
    if kind.kind in ("rank_missing", "not_reduced"):
        # On two ranks, half of the own gradient is as well a mean without the other's as a mean
        # that never took place: the same numbers, two stories.
        ranks = 3
    amount = float(rng.choice(kind.amounts))
    if kind.kind == "low_precision":
        amount = 8.0 if "fp32" in name else 4.0  # fewer than the hop's own dtype has
    if kind.hop == "reduce" and kind.kind == "scaled" and amount in (ranks, 1 / ranks):
        amount = 7.0
    setup = SETUPS[name].at(ranks=ranks, steps=STEPS)
    if kind.kind == "wrong_clip":
        setup = setup.at(config={**setup.config, "gradient_clipping": 0.01})
    elif kind.hop == "unscale_clip" or "gradient_clipping" not in setup.config:
        setup = setup.at(config={**setup.config, "gradient_clipping": 0.0})
    if name == "z1-bf16-accum32" and kind.hop == "unscale_clip":
        setup = setup.at(config={**setup.config, "gradient_clipping": 0.01})
    step = int(rng.choice(kind.steps))
    hops = hops_of(name)[kind.hop]
    micro_step = int(rng.choice([m for m in kind.micro_steps if m in hops]))
    rank, param = _target(rng, name, kind, ranks)
    where = None if kind.hop in OPTIMIZER_HOPS else micro_step
    fault = Fault(kind.kind, kind.hop, step, where, rank, param, amount)
    return Draw(number, name, setup, kind, fault)


def _target(
    rng: np.random.Generator, name: str, kind: Kind, ranks: int
) -> tuple[int | None, str | None]:
    """Draw a rank and a parameter that it holds; now and then all of either."""
    if name == "z1-bf16-accum32" and kind.kind == "non_finite" and kind.hop in _AFTER_REDUCE:
        # There every rank decides by itself whether to leave the step out: one alone would hang it.
        return None, None
    if kind.everywhere:
        return (None if rng.random() < 0.5 else int(rng.integers(ranks))), None
    if kind.hop == "replicate":
        return int(rng.integers(ranks)), None
    held = owners(name, ranks)
    whole = (
        name.startswith("z0")
        or kind.hop in ("accumulate_local", "pack")
        or (kind.hop == "reduce" and name == "z1-bf16-accum32")
    )
    sizes = {param: 0 for _, param in held}
    for (_, param), numel in held.items():
        sizes[param] += numel
    fitting = sorted(
        (rank, param)
        for rank in range(ranks)
        for param in sizes
        if (sizes[param] if whole else held.get((rank, param), 0)) >= kind.least
        and (kind.kind != "swapped" or _has_twin(held, sizes, rank, param, whole))
    )
    rank, param = fitting[int(rng.integers(len(fitting)))]
    lot = rng.random()
    if kind.kind == "swapped" or lot < 0.6:
        return (None if kind.kind == "rank_missing" else rank), param
    if lot < 0.8 or kind.kind == "rank_missing":
        return (None if kind.kind == "rank_missing" else rank), None
    return None, None


def _has_twin(
    held: dict[tuple[int, str], int], sizes: dict[str, int], rank: int, param: str, whole: bool
) -> bool:
    """Say whether the rank holds another parameter as long as this one."""
    if whole:
        return sum(size == sizes[param] for size in sizes.values()) > 1
    mine = held.get((rank, param), 0)
    return sum(r == rank and n == mine for (r, _), n in held.items()) > 1


def run(one: Draw, directory: Path) -> Score:
    """Train with the fault planted, audit the trace, and compare."""

    def before(engine: Any) -> None:
        if one.kind.kind == "not_unscaled":
            live.override_loss_scale(engine, SCALE)
        live.plant(engine, one.fault, report=directory / "strikes")

    options = {"points": ",".join(POINT_NAMES)} if one.fault.law in WEIGHTS else {}
    try:
        train(one.setup, directory / "trace", before=before, **options)
    except RankError as error:
        return Score(one, {}, (), (f"the run failed: {error}",), failed=True)
    struck: dict[tuple[int, str], float] = {}
    for path in (directory / "strikes").glob("*.json"):
        for strike in json.loads(path.read_text()):
            key = (strike["rank"], strike["param"])
            struck[key] = max(struck.get(key, 0.0), strike["moved"])
    result = gradtrace.audit(directory / "trace")
    return Score(one, struck, result.findings, tuple(_wrong(one, struck, result)))


def visible(score: Score) -> bool:
    """Say whether the fault changed anything that can be told from rounding."""
    return any(moved > VISIBLE for moved in score.struck.values())


def _wrong(one: Draw, struck: dict[tuple[int, str], float], result: AuditResult) -> Iterator[str]:
    first, fault = result.first, one.fault
    if first is None:
        yield f"nothing found ({result.verdict})"
        return
    found = (first.law, first.step, first.micro_step)
    if found != (fault.law, fault.step, fault.micro_step):
        yield f"law, step, micro-step {found}"
    may = {param for (_, param), moved in struck.items() if moved > 0}
    must = {param for (_, param), moved in struck.items() if moved > CERTAIN}
    named = {name for name in (first.param, *first.folded) if name is not None}
    if fault.law == "seed" or fault.kind == "boundary_mismatch":
        may = must = set()
    if (fault.law, fault.kind) == ("master", "non_finite") and one.config.startswith("z0-bf16"):
        may = must = set()  # the step is left out before the optimizer is given anything
    if fault.kind == "order_mismatch":
        must = may  # both that meet
    if not must <= named <= may:
        yield f"parameters {sorted(named)} of {sorted(must)}"
    named_rank = first.rank if first.guilty is None else first.guilty
    rank = guilty(one, struck)
    if rank is not None and named_rank != rank:
        yield f"rank {named_rank} instead of {rank}"
    for other in result.findings[1:]:
        yield (
            f"also {other.law} {other.cause} at step {other.step}, micro-step {other.micro_step}, "
            f"{other.param}"
        )


def guilty(one: Draw, struck: dict[tuple[int, str], float]) -> int | None:
    """Return the rank that a finding must name, or ``None`` where it is several."""
    if one.fault.kind == "rank_missing":
        return int(one.fault.amount)
    if one.fault.law == "replicate" and one.setup.ranks == 2:
        return None  # of two ranks that differ, none is the odd one
    ranks = {rank for (rank, _), moved in struck.items() if moved > VISIBLE}
    return next(iter(ranks)) if len(ranks) == 1 else None
