"""Gather what a bug report needs from traces: verdicts, versions, configuration, digests of all records.

No value of a tensor goes in but the one element that a finding shows, and none of weights or optimizer
state; batches stand there as hashes, as they do in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gradtrace.analysis.audit import audit
from gradtrace.analysis.diff import diff
from gradtrace.analysis.inspect import inspect
from gradtrace.analysis.results import AuditResult, DiffResult
from gradtrace.analysis.scrub import scrub
from gradtrace.trace.digest import digest_of
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.reader import Trace, open_trace
from gradtrace.trace.records import Record
from gradtrace.trace.spans import PADDING, Layout

BUNDLE_FORMAT: Final = "gradtrace.report"
BUNDLE_VERSION: Final = 1
PRIVATE: Final = frozenset({"weight", "master_weight", "optimizer_state"})
FEW: Final = 64  # elements of weights of which not even a digest goes in


@dataclass(frozen=True, slots=True)
class Member:
    """Hold one trace of a bundle.

    Attributes:
        name: what stands for its path everywhere: ``trace-1``, ``trace-2``, ...
        trace: the open trace.
        audit: the verdict on it.
    """

    name: str
    trace: Trace
    audit: AuditResult


@dataclass(frozen=True, slots=True)
class Bundle:
    """Hold what a bug report is made of.

    Attributes:
        members: the traces, in the order they were given.
        diffs: name of the candidate -> comparison of the first trace with it.
        known: private words -> what stands for them.
    """

    members: tuple[Member, ...]
    diffs: Mapping[str, DiffResult]
    known: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the bundle's ``report.json``, scrubbed."""
        body: dict[str, Any] = {
            "format": BUNDLE_FORMAT,
            "version": BUNDLE_VERSION,
            "traces": [_about(member) for member in self.members],
            "diffs": {name: result.to_dict() for name, result in self.diffs.items()},
        }
        scrubbed: dict[str, Any] = scrub(body, self.known)
        return scrubbed


def gather(paths: Sequence[str | Path]) -> Bundle:
    """Judge traces for a bug report: audit each, compare the first with every other.

    Raises:
        GradtraceError: a trace cannot be read; see `gradtrace.trace.reader.open_trace`.
    """
    members = []
    known: dict[str, str] = {}
    for number, path in enumerate(paths, 1):
        trace = open_trace(path)
        name = f"trace-{number}"
        members.append(Member(name, trace, _private_audit(audit(trace))))
        known[str(path)] = known[str(Path(path).resolve())] = name
        for rank in trace.ranks.values():
            known.setdefault(rank.header.host, f"host-{_hosts(known)}")
    first, *others = members
    diffs = {o.name: _private_diff(diff(first.trace, o.trace)) for o in others}
    return Bundle(tuple(members), diffs, known)


def _hosts(known: Mapping[str, str]) -> int:
    return sum(word.startswith("host-") for word in set(known.values()))


def digests(member: Member, known: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield every record of a trace without its values: norms, counts and hashes of its spans."""
    names = [parameter.name for parameter in member.trace.manifest.parameters]
    for rank, held in member.trace.ranks.items():
        for record in held.records:
            facts = dict(record.facts)
            line: dict[str, Any] = {
                "trace": member.name,
                "rank": rank,
                "step": record.step,
                "micro_step": record.micro_step,
                "point": record.point,
                "unit": record.unit,
                "occurrence": record.occurrence,
                "dtype": record.dtype,
            }
            if record.layout is not None:
                layout = member.trace.layout(record)
                line["spans"] = [
                    [None if s.param == PADDING else names[s.param], s.param_offset, s.numel]
                    for s in layout
                ]
                digest = facts.pop("digest", None) or _digest(member.trace, record)
                line["digest"] = _private_digest(record, layout, digest)
            yield {**line, "facts": scrub(facts, known)}
        for gap in held.gaps:
            line = {
                "gap": gap.reason,
                "step": gap.step,
                "micro_step": gap.micro_step,
                "point": gap.point,
                "detail": scrub(gap.detail, known),
            }
            yield {"trace": member.name, "rank": rank, **line}


def _digest(trace: Trace, record: Record) -> Mapping[str, Any]:
    assert record.dtype is not None
    bits = trace.bits(record)
    stretches = (
        (bits[span.flat_offset : span.flat_offset + span.numel], span.param_offset)
        for span in trace.layout(record)
    )
    return digest_of(stretches, DTYPES[record.dtype])


def _about(member: Member) -> dict[str, Any]:
    manifest = member.trace.manifest
    headers = [held.header for held in member.trace.ranks.values()]
    return {
        "name": member.name,
        "info": {**inspect(member.trace.path).to_dict(), "path": member.name},
        "ds_config": dict(manifest.ds_config),
        "parameters": [
            {
                "name": parameter.name,
                "aliases": list(parameter.aliases),
                "shape": list(parameter.shape),
                "dtype": parameter.dtype,
                "trainable": parameter.trainable,
                "group": parameter.group,
            }
            for parameter in manifest.parameters
        ],
        "ranks": [
            {
                "rank": header.rank,
                "dp_ranks": list(header.dp_ranks),
                "host": header.host,
                "points": dict(header.points),
                "effective": dict(header.effective),
            }
            for header in headers
        ],
        "audit": member.audit.to_dict(),
    }


def _private_audit(result: AuditResult) -> AuditResult:
    """Return the verdict without the elements of weights that findings show."""
    findings = tuple(
        replace(finding, expected=None, found=None) if finding.point in PRIVATE else finding
        for finding in result.findings
    )
    return replace(result, findings=findings, first=findings[0] if findings else None)


def _private_diff(result: DiffResult) -> DiffResult:
    first = result.first
    if first is not None and first.point in PRIVATE:
        first = replace(first, baseline=None, candidate=None)
    return replace(result, first=first)


def _private_digest(record: Record, layout: Layout, digest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a digest that tells no weight: of few elements the norm or the hash gives them away."""
    if record.point not in PRIVATE:
        return dict(digest)
    return {
        name: [
            value if span.numel >= FEW else None for span, value in zip(layout, values, strict=True)
        ]
        for name, values in digest.items()
    }
