"""List every configuration that gradtrace is tried on, with what must come of it."""

from tests.real.catalog import fp16, known, plain, zero3, zero12
from tests.real.catalog.entry import Entry

# Some stand in two files: each is tried once.
ENTRIES: tuple[Entry, ...] = tuple(
    {
        repr(entry.setup): entry
        for entry in (
            *plain.ENTRIES,
            *fp16.ENTRIES,
            *zero12.ENTRIES,
            *zero3.ENTRIES,
            *known.ENTRIES,
        )
    }.values()
)


def sample() -> tuple[Entry, ...]:
    """Return what continuous integration tries of them, so that it ends within its time.

    Everything that is refused or meets a defect, and every fourth of the rest. `GRADTRACE_CATALOG=whole`
    in the environment of the tests tries all.
    """
    clean = [entry for entry in ENTRIES if entry.refused is None and entry.finding is None]
    chosen = {repr(entry.setup) for entry in clean[::4]}
    return tuple(
        entry for entry in ENTRIES if entry.refused or entry.finding or repr(entry.setup) in chosen
    )
