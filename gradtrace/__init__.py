"""Record gradients along the path of DeepSpeed ZeRO; say where two runs part, and why.

Everything public is loaded on first use: importing gradtrace loads neither torch nor deepspeed nor
numpy, and reading traces never needs the first two.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from gradtrace import errors

if TYPE_CHECKING:
    from gradtrace.analysis.audit import audit
    from gradtrace.analysis.diff import diff
    from gradtrace.capture.perturb import perturb_ulp
    from gradtrace.capture.tracer import Tracer, wrap
    from gradtrace.trace.reader import Trace, open_trace

__version__: Final = "0.3.0"

__all__ = [
    "Trace",
    "Tracer",
    "__version__",
    "audit",
    "diff",
    "errors",
    "open_trace",
    "perturb_ulp",
    "wrap",
]

_HOMES: Final = {
    "Trace": "gradtrace.trace.reader",
    "Tracer": "gradtrace.capture.tracer",
    "audit": "gradtrace.analysis.audit",
    "diff": "gradtrace.analysis.diff",
    "open_trace": "gradtrace.trace.reader",
    "perturb_ulp": "gradtrace.capture.perturb",
    "wrap": "gradtrace.capture.tracer",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
