"""List every configuration that gradtrace is tried on, with what must come of it."""

from tests.real.catalog import fp16, plain, zero3, zero12
from tests.real.catalog.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *plain.ENTRIES,
    *fp16.ENTRIES,
    *zero12.ENTRIES,
    *zero3.ENTRIES,
)
