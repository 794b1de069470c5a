"""Run the catalog on the DeepSpeed that this process imports, and write down what happened.

One JSON object a line on the file that is named; `tests.real.releases` starts one such process a
release. Nothing here knows a release number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gradtrace
from gradtrace import errors
from gradtrace.capture.adapters import select
from gradtrace.testing.ranks import RankError, run_ranks
from tests.real.catalog import ENTRIES
from tests.real.catalog.entry import Entry
from tests.real.training import Outcome, Setup, initialize, surface, train

TRAINED = "trained"
MORE_CONTROLS = 3  # untraced runs beside the first, where the traced run is not equal to that


@dataclass(frozen=True)
class Observation:
    """Hold what one configuration gave.

    Attributes:
        entry: the configuration's name.
        untraced: ``trained``, or how DeepSpeed itself refused or failed without gradtrace.
        repeats: whether untraced runs were bitwise equal among themselves; ``None`` where the traced
            run was equal to the first of them, so that no more were made.
        refused: why `wrap` refused, or ``None``.
        failed: what went wrong in the traced run alone, or ``None``.
        bitwise: whether the traced run's losses, norms and weights were those of the untraced run, or,
            where untraced runs do not repeat, those parts of them that do.
        verdict, law, cause: what audit said, and its first finding.
        notes: audit's notes.
    """

    entry: str
    untraced: str | None = None
    repeats: bool | None = None
    refused: str | None = None
    failed: str | None = None
    bitwise: bool | None = None
    verdict: str | None = None
    law: str | None = None
    cause: str | None = None
    notes: tuple[str, ...] = ()


def wait_for_every_gather() -> None:
    """Take a race out of stage 3, so that its runs repeat and can be compared.

    Up to 0.19.7, ``_allgather_params_coalesced`` waits for the last of its handles only. gloo's are
    independent of each other, and the CPU has nothing else to wait on, so that a step may begin with
    weights that are still to arrive; 0.19.8 waits for all (partition_parameters.py:2109). Traced and
    untraced runs are treated alike.
    """
    import deepspeed.comm

    def waiting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def gather(*args: Any, **kwargs: Any) -> Any:
            handle = original(*args, **kwargs)
            if hasattr(handle, "wait"):
                handle.wait()
            return handle

        return gather

    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(deepspeed.comm, name, waiting(getattr(deepspeed.comm, name)))


def observe(entry: Entry, scratch: Path) -> Observation:
    """Train one configuration untraced and traced, compare, and audit the trace."""
    seen = Observation(entry.name)
    try:
        control = train(entry.setup, None)
    except RankError as error:
        return dataclasses.replace(seen, untraced=_last_line(error))
    seen = dataclasses.replace(seen, untraced=TRAINED)
    try:
        traced = train(entry.setup, scratch)
    except (errors.UnsupportedEngineError, errors.ProbeError) as error:
        return dataclasses.replace(seen, refused=f"{error.slug}: {error.found}")
    except (errors.GradtraceError, RankError) as error:
        return dataclasses.replace(seen, failed=_last_line(error))
    controls = [control]
    if traced != control:
        controls += [train(entry.setup, None) for _ in range(MORE_CONTROLS)]
    result = gradtrace.audit(scratch)
    return dataclasses.replace(
        seen,
        repeats=None if len(controls) == 1 else all(other == control for other in controls),
        bitwise=all(
            _same_where_repeated(mine, theirs)
            for mine, *theirs in zip(traced, *controls, strict=True)
        ),
        verdict=result.verdict,
        law=None if result.first is None else result.first.law,
        cause=None if result.first is None else result.first.cause,
        notes=tuple(result.notes),
    )


def _same_where_repeated(traced: Outcome, controls: list[Outcome]) -> bool:
    """Say whether every number that all controls agree on is the traced run's too."""
    return all(
        mine == theirs[0]
        for name in ("losses", "norms", "weights")
        for mine, *theirs in zip(
            getattr(traced, name), *(getattr(run, name) for run in controls), strict=True
        )
        if all(other == theirs[0] for other in theirs)
    )


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else type(error).__name__


# One engine for each adapter and stage: whether everything binds, trained or not.
FAMILIES = {
    "plain": Setup(0),
    "fp16_unfused": Setup(0, bf16=True, client="sgd"),
    "fp16": Setup(0, bf16=True, client="fused_sgd"),
    "zero12, stage 1": Setup(1),
    "zero12, stage 2": Setup(2),
    "bf16": Setup(1, bf16=True, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero3": Setup(3),
}

UNBOUND: dict[str, Any] = {"adapter": None, "bound": [], "missing": [], "error": None}


def bindings(rank: int, setup: Setup) -> dict[str, Any]:
    """Resolve every probe of an engine that is not trained, and wrap it; say what binds."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    engine = initialize(setup)
    model = select.build_model(engine)
    try:
        adapter = select.select(model)
        bound = select.resolve(model, adapter)
    except errors.GradtraceError as error:
        return {**UNBOUND, "error": f"{error.slug}: {error.found}"}
    before = surface(engine)
    with tempfile.TemporaryDirectory() as scratch, gradtrace.wrap(engine, Path(scratch) / "trace"):
        changed = surface(engine) != before
    restored = changed and surface(engine) == before
    taken = [entry.probe for entry in bound]
    made = {probe.one_of for probe in taken} - {None}
    return {
        "adapter": adapter.name,
        "error": None if restored else "wrapping and closing changed the engine",
        "bound": [f"{probe.point}: {probe.method}" for probe in taken],
        "missing": [
            f"{probe.point}: {probe.method}"
            for probe in adapter.probes
            if probe not in taken and probe.one_of not in made
        ],
    }


def chosen(patterns: Iterable[str]) -> list[Entry]:
    """Return the catalog's entries that a glob matches, or all of them."""
    patterns = list(patterns) or ["*"]
    return [e for e in ENTRIES if any(fnmatch(e.name, pattern) for pattern in patterns)]


def main(arguments: list[str]) -> None:
    """Observe the entries that the globs after the output's name select."""
    out, *patterns = arguments
    wait_for_every_gather()
    with Path(out).open("w", encoding="utf-8") as lines, tempfile.TemporaryDirectory() as scratch:

        def put(kind: str, value: Any) -> None:
            print(json.dumps({"kind": kind, **value}), file=lines, flush=True)

        put("packages", {"packages": select.packages()})
        for name, setup in FAMILIES.items():
            try:
                found = run_ranks(1, bindings, setup.at(ranks=1))[0]
            except RankError as error:
                found = {**UNBOUND, "error": _last_line(error)}
            put("binding", {"family": name, **found})
        for number, entry in enumerate(chosen(patterns)):
            seen = observe(entry, Path(scratch) / str(number))
            put("observation", dataclasses.asdict(seen))


if __name__ == "__main__":
    main(sys.argv[1:])
