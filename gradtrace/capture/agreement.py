"""Agree on a run through the process group's store: no collective is added to the training."""

from __future__ import annotations

import datetime
import itertools
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch

from gradtrace import errors
from gradtrace.capture.options import CaptureOptions
from gradtrace.trace import schema
from gradtrace.trace.records import Header, Manifest
from gradtrace.trace.spans import Layout
from gradtrace.trace.writer import RankWriter, claim_directory, write_manifest

_WAIT: Final = datetime.timedelta(seconds=300)
_ready = TypeVar("_ready")
_made = TypeVar("_made")
_wraps = itertools.count(1)  # every rank wraps in the same order: this numbers the agreements
_current = [0]


def guarded(prepare: Callable[[], _ready], make: Callable[[_ready], _made]) -> _made:
    """Prepare and make a tracer; when rank 0 fails, the others are told instead of left waiting."""
    _current[0] = next(_wraps)
    try:
        return make(prepare())
    except errors.GradtraceError as error:
        _publish_failure(error)
        raise


def agree_on_run(path: Path, options: CaptureOptions, manifest: Callable[[str], Manifest]) -> str:
    """Return the run id; rank 0 claims the directory and writes the manifest first.

    Raises:
        TraceExistsError: the directory already holds a trace, on rank 0 or here.
        BadOptionError: the directory cannot be written, or this rank was given other options.
    """
    if torch.distributed.get_rank() == 0:
        run_id = uuid.uuid4().hex
        try:
            claim_directory(path)
            write_manifest(path, manifest(run_id))
        except OSError as error:
            _unwritable(path, error)
        _store().set(_key(), json.dumps({"run_id": run_id, "plan": options.plan()}))
        return run_id
    store = _store()
    store.wait([_key()], _WAIT)
    answer = json.loads(store.get(_key()))
    if "error" in answer:
        known = {cls.slug: cls for cls in _all_errors(errors.GradtraceError)}
        cls = known[answer["error"].pop("slug")]
        raise cls(**answer["error"])
    for name, value in options.plan().items():
        if answer["plan"][name] != value:
            raise errors.BadOptionError(
                f"{name} {value!r} on rank {torch.distributed.get_rank()}"[:200],
                where=options.named(name),
                expected=f"what rank 0 has, {answer['plan'][name]!r}"[:200],
                remedy="Give every rank the same options: set the environment alike on all hosts.",
            )
    return str(answer["run_id"])


def claim_rank(
    path: Path, run_id: str, header: Header, layouts: Mapping[int, Layout]
) -> RankWriter:
    """Make this rank's directory and write its header.

    Raises:
        TraceExistsError: the rank's directory is there already.
        BadOptionError: it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_alone(path, run_id)
        return RankWriter(path, run_id, header, layouts)
    except FileExistsError:
        raise errors.TraceExistsError(
            f"the directory already holds the files of rank {header.rank}",
            where=str(path),
            expected="a new or empty directory",
            remedy="Choose another output directory, or move the old trace away.",
        ) from None
    except OSError as error:
        _unwritable(path, error)


def _check_alone(path: Path, run_id: str) -> None:
    """Refuse a host's own directory that holds files of another run.

    Rank 0 looked at the directory that it sees; without a shared file system that is another one.
    """
    manifest = path / schema.MANIFEST
    found = [manifest] if manifest.is_file() else path.glob(f"rank-*/{schema.HEADER}")
    for file in found:
        if _run_of(file) not in (run_id, None):
            raise errors.TraceExistsError(
                f"the directory already holds {file.relative_to(path)} of another run",
                where=str(path),
                expected="a new or empty directory on every host",
                remedy="Choose another output directory, or move the old trace away.",
            )


def _run_of(file: Path) -> str | None:
    """Return the run that a sealed file belongs to; ``None`` where it does not say."""
    try:
        run_id = json.loads(file.read_bytes())["run_id"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return run_id if isinstance(run_id, str) else None


def _unwritable(path: Path, error: OSError) -> NoReturn:
    raise errors.BadOptionError(
        f"a directory that cannot be written ({error.strerror})",
        where=str(path),
        expected="a directory that this user can make and write",
        remedy="Choose another output directory.",
    ) from None


def _publish_failure(error: errors.GradtraceError) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() != 0:
        return
    if _store().check([_key()]):
        return  # the others have their run id already
    facts = {
        "slug": error.slug,
        "found": error.found,
        "where": error.where,
        "expected": error.expected,
        "remedy": error.remedy,
    }
    _store().set(_key(), json.dumps({"error": facts}))


def _all_errors(cls: type[errors.GradtraceError]) -> list[type[errors.GradtraceError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _all_errors(child))]


def _key() -> str:
    return f"gradtrace/wrap/{_current[0]}"


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
