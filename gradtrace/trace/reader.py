"""Open a trace and read it, believing nothing that was not checked.

Opening checks structure: formats, run ids, chains, lengths, counts. Contents of shards are checked
against their checksums before the first value of a shard is handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gradtrace.errors import (
    DamagedTraceError,
    MissingRankError,
    MixedRunsError,
    NotATraceError,
    UnsupportedVersionError,
)
from gradtrace.trace import schema, validate
from gradtrace.trace.dtypes import DTYPES, Float64, to_float64
from gradtrace.trace.records import (
    Gap,
    Header,
    Manifest,
    RankTrace,
    Record,
    Report,
    Shard,
    StepEnd,
)
from gradtrace.trace.shards import ShardReader
from gradtrace.trace.spans import PADDING, Layout, layout_numel


@dataclass(frozen=True)
class Trace:
    """Hold an open trace: the index of every rank, and access to the tensors.

    Attributes:
        path: the trace directory, as it was given.
        manifest: what all ranks share.
        ranks: the index of every rank of the capture plan.
        steps: the steps that are complete on every rank, ascending.
        notes: what a reader should know and is no error (unsealed tails, temporaries).
    """

    path: Path
    manifest: Manifest
    ranks: dict[int, RankTrace]
    steps: tuple[int, ...]
    notes: tuple[str, ...]
    _shards: dict[tuple[int, str], ShardReader]

    def bits(self, record: Record) -> NDArray[Any]:
        """Return the raw bits of a record's flat tensor, as unsigned integers; no copy.

        Raises:
            DamagedTraceError: the shard does not match its checksum or its header.
        """
        assert record.key is not None and record.shard is not None
        assert record.dtype is not None and record.layout is not None
        place = (record.rank, record.shard)
        reader = self._shards.get(place)
        rank = self.ranks[record.rank]
        if reader is None:
            path = self.path / schema.rank_dir(record.rank) / record.shard
            reader = ShardReader(path, rank.shards[record.shard], self.manifest.run_id, record.rank)
            self._shards[place] = reader
        numel = layout_numel(rank.layouts[record.layout])
        return reader.bits(record.key, DTYPES[record.dtype], numel)

    def values(self, record: Record) -> Float64:
        """Return a record's flat tensor widened to float64, exactly.

        Returns:
            1-D float64 array in the record's own scale (nothing unscaled), a fresh copy.

        Raises:
            DamagedTraceError: the shard does not match its checksum or its header.
        """
        assert record.dtype is not None
        return to_float64(self.bits(record), DTYPES[record.dtype])

    def layout(self, record: Record) -> Layout:
        """Return the layout that a record's flat tensor follows."""
        assert record.layout is not None
        return self.ranks[record.rank].layouts[record.layout]

    def shard_readers(self) -> Iterator[ShardReader]:
        """Yield a fresh reader of every sealed shard, for ``verify``."""
        for rank, index in self.ranks.items():
            for shard in index.shards.values():
                path = self.path / schema.rank_dir(rank) / shard.file
                yield ShardReader(path, shard, self.manifest.run_id, rank)


def open_trace(path: str | Path) -> Trace:
    """Open a trace and check everything but the contents of its shards.

    Args:
        path: the trace directory.

    Raises:
        NotATraceError: there is no trace.
        UnsupportedVersionError: it was written in another format version.
        MissingRankError: a planned rank has no files.
        MixedRunsError: a file belongs to another run.
        DamagedTraceError: something is truncated, altered, or out of place.
    """
    root = Path(path)
    manifest = _read_manifest(root)
    ranks: dict[int, RankTrace] = {}
    notes: list[str] = []
    promised = {schema.rank_dir(rank) for rank in manifest.ranks}
    for entry in sorted(root.glob("rank-*")):
        if entry.name not in promised:
            validate.damaged(
                f"files of a rank that the manifest does not promise ({entry.name[:40]})",
                str(root),
                f"the ranks of its plan, {len(promised)} of {manifest.world_size}",
            )
    for rank in manifest.ranks:
        directory = root / schema.rank_dir(rank)
        if not (directory / schema.HEADER).is_file():
            raise MissingRankError(
                f"no {schema.HEADER} for rank {rank}",
                where=str(directory),
                expected=f"the files of {len(manifest.ranks)} ranks (run of {manifest.world_size})",
                remedy="Bring the hosts' directories together: gradtrace merge OUT DIR...",
            )
        ranks[rank] = _read_rank(directory, rank, manifest, notes)
    return Trace(root, manifest, ranks, _complete_steps(ranks, notes), tuple(notes), {})


def _read_manifest(root: Path) -> Manifest:
    path = root / schema.MANIFEST
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise NotATraceError(
            "no manifest.json"
            if root.is_dir()
            else ("a file" if root.exists() else "no such directory"),
            where=str(root),
            expected="a directory that gradtrace wrote",
            remedy="Give the directory that was passed to wrap() or to 'run -o'.",
        ) from None
    _check_format(data, schema.FORMAT, path)
    return validate.manifest(schema.unseal_file(data, str(path)), str(path))


def read_file(path: Path) -> bytes:
    """Read a whole file that must be a plain file of the trace, not a link out of it.

    Raises:
        FileNotFoundError: it is not there.
        DamagedTraceError: it is a link, no plain file, too large, or unreadable.
    """
    if path.is_symlink():
        validate.damaged("a symbolic link", str(path), "a plain file")
    try:
        if path.stat().st_size > schema.MAX_JSON_BYTES:
            validate.damaged(
                "a file too large to be one", str(path), f"{schema.MAX_JSON_BYTES} bytes"
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except OSError as error:
        validate.damaged(
            f"a file that cannot be read ({error.strerror})", str(path), "a plain file"
        )


def _check_format(data: bytes, wanted: str, path: Path) -> None:
    """Refuse other formats and versions before their checksum rules are applied."""
    try:
        body = schema.parse_object(data, str(path))
    except DamagedTraceError:
        return  # unsealing says it better
    found = body.get("format")
    if found != wanted:
        raise NotATraceError(
            f"format {str(found)[:40]!r}",
            where=str(path),
            expected=f"format {wanted!r}",
            remedy="Give a directory that gradtrace wrote.",
        )
    version = body.get("version")
    if not validate.is_count(version) or version != schema.VERSION:
        raise UnsupportedVersionError(
            f"format version {str(version)[:20]}",
            where=str(path),
            expected=f"version {schema.VERSION}",
            remedy="Read it with the gradtrace release that wrote it, or a newer one.",
        )


def _read_rank(directory: Path, rank: int, manifest: Manifest, notes: list[str]) -> RankTrace:
    where = directory / schema.HEADER
    if directory.is_symlink():
        validate.damaged("a symbolic link", str(directory), "a directory of the trace")
    data = read_file(where)
    _check_format(data, schema.RANK_FORMAT, where)
    body = schema.unseal_file(data, str(where))
    _check_run(body, manifest.run_id, rank, where)
    header = validate.header(body, str(where))
    index = _Index(header, manifest, directory)
    for entry in validate.Fields(body, str(where)).items("layouts"):
        index.add_layout(validate.Fields(entry, f"{where}, a layout"))
    for unit, number in header.partitions.items():
        if number not in index.layouts:
            validate.damaged(
                f"partition {unit[:40]!r} of layout {number}", str(where), "a layout in it"
            )
    number = 0
    while index.closed is None:
        path = directory / schema.segment_name(number)
        try:
            data = read_file(path)
        except FileNotFoundError:
            break
        index.read_segment(data, number, path)
        number += 1
    index.finish(number, notes)
    return index.result()


def _check_run(body: dict[str, Any], run_id: str, rank: int, where: Path) -> None:
    if body.get("run_id") != run_id:
        raise MixedRunsError(
            f"run id {str(body.get('run_id'))[:40]!r}",
            where=str(where),
            expected=f"the manifest's {run_id!r}",
            remedy="Keep each run's files in a directory of their own.",
        )
    if not validate.is_count(body.get("rank")) or body["rank"] != rank:
        raise MixedRunsError(
            f"rank {str(body.get('rank'))[:20]}",
            where=str(where),
            expected=f"rank {rank}",
            remedy="Give each rank its own directory, named as it was written.",
        )


class _Index:
    """Gather one rank's segments, checking each line as it comes."""

    def __init__(self, header: Header, manifest: Manifest, directory: Path) -> None:
        self.header = header
        self.layouts: dict[int, Layout] = {}
        self.closed: str | None = None
        self._manifest = manifest
        self._directory = directory
        self._records: list[Record] = []
        self._gaps: list[Gap] = []
        self._steps: dict[int, StepEnd] = {}
        self._reports: list[Report] = []
        self._shards: dict[str, Shard] = {}
        self._open_step: int | None = None
        self._admitted: set[tuple[int, bool]] = set()
        self._identities: set[tuple[int | None, str, str, int]] = set()  # of the open step

    def add_layout(self, fields: validate.Fields) -> None:
        number, layout = validate.layout(fields, self._manifest.parameters)
        if number in self.layouts:
            validate.damaged(f"layout {number} a second time", fields.where, "new layouts only")
        self.layouts[number] = layout

    def read_segment(self, data: bytes, number: int, path: Path) -> None:
        lines = data.split(b"\n")
        if lines.pop() != b"" or len(lines) < 2:
            validate.damaged(
                "a segment that ends in the middle", str(path), "whole lines and an end"
            )
        crc = 0
        ended: dict[str, Any] | None = None
        for at, line in enumerate(lines):
            where = f"{path}, line {at + 1}"
            body, crc = schema.unseal_line(line, crc, where)
            fields = validate.Fields(body, where)
            kind = fields.text("kind")
            if (at == 0) != (kind == "segment") or ended is not None:
                validate.damaged(f"a {kind[:20]} line out of place", where, "head, lines, end")
            if kind == "segment":
                _check_run(body, self._manifest.run_id, self.header.rank, path)
                if fields.count("segment") != number:
                    validate.damaged(f"segment {str(body.get('segment'))[:20]}", where, str(number))
            elif kind == "end":
                ended = body
                if fields.count("lines") != len(lines) - 2:
                    validate.damaged(f"{len(lines) - 2} lines", where, f"{body['lines']} lines")
                self.closed = fields.maybe_text("final")
            else:
                self._take_line(kind, fields)
        if ended is None:
            validate.damaged("a segment without its end line", str(path), "an end line")

    def _take_line(self, kind: str, fields: validate.Fields) -> None:
        rank = self.header.rank
        if kind == "layout":
            self.add_layout(fields)
        elif kind == "shard":
            shard = validate.shard(fields, schema.shard_name(len(self._shards)))
            self._check_size(shard)
            self._shards[shard.file] = shard
        elif kind == "record":
            record = validate.record(fields, rank, len(self._records), self.layouts, self._shards)
            self._check_step(record.step, fields.where)
            self._check_plan(record, fields.where)
            identity = (record.micro_step, record.point, record.unit, record.occurrence)
            if identity in self._identities:
                found = f"{record.point} {record.unit[:40]!r} twice"
                validate.damaged(found, fields.where, "every record once")
            self._identities.add(identity)
            self._records.append(record)
        elif kind == "gap":
            gap = validate.gap(fields, rank)
            self._check_step(gap.step, fields.where)
            self._gaps.append(gap)
        elif kind == "step_end":
            end = validate.step_end(fields, rank)
            self._check_step(end.step, fields.where)
            if end.partial and end.step != 0:
                validate.damaged("a later step that is partial", fields.where, "step 0 alone")
            self._steps[end.step] = end
            self._open_step = None
            self._identities.clear()
        elif kind == "report":
            report = validate.report(fields, rank)
            if report.step not in self._steps:
                validate.damaged(
                    f"a report of step {report.step}", fields.where, "a step that ended"
                )
            self._reports.append(report)
        else:
            validate.damaged(f"a line of kind {kind[:20]!r}", fields.where, "a kind of version 1")

    def _check_plan(self, record: Record, where: str) -> None:
        """Check that the manifest and the header admit the record: what they deny is not judged."""
        status = self.header.points[record.point]
        if status != "recorded":
            validate.damaged(f"a record at {record.point}", where, f"none: {status[:60]}")
        group = record.facts.get("ranks") if record.point == "bucket" else None
        if group is not None and max(group) >= self._manifest.world_size:
            found = f"a collective of ranks {str(group)[:60]}"
            validate.damaged(found, where, f"ranks below {self._manifest.world_size}")
        frozen = record.point == "weight"  # frozen parameters have no gradient, but weights
        if record.layout is None or (record.layout, frozen) in self._admitted:
            return
        for span in self.layouts[record.layout]:
            if span.param != PADDING:
                parameter = self._manifest.parameters[span.param]
                if not parameter.captured or not (parameter.trainable or frozen):
                    found = f"a record of {parameter.name[:60]!r}"
                    validate.damaged(found, where, "captured, trainable parameters")
        self._admitted.add((record.layout, frozen))

    def _check_step(self, step: int, where: str) -> None:
        if step in self._steps or (self._open_step is not None and step != self._open_step):
            validate.damaged(f"step {step} out of order", where, f"step {self._open_step}")
        self._open_step = step

    def _check_size(self, shard: Shard) -> None:
        path = self._directory / shard.file
        size = path.stat().st_size if path.is_file() and not path.is_symlink() else None
        if size != shard.size_bytes:
            found = "a missing shard" if size is None else f"{size} bytes"
            validate.damaged(found, str(path), f"a plain file of {shard.size_bytes} bytes")

    def finish(self, segments: int, notes: list[str]) -> None:
        """Check counts, and that nothing lies beyond the last segment."""
        rank = self.header.rank
        found = Counter(record.step for record in self._records)
        found.update(gap.step for gap in self._gaps)
        for step, end in self._steps.items():
            if found[step] != end.records + end.gaps:
                validate.damaged(
                    f"{found[step]} records and gaps in step {step}",
                    str(self._directory),
                    f"the {end.records + end.gaps} that its step_end counts",
                )
        extra = sorted(
            path.name
            for path in self._directory.iterdir()
            if path.name not in {schema.HEADER, *self._shards}
            and path.name not in {schema.segment_name(n) for n in range(segments)}
        )
        temporaries = [name for name in extra if name.endswith(schema.TEMPORARY)]
        following = schema.shard_name(len(self._shards))
        rest = [name for name in extra if name not in temporaries]
        if self.closed is None:
            if following in rest:
                rest.remove(following)
            if temporaries or len(rest) < len(extra) - len(temporaries):
                notes.append(f"rank {rank}: files of an unsealed tail are ignored")
            notes.append(f"rank {rank}: never closed; what was not sealed is lost")
        if rest:
            validate.damaged(
                f"files that the index does not know ({', '.join(rest)[:120]})",
                str(self._directory),
                "only what the index refers to" if self.closed else "no segment missing in between",
            )
        if self._open_step is not None:
            open_ = [r.micro_step for r in self._records if r.step == self._open_step]
            ran = 1 + max((m for m in open_ if m is not None), default=-1)
            notes.append(
                f"rank {rank}: step {self._open_step} was not finished and is not judged "
                f"(micro-steps recorded of it: {ran})"
            )

    def result(self) -> RankTrace:
        return RankTrace(
            header=self.header,
            layouts=self.layouts,
            records=tuple(self._records),
            gaps=tuple(self._gaps),
            steps=self._steps,
            shards=self._shards,
            reports=tuple(self._reports),
            closed=self.closed,
        )


def _complete_steps(ranks: dict[int, RankTrace], notes: list[str]) -> tuple[int, ...]:
    """Return the steps that every rank finished; name those that only some did."""
    everywhere = set.intersection(*(set(rank.steps) for rank in ranks.values())) if ranks else set()
    for number, rank in ranks.items():
        for step in sorted(set(rank.steps) - everywhere):
            absent = [other for other, index in ranks.items() if step not in index.steps]
            notes.append(
                f"step {step} of rank {number} has no counterpart on ranks {absent}: not judged"
            )
    return tuple(sorted(everywhere))
