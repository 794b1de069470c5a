"""Bring together what the hosts of one run wrote into directories of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradtrace.errors import MissingRankError, MixedRunsError, NotATraceError, TraceExistsError
from gradtrace.trace import schema
from gradtrace.trace.reader import open_trace, read_file
from gradtrace.trace.records import Manifest
from gradtrace.trace.validate import manifest as read_manifest

MERGE_FORMAT: Final = "gradtrace.merge"
MERGE_VERSION: Final = 1
_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Say what was brought together.

    Attributes:
        path: the new trace.
        ranks: rank -> the directory that it came from.
        files: how many files it has.
        linked: how many of them share their bytes with the originals (hard links).
        notes: as the reader of the new trace has them.
    """

    path: str
    run_id: str
    ranks: Mapping[int, str]
    files: int
    linked: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what ``merge --json`` prints."""
        return {
            "format": MERGE_FORMAT,
            "version": MERGE_VERSION,
            "path": self.path,
            "run_id": self.run_id,
            "ranks": {str(rank): place for rank, place in self.ranks.items()},
            "files": self.files,
            "linked": self.linked,
            "notes": list(self.notes),
        }


def merge(out_dir: str | Path, parts: Sequence[str | Path]) -> MergeResult:
    """Make one trace of the directories that several hosts wrote, whole or not at all.

    The originals stay as they are. Files are linked where that works, for they never change, and copied
    elsewhere. Temporary files of a host that died are left behind.

    Args:
        out_dir: directory of the new trace; it must not hold anything.
        parts: the hosts' directories; one of them holds the manifest, which rank 0 wrote.

    Raises:
        TraceExistsError: ``out_dir`` holds something already.
        NotATraceError: a directory holds nothing of a trace, or none of them the manifest.
        MixedRunsError: they are of different runs, or hold one rank twice.
        MissingRankError: a rank of the run is in none of them.
        DamagedTraceError: something is truncated, altered, or out of place.
    """
    out = Path(out_dir)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise TraceExistsError(
            "something that is there already",
            where=str(out),
            expected="a new or empty directory",
            remedy="Choose another output directory.",
        )
    roots = [Path(part) for part in parts]
    ranks = _ranks(roots)
    source, manifest = _manifest(roots)
    _check_runs(manifest, source, ranks)
    work = out.with_name(f"{out.name}.merging-{os.getpid()}")
    work.mkdir(parents=True)
    try:
        files = [(source / schema.MANIFEST, work / schema.MANIFEST)]
        for rank, directory in sorted(ranks.items()):
            target = work / schema.rank_dir(rank)
            target.mkdir()
            files += [
                (file, target / file.name)
                for file in sorted(directory.iterdir())
                if not file.name.endswith(schema.TEMPORARY)
            ]
        linked = sum(_link_or_copy(*pair) for pair in files)
        notes = open_trace(work).notes
        os.replace(work, out)  # also over an empty directory
    finally:
        shutil.rmtree(work, ignore_errors=True)
    places = {rank: str(directory.parent) for rank, directory in sorted(ranks.items())}
    return MergeResult(str(out), manifest.run_id, places, len(files), linked, notes)


def _ranks(roots: Sequence[Path]) -> dict[int, Path]:
    """Return the directory of every rank that is there, once."""
    found: dict[int, Path] = {}
    for root in roots:
        here = [entry for entry in root.glob("rank-*") if (entry / schema.HEADER).is_file()]
        if not here and not (root / schema.MANIFEST).is_file():
            raise NotATraceError(
                "no rank's directory and no manifest.json",
                where=str(root),
                expected="a directory that a host of the run wrote",
                remedy="Give the directory that was passed to wrap() or to 'run -o' on that host.",
            )
        for entry in here:
            number = entry.name.removeprefix("rank-")
            if not number.isdecimal() or schema.rank_dir(int(number)) != entry.name:
                continue  # no directory of ours; nothing of it is taken
            other = found.setdefault(int(number), entry)
            if other is not entry:
                raise MixedRunsError(
                    f"rank {int(number)} twice",
                    where=f"{other.parent} and {root}",
                    expected="every rank in one directory",
                    remedy="Give each host's directory once, and no copy of it.",
                )
    return found


def _manifest(roots: Sequence[Path]) -> tuple[Path, Manifest]:
    held = [root for root in roots if (root / schema.MANIFEST).is_file()]
    if not held:
        raise NotATraceError(
            "no manifest.json in any of them",
            where=", ".join(map(str, roots))[:400],
            expected="the directory of rank 0's host, which holds it",
            remedy="Give that directory too.",
        )
    data = [read_file(root / schema.MANIFEST) for root in held]
    place = str(held[0] / schema.MANIFEST)
    if any(other != data[0] for other in data):
        raise MixedRunsError(
            "manifests of different runs",
            where=", ".join(map(str, held))[:400],
            expected="one run's directories",
            remedy="Merge each run by itself.",
        )
    return held[0], read_manifest(schema.unseal_file(data[0], place), place)


def _check_runs(manifest: Manifest, source: Path, ranks: Mapping[int, Path]) -> None:
    for directory in ranks.values():
        where = directory / schema.HEADER
        run_id = schema.unseal_file(read_file(where), str(where)).get("run_id")
        if run_id != manifest.run_id:
            raise MixedRunsError(
                f"run id {str(run_id)[:40]!r}",
                where=str(where),
                expected=f"{manifest.run_id!r}, as {source / schema.MANIFEST} has it",
                remedy="Give directories of one run.",
            )
    missing = [rank for rank in manifest.ranks if rank not in ranks]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise MissingRankError(
            f"no files of rank {', '.join(map(str, missing[:_NAMED]))}{more}",
            where=", ".join(sorted({str(entry.parent) for entry in ranks.values()}))[:400],
            expected=f"the {len(manifest.ranks)} ranks that run {manifest.run_id} recorded",
            remedy="Give the directory of the host that ran them too.",
        )


def _link_or_copy(source: Path, target: Path) -> bool:
    """Put a plain file in its place; say whether it was linked."""
    if source.is_symlink() or not source.is_file():
        return False  # no part of a trace; the reader of the new one says what is missing
    with contextlib.suppress(OSError):  # another file system, or one without hard links
        os.link(source, target)
        return True
    shutil.copyfile(source, target)
    return False
