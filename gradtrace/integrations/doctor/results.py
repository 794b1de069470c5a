"""Define what `gradtrace doctor` finds: frozen data whose ``to_dict`` is what ``--json`` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

FORMAT: Final = "gradtrace.doctor"
VERSION: Final = 1
STAND_IN: Final = "stand-in"  # the model that is built when the user names none

Verdict = Literal["traced", "refused", "unbound", "unknown"]


@dataclass(frozen=True, slots=True)
class Changed:
    """Say what of the configuration was changed to run it on this machine."""

    setting: str
    given: Any
    used: Any
    why: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Say why a configuration is not traced, or why that is not known.

    Attributes:
        slug: of the error that `wrap` raises; ``engine_not_built`` or ``training_failed`` where it
            did not come so far.
        found, expected, remedy: as errors have them.
    """

    slug: str
    found: str
    expected: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Say whether one probe binds.

    Attributes:
        owner: class that defines the method.
        place: file and line in the installed DeepSpeed, or None.
        reason: why it does not bind, or None.
    """

    point: str
    owner: str
    method: str
    when: str
    required: bool
    bound: bool
    place: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class PointRow:
    """Say what one point gives in a step, on the rank that records most.

    Attributes:
        status: ``recorded``, ``not_planned`` or ``absent: REASON``.
        bytes: of tensors, for the stand-in model.
        scaled_bytes: the same times the ratio of trainable parameters, or None.
    """

    point: str
    status: str
    records: int
    tensors: int
    bytes: int
    scaled_bytes: int | None


@dataclass(frozen=True, slots=True)
class LawRow:
    """Say whether a law can be checked.

    Attributes:
        checked: checks made over the traced steps.
        reason: why none was made, or None.
    """

    law: str
    checked: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold what one step costs on the rank that records most.

    Attributes:
        steps: steps that were really traced; the numbers are of the last.
        parameters: trainable elements of the stand-in.
        index_bytes: of the index, over all traced steps, divided by their number.
        scaled_to: trainable elements that ``scaled_tensor_bytes`` is for, or None.
        scaled_by: where that number comes from: ``--parameters`` or ``--model``.
    """

    steps: int
    micro_steps: int
    records: int
    tensors: int
    tensor_bytes: int
    index_bytes: int
    parameters: int
    scaled_to: int | None
    scaled_by: str | None
    scaled_tensor_bytes: int | None


@dataclass(frozen=True, slots=True)
class Check:
    """Hold what is known of one configuration.

    Attributes:
        name: the file, or ``stage 2`` for that stage with defaults.
        optimizer: class of the engine's optimizer; empty when there is no engine.
        adapter: which adapter knows that class, or None.
        effective: settings as engine and optimizer hold them; empty when refused.
        model: what the engine was built with.
    """

    name: str
    verdict: Verdict
    model: str
    optimizer: str = ""
    adapter: str | None = None
    reason: Reason | None = None
    changes: tuple[Changed, ...] = ()
    probes: tuple[ProbeRow, ...] = ()
    points: tuple[PointRow, ...] = ()
    laws: tuple[LawRow, ...] = ()
    cost: Cost | None = None
    effective: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkup:
    """Hold everything that ``gradtrace doctor`` says.

    Attributes:
        packages: versions of what a trace depends on.
        ranks: CPU ranks that the engines were built on.
    """

    packages: Mapping[str, str]
    ranks: int
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict: not known, then a probe that does not bind, then refused."""
        order: tuple[Verdict, ...] = ("unknown", "unbound", "refused")
        found = {check.verdict for check in self.checks}
        return next((verdict for verdict in order if verdict in found), "traced")

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "verdict": self.verdict,
            "packages": dict(self.packages),
            "ranks": self.ranks,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }
