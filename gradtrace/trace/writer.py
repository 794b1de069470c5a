"""Write a trace: immutable shards and index segments, each whole before it is referred to.

This module knows nothing of torch: it takes raw bytes. Everything is written under a temporary name,
flushed and renamed; what has its final name is never touched again.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import xxhash

from gradtrace.errors import TraceExistsError
from gradtrace.trace import schema
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.records import Facts, Header, Manifest
from gradtrace.trace.spans import Layout, layout_numel

SHARD_BYTES: Final = 64 * 1024 * 1024
SEAL_EVERY_S: Final = 5.0


def claim_directory(path: Path) -> None:
    """Make the directory of a new trace, or refuse one that holds anything of another.

    Raises:
        TraceExistsError: a trace, or a part of one, is there already.
        OSError: the directory cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.iterdir():
        if entry.name.removesuffix(schema.TEMPORARY) == schema.MANIFEST or entry.name.startswith(
            "rank-"
        ):
            raise TraceExistsError(
                f"the directory already holds {entry.name}",
                where=str(path),
                expected="a new or empty directory",
                remedy="Choose another output directory, or move the old trace away.",
            )


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``; rank 0 does so once, before any rank writes records."""
    body = {
        "format": schema.FORMAT,
        "version": schema.VERSION,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "plan": dict(manifest.plan),
        "parameters": [asdict(parameter) for parameter in manifest.parameters],
        "ds_config": dict(manifest.ds_config),
        "packages": dict(manifest.packages),
        "created_s": manifest.created_s,
    }
    if manifest.perturbation is not None:
        body["perturbation"] = dict(manifest.perturbation)
    write_whole(path / schema.MANIFEST, [schema.seal_file(body)])


def write_whole(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Write a file under a temporary name, flush, and rename it into place.

    Returns:
        The number of bytes written.
    """
    temporary = path.with_name(path.name + schema.TEMPORARY)
    size = 0
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
            file.flush()
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def safetensors_header(
    tensors: Iterable[tuple[str, str, int]], metadata: Mapping[str, str]
) -> bytes:
    """Return the head of a safetensors file for 1-D tensors that follow in this order.

    Written by hand because safetensors' raw ``serialize`` changed its argument types between 0.7 and
    0.8, and neither form streams.

    Args:
        tensors: ``(key, dtype name, size in bytes)``.
        metadata: the ``__metadata__`` strings.

    Source: safetensors README, "Format": u64 length, JSON, data; header padded with spaces.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, dtype, size in tensors:
        code = DTYPES[dtype]
        entries[key] = {
            "dtype": code.code,
            "shape": [size // code.size_bytes],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class RankWriter:
    """Write one rank's directory; every method is called by one thread.

    Args:
        path: the trace directory.
        run_id: the run all files belong to.
        header: what is known of this rank before the first record.
        layouts: static layouts, by id; `add_layout` continues after the largest.
        shard_bytes: a shard is sealed when it holds at least this much.
        seal_every_s: at a step's end, what is pending longer than this, or than a tenth of the
            writer's age, is sealed: a young run that dies leaves a trace too, and an old one does not
            leave a file for every step. Infinite: only full shards and the end are sealed.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        header: Header,
        layouts: Mapping[int, Layout],
        *,
        shard_bytes: int = SHARD_BYTES,
        seal_every_s: float = SEAL_EVERY_S,
    ) -> None:
        self.directory = path / schema.rank_dir(header.rank)
        self.bytes_written = 0
        self._run_id = run_id
        self._rank = header.rank
        self._shard_bytes = shard_bytes
        self._seal_every_s = seal_every_s
        self._layout_ids = {layout: number for number, layout in layouts.items()}
        self._next_layout = max(layouts, default=-1) + 1
        self._lines: list[dict[str, Any]] = []
        self._sealed: list[dict[str, Any]] = []  # shards that no segment refers to yet
        self._tensors: list[tuple[str, str, bytes | memoryview]] = []
        self._pending_bytes = 0
        self._next_shard = 0
        self._next_segment = 0
        self._next_key = 0
        self._opened_at_s = self._sealed_at_s = time.monotonic()
        self.directory.mkdir()
        body = {
            "format": schema.RANK_FORMAT,
            "version": schema.VERSION,
            "run_id": run_id,
            **asdict(header),
            "layouts": [
                {"id": number, "spans": _pack(layout)} for number, layout in layouts.items()
            ],
        }
        write_whole(self.directory / schema.HEADER, [schema.seal_file(body)])

    def add_layout(self, layout: Layout) -> int:
        """Return the id of a layout, writing it down the first time it is seen."""
        number = self._layout_ids.get(layout)
        if number is None:
            number = self._layout_ids[layout] = self._next_layout
            self._next_layout += 1
            self._lines.append({"kind": "layout", "id": number, "spans": _pack(layout)})
        return number

    def add_record(
        self,
        step: int,
        micro_step: int | None,
        point: str,
        unit: str,
        occurrence: int,
        *,
        dtype: str | None = None,
        layout: Layout | None = None,
        data: bytes | memoryview | None = None,
        facts: Facts | None = None,
    ) -> None:
        """Add one record, in causal order.

        Args:
            data: little-endian bytes of the flat tensor, ``layout_numel(layout)`` elements of
                ``dtype``; ``None`` for a record of facts only. Not copied: must not change.
            dtype, layout: of the tensor; without one, of what ``facts["digest"]`` is of.
        """
        line: dict[str, Any] = {
            "kind": "record",
            "step": step,
            "micro_step": micro_step,
            "point": point,
            "unit": unit,
            "occurrence": occurrence,
        }
        if facts:
            line["facts"] = dict(facts)
        if data is None and layout is not None:
            line.update(dtype=dtype, layout=self.add_layout(layout))
        if data is not None:
            assert dtype is not None and layout is not None
            view = memoryview(data).cast("B")
            if len(view) != layout_numel(layout) * DTYPES[dtype].size_bytes:
                raise ValueError(f"{point} {unit}: {len(view)} bytes do not fit the layout")
            key = f"{self._next_key:09d}"
            self._next_key += 1
            line.update(
                key=key,
                shard=schema.shard_name(self._next_shard),
                dtype=dtype,
                layout=self.add_layout(layout),
            )
            self._tensors.append((key, dtype, view))
            self._pending_bytes += len(view)
        self._lines.append(line)
        if self._pending_bytes >= self._shard_bytes:
            self.seal()

    def add_gap(
        self,
        step: int,
        micro_step: int | None,
        point: str | None,
        unit: str | None,
        reason: str,
        detail: str,
    ) -> None:
        """State that something planned was not recorded."""
        self._lines.append(
            {
                "kind": "gap",
                "step": step,
                "micro_step": micro_step,
                "point": point,
                "unit": unit,
                "reason": reason,
                "detail": detail[:500],
            }
        )

    def end_step(
        self, step: int, *, micro_steps: int, records: int, gaps: int, partial: bool, facts: Facts
    ) -> None:
        """Close a step, saying what it must hold, and seal if enough waits."""
        self._lines.append(
            {
                "kind": "step_end",
                "step": step,
                "micro_steps": micro_steps,
                "records": records,
                "gaps": gaps,
                "partial": partial,
                "facts": dict(facts),
            }
        )
        now_s = time.monotonic()
        due_s = self._seal_every_s
        if math.isfinite(due_s):
            due_s = min(due_s, (now_s - self._opened_at_s) / 10)
        if now_s - self._sealed_at_s >= due_s:
            self.seal()

    def add_report(
        self, step: int, *, steps: int, source: str, framework_step: int | None, values: Facts
    ) -> None:
        """State what a framework reported of steps that ended, the last of which is ``step``."""
        self._lines.append(
            {
                "kind": "report",
                "step": step,
                "steps": steps,
                "source": source,
                "framework_step": framework_step,
                "values": dict(values),
            }
        )

    def seal(self, final_reason: str | None = None) -> None:
        """Write what is pending: first the shard, then the segment that refers to it.

        Args:
            final_reason: why the rank ends here; ``None`` when more segments follow.
        """
        if not self._lines and final_reason is None:
            return
        if self._tensors:
            self._sealed.append(self._seal_shard())
        lines = [*self._sealed, *self._lines]
        head = {
            "kind": "segment",
            "run_id": self._run_id,
            "rank": self._rank,
            "segment": self._next_segment,
        }
        tail = {"kind": "end", "lines": len(lines), "final": final_reason}
        chunks: list[bytes] = []
        crc = 0
        for body in (head, *lines, tail):
            line, crc = schema.seal_line(body, crc)
            chunks.append(line)
        self.bytes_written += write_whole(
            self.directory / schema.segment_name(self._next_segment), chunks
        )
        # Only now is anything dropped: a failed write leaves all of it pending for the caller.
        self._lines, self._sealed = [], []
        self._next_segment += 1
        self._sealed_at_s = time.monotonic()

    def drop_pending(self, reason: str, detail: str) -> int:
        """Turn every record whose tensor could not be written into a gap.

        Returns:
            How many records were lost.
        """
        lost = 0
        unsealed = {schema.shard_name(self._next_shard)} if self._tensors else set()
        for at, line in enumerate(self._lines):
            if line["kind"] == "record" and line.get("shard") in unsealed:
                self._lines[at] = {
                    "kind": "gap",
                    "reason": reason,
                    "detail": detail[:500],
                    **{name: line[name] for name in ("step", "micro_step", "point", "unit")},
                }
                lost += 1
        self._tensors = []
        self._pending_bytes = 0
        return lost

    def _seal_shard(self) -> dict[str, Any]:
        name = schema.shard_name(self._next_shard)
        head = safetensors_header(
            ((key, dtype, len(data)) for key, dtype, data in self._tensors),
            {"run_id": self._run_id, "rank": str(self._rank), "shard": name},
        )
        digest = xxhash.xxh3_64(head)
        for _, _, data in self._tensors:
            digest.update(data)
        size = write_whole(self.directory / name, [head, *(data for _, _, data in self._tensors)])
        self.bytes_written += size
        self._tensors = []
        self._pending_bytes = 0
        self._next_shard += 1
        return {"kind": "shard", "file": name, "size_bytes": size, "xxh3": digest.hexdigest()}


def _pack(layout: Layout) -> list[list[int]]:
    return [[span.param, span.param_offset, span.flat_offset, span.numel] for span in layout]
