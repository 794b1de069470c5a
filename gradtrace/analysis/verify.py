"""Check every file of a trace, and what was sealed against what another reader makes of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import safe_open

from gradtrace.errors import DamagedTraceError, GradtraceError
from gradtrace.trace import schema
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Record
from gradtrace.trace.shards import ShardReader
from gradtrace.trace.spans import layout_numel

VERIFY_FORMAT: Final = "gradtrace.verify"
VERIFY_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """State what is wrong with one file, in the words of `gradtrace.errors`."""

    slug: str
    found: str
    where: str
    expected: str
    remedy: str


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Say what was checked in one shard.

    Attributes:
        file: relative to the trace.
        tensors: records whose tensor was found there, whole and of the right dtype and length.
        fault: what is wrong with it, or ``None``.
    """

    file: str
    size_bytes: int
    tensors: int
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Hold what ``verify`` says.

    Attributes:
        segments: index segments whose checksum chains hold.
        records: records of the index.
        files: every sealed shard.
    """

    path: str
    verdict: Literal["sound", "damaged"]
    ranks: int
    segments: int
    records: int
    files: tuple[FileCheck, ...]
    notes: tuple[str, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return what is wrong, file by file."""
        return tuple(file.fault for file in self.files if file.fault is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``verify --json`` prints."""
        return {
            "format": VERIFY_FORMAT,
            "version": VERIFY_VERSION,
            "path": self.path,
            "verdict": self.verdict,
            "ranks": self.ranks,
            "segments": self.segments,
            "records": self.records,
            "files": [asdict(file) for file in self.files],
            "notes": list(self.notes),
        }


def verify(path: str | Path) -> VerifyResult:
    """Check structure, checksums, every record's tensor, and that safetensors opens each shard.

    Args:
        path: the trace directory.

    Raises:
        GradtraceError: the structure is damaged, so that nothing further can be checked.
    """
    trace = open_trace(path)
    records: dict[Path, list[Record]] = defaultdict(list)
    for number, rank in trace.ranks.items():
        for record in rank.records:
            if record.shard is not None:
                records[trace.path / schema.rank_dir(number) / record.shard].append(record)
    files = tuple(_check(trace, reader, records[reader.path]) for reader in trace.shard_readers())
    directories = [trace.path / schema.rank_dir(number) for number in trace.ranks]
    return VerifyResult(
        path=str(path),
        verdict="sound" if all(file.fault is None for file in files) else "damaged",
        ranks=len(trace.ranks),
        segments=sum(1 for directory in directories for _ in directory.glob("index-*.jsonl")),
        records=sum(len(rank.records) for rank in trace.ranks.values()),
        files=files,
        notes=trace.notes,
    )


def _check(trace: Trace, reader: ShardReader, records: list[Record]) -> FileCheck:
    fault = None
    tensors = 0
    try:
        reader.check()
        for record in records:
            assert record.key is not None and record.dtype is not None
            reader.bits(record.key, DTYPES[record.dtype], layout_numel(trace.layout(record)))
            tensors += 1
        _cross_check(reader.path, {record.key for record in records if record.key is not None})
    except GradtraceError as error:
        fault = Fault(error.slug, error.found, error.where, error.expected, error.remedy)
    size = reader.path.stat().st_size if reader.path.exists() else 0
    return FileCheck(reader.path.relative_to(trace.path).as_posix(), size, tensors, fault)


def _cross_check(path: Path, keys: set[str]) -> None:
    """Open a shard with safetensors' own reader, which shares no code with ours."""
    try:
        with safe_open(path, framework="np") as file:
            there = set(file.keys())
    except Exception as error:  # safetensors raises its own type, and others for bad JSON
        raise _unlike(path, f"{type(error).__name__}: {error}") from error
    if there != keys:
        raise _unlike(path, f"{len(there)} tensors there, {len(keys)} in the index")


def _unlike(path: Path, found: str) -> DamagedTraceError:
    return DamagedTraceError(
        f"safetensors' own reader disagrees ({found})"[:300],
        where=str(path),
        expected="a shard that any safetensors reader opens",
        remedy="Copy the trace again from where it was written, or record it again.",
    )
