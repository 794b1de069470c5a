"""Say of every observation whether it is what must come of it on that release."""

from __future__ import annotations

from packaging.version import Version

from tests.real.catalog.defects import DEFECTS, Defect
from tests.real.catalog.entry import Entry
from tests.real.releases.observe import TRAINED, Observation


def expected(entry: Entry, release: str, newest: str) -> tuple[str, str] | None:
    """Return the (law, cause) that audit must find first, or ``None`` where it must pass.

    Args:
        entry: the configuration.
        release: what it runs on.
        newest: the release that the catalog's own findings are stated for.
    """
    defect = defect_of(entry, release)
    if defect is not None:
        return defect.law, defect.cause
    return entry.finding if Version(release) == Version(newest) else None


def defect_of(entry: Entry, release: str) -> Defect | None:
    """Return the first defect of a release that a configuration meets."""
    return next((d for d in DEFECTS if d.concerns(release) and d.applies(entry.setup)), None)


def problem(entry: Entry, seen: Observation, release: str, newest: str) -> str | None:
    """Say what is wrong with an observation, or ``None``.

    A configuration that the release itself does not train is no problem of gradtrace's, nor is one that
    `wrap` refuses by name, nor a backward pass that the release does not see, said to be a gap.

    Args:
        entry, seen: the configuration and what came of it.
        release, newest: as for `expected`.
    """
    if seen.untraced != TRAINED:
        return None
    if seen.failed is not None:
        return f"only the traced run failed: {seen.failed}"
    older = Version(release) != Version(newest)
    if seen.refused is not None:
        fine = by_name(seen.refused) and (older or entry.refused is not None)
        return None if fine else f"refused: {seen.refused}"
    if entry.refused is not None and not older:
        return f"expected to be refused: {entry.refused}"
    if not seen.bitwise:
        return "tracing changed the training"
    found = None if seen.law is None else (seen.law, seen.cause)
    if bypassed(seen):
        return None if found is None else f"{found} in a window that was not seen whole"
    wanted_finding = expected(entry, release, newest)
    if found != wanted_finding:
        return f"expected {wanted_finding or 'a pass'}, found {found or seen.verdict}"
    return None if found is not None or seen.verdict == "pass" else f"verdict {seen.verdict}"


def by_name(error: str) -> bool:
    """Say whether a configuration was refused, rather than not understood."""
    return error.startswith("unsupported_engine")


def bypassed(seen: Observation) -> bool:
    """Say whether the trace states that the release could not see some backward pass."""
    return seen.verdict == "inconclusive" and any("engine_bypassed" in note for note in seen.notes)
