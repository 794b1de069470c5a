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
