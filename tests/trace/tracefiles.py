"""Build small traces and spoil their files, for the tests of the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtrace.testing.synthetic import Run, write_run
from gradtrace.trace import points, schema
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Header, Manifest, Parameter
from gradtrace.trace.spans import Layout
from gradtrace.trace.writer import RankWriter, claim_directory, write_manifest

SMALL = Run(
    stage=2,
    world_size=2,
    steps=2,
    micro_steps=1,
    parameters=(("a", (3,)), ("b", (2, 1))),
    points=tuple(name for name in points.POINT_NAMES if name not in points.LATER),
    shard_bytes=64,
)


def small_trace(path: Path) -> Path:
    """Write a trace of a few kilobytes: two ranks, two steps, several segments and shards."""
    return write_run(path / "trace", SMALL)


def read_everything(path: Path) -> Trace:
    """Open a trace and read every value in it."""
    trace = open_trace(path)
    for rank in trace.ranks.values():
        for record in rank.records:
            if record.key is not None:
                trace.values(record)
    return trace


def parameter(index: int, shape: tuple[int, ...], name: str = "") -> Parameter:
    """Return a captured parameter of the model."""
    return Parameter(index, name or f"p{index}", (), shape, "float32", 0, True, True)


def manifest_of(
    parameters: tuple[Parameter, ...], *, world_size: int = 1, run_id: str = "run"
) -> Manifest:
    """Return a manifest with no settings."""
    return Manifest(run_id, world_size, {}, parameters, {}, {}, 0.0)


def header_of(rank: int = 0, *, partitions: Mapping[str, int] | None = None) -> Header:
    """Return a header that records every point."""
    statuses = dict.fromkeys(points.POINT_NAMES, "recorded")
    return Header(rank, rank, (0,), statuses, partitions or {}, {}, "host")


def start(
    path: Path,
    parameters: tuple[Parameter, ...],
    layouts: Mapping[int, Layout] | None = None,
    **options: Any,
) -> RankWriter:
    """Begin a trace of one rank."""
    claim_directory(path)
    write_manifest(path, manifest_of(parameters))
    return RankWriter(path, "run", header_of(), layouts or {}, **options)


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the body of a sealed file and seal it again: what a hostile writer would do."""
    body = schema.unseal_file(path.read_bytes(), str(path))
    change(body)
    path.write_bytes(schema.seal_file(body))


def segment_bodies(path: Path) -> list[dict[str, Any]]:
    """Return the bodies of a segment's lines, without their checksums."""
    crc = 0
    bodies = []
    for line in path.read_bytes().splitlines():
        body, crc = schema.unseal_line(line, crc, str(path))
        bodies.append(body)
    return bodies


def write_segment(path: Path, bodies: list[dict[str, Any]]) -> None:
    """Write lines with a right chain around them, whatever they say."""
    crc = 0
    lines = []
    for body in bodies:
        line, crc = schema.seal_line(body, crc)
        lines.append(line)
    path.write_bytes(b"".join(lines))


def change_line(
    path: Path, chosen: Callable[[dict[str, Any]], bool], change: Callable[[dict[str, Any]], object]
) -> None:
    """Change the first line of a segment that is chosen, and chain the segment again."""
    bodies = segment_bodies(path)
    change(next(body for body in bodies if chosen(body)))
    write_segment(path, bodies)


def write_raw_segment(path: Path, texts: list[str]) -> None:
    """Write lines of any JSON text with a right chain around them."""
    crc = 0
    lines = []
    for text in texts:
        raw = text.encode()
        crc = schema.zlib.crc32(raw, crc)
        lines.append(raw[:-1] + b',"crc":"' + f"{crc:08x}".encode() + b'"}\n')
    path.write_bytes(b"".join(lines))


def as_text(body: Mapping[str, Any]) -> str:
    """Return a body as compact JSON."""
    return json.dumps(body, separators=(",", ":"), sort_keys=True)
