"""Hold what the weights say of a run, without gradtrace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """Hold what the weights say of a run, without gradtrace.

    Attributes:
        error: how the training failed without gradtrace, or ``None``.
        bitwise: whether the traced run's weights are those of the untraced run.
        from_right: for each step and parameter: how far the applied gradient is from the mean over the
            ranks of the sums over all micro-steps, in relative L2.
        from_bug: the same from the gradient that the case says a bad release applies.
        told: the same from the right one, of what the loop yields, if anything.
    """

    error: str | None = None
    bitwise: bool = False
    from_right: tuple[dict[str, float], ...] = ()
    from_bug: tuple[dict[str, float], ...] = ()
    told: tuple[dict[str, float], ...] = ()
