"""Read untrusted JSON into the frozen types of `gradtrace.trace.records`.

Traces come from strangers' bug reports: every field's type, range and reference is checked here, once,
and nothing after this has to doubt them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from gradtrace.errors import DamagedTraceError
from gradtrace.trace import facts as fact_checks
from gradtrace.trace import points
from gradtrace.trace.dtypes import DTYPES
from gradtrace.trace.records import (
    Gap,
    Header,
    Manifest,
    Parameter,
    Record,
    Report,
    Shard,
    StepEnd,
)
from gradtrace.trace.spans import PADDING, Layout, Span

MAX_COUNT = 2**48  # more elements, bytes or ranks than any run has
MAX_TEXT = 4096
MAX_MICRO_STEPS = 10_000  # everything that judges a trace counts through them


class Fields:
    """Take typed members out of one JSON object, naming the place when one is wrong."""

    def __init__(self, body: Any, where: str) -> None:
        if not isinstance(body, dict):
            damaged("a value that is not an object", where, "an object")
        self.body: dict[str, Any] = body
        self.where = where

    def _take(self, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.body.get(name)
        if not fits(value):
            damaged(f"{name} = {str(value)[:60]!r}", self.where, wanted)
        return value

    def count(self, name: str) -> int:
        """Take a whole number from 0 to `MAX_COUNT`."""
        value: int = self._take(name, "a whole number", is_count)
        return value

    def maybe_count(self, name: str) -> int | None:
        """Take a whole number or null."""
        value: int | None = self._take(name, "a number or null", lambda v: v is None or is_count(v))
        return value

    def text(self, name: str) -> str:
        """Take a string of bounded length."""
        value: str = self._take(name, "a string", _is_text)
        return value

    def maybe_text(self, name: str) -> str | None:
        """Take a string or null."""
        value: str | None = self._take(name, "a string or null", lambda v: v is None or _is_text(v))
        return value

    def flag(self, name: str) -> bool:
        """Take true or false."""
        value: bool = self._take(name, "true or false", lambda v: isinstance(v, bool))
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Take an object."""
        value: dict[str, Any] = self._take(name, "an object", lambda v: isinstance(v, dict))
        return value

    def items(self, name: str) -> list[Any]:
        """Take an array."""
        value: list[Any] = self._take(name, "an array", lambda v: isinstance(v, list))
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Take an array of whole numbers."""
        values = self.items(name)
        if not all(is_count(value) for value in values):
            damaged(f"{name} with something that is no number", self.where, "whole numbers")
        return tuple(values)

    def texts(self, name: str) -> tuple[str, ...]:
        """Take an array of strings."""
        values = self.items(name)
        if not all(_is_text(value) for value in values):
            damaged(f"{name} with something that is no string", self.where, "strings")
        return tuple(values)

    def point(self) -> str:
        """Take the name of a point."""
        name: str = self._take("point", "a point's name", lambda v: v in points.POINT_NAMES)
        return name


def is_count(value: Any) -> bool:
    """Say whether a JSON value is a whole number from 0 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def damaged(found: str, where: str, expected: str) -> NoReturn:
    """Raise `DamagedTraceError` for something that a sealed file should not hold."""
    raise DamagedTraceError(
        found,
        where=where,
        expected=expected,
        remedy="Copy the trace again from where it was written, or record it again.",
    )


def manifest(body: Mapping[str, Any], where: str) -> Manifest:
    """Read the manifest's body.

    Raises:
        DamagedTraceError: a member is missing or wrong.
    """
    fields = Fields(dict(body), where)
    parameters = tuple(
        _parameter(Fields(entry, f"{where}, parameter {index}"), index)
        for index, entry in enumerate(fields.items("parameters"))
    )
    names = [name for parameter in parameters for name in (parameter.name, *parameter.aliases)]
    if len(set(names)) != len(names):
        damaged("a parameter name that stands twice", where, "unique names")
    packages = fields.table("packages")
    if not all(_is_text(value) for value in packages.values()):
        damaged("a package version that is no string", where, "strings")
    world_size = fields.count("world_size")
    if not 1 <= world_size <= 10**6:
        damaged(f"world_size = {world_size}", where, "1 to 1000000 ranks")
    plan = fields.table("plan")
    if plan.get("ranks") is not None:
        chosen = Fields(plan, f"{where}, plan").counts("ranks")
        if not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= world_size:
            damaged(f"plan.ranks = {str(chosen)[:60]}", where, f"some ranks below {world_size}")
    created_s = body.get("created_s")
    if isinstance(created_s, bool) or not isinstance(created_s, (int, float)):
        damaged(f"created_s = {str(created_s)[:60]!r}", where, "seconds")
    return Manifest(
        run_id=fields.text("run_id"),
        world_size=world_size,
        plan=plan,
        parameters=parameters,
        ds_config=fields.table("ds_config"),
        packages=packages,
        created_s=float(created_s),
        perturbation=_perturbation(body, where),
    )


def _perturbation(body: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    if body.get("perturbation") is None:
        return None
    fields = Fields(body["perturbation"], f"{where}, perturbation")
    return {
        "sample": fields.count("sample"),
        "ulp": fields.count("ulp"),
        "hash": fields.text("hash"),
    }


def _parameter(fields: Fields, index: int) -> Parameter:
    parameter = Parameter(
        index=fields.count("index"),
        name=fields.text("name"),
        aliases=fields.texts("aliases"),
        shape=fields.counts("shape"),
        dtype=fields.text("dtype"),
        group=fields.maybe_count("group"),
        trainable=fields.flag("trainable"),
        captured=fields.flag("captured"),
    )
    if parameter.index != index:
        damaged(f"index {parameter.index}", fields.where, f"index {index}")
    if len(parameter.shape) > 64 or math.prod(parameter.shape) > MAX_COUNT:
        damaged("a shape of too many elements", fields.where, f"at most {MAX_COUNT}")
    return parameter


def header(body: Mapping[str, Any], where: str) -> Header:
    """Read a rank header's body, without its layouts.

    Raises:
        DamagedTraceError: a member is missing or wrong.
    """
    fields = Fields(dict(body), where)
    # Traces that are older than a point do not have it.
    older = dict.fromkeys(points.LATER, "absent: not in this trace")
    statuses = {**older, **fields.table("points")}
    if set(statuses) != set(points.POINT_NAMES) or not all(map(_is_text, statuses.values())):
        damaged("another set of points", where, f"a status for each of {points.POINT_NAMES}")
    partitions = fields.table("partitions")
    if not all(map(is_count, partitions.values())):
        damaged("a partition layout that is no number", where, "layout ids")
    rank, dp_rank, dp_ranks = (
        fields.count("rank"),
        fields.count("dp_rank"),
        fields.counts("dp_ranks"),
    )
    if len(set(dp_ranks)) < len(dp_ranks) or dp_ranks[dp_rank : dp_rank + 1] != (rank,):
        damaged(f"dp_ranks = {str(dp_ranks)[:60]}", where, f"a group with rank {rank} at {dp_rank}")
    fault = fact_checks.fault_of_settings(fields.table("effective"))
    if fault is not None:
        damaged(f"effective {fault}", where, "what docs/format.md says of it")
    buffers = body.get("buffers")
    fault = fact_checks.fault_of_buffers(buffers)
    if fault is not None:
        damaged(f"buffers {fault}", where, "name, dtype, shape and hash of each")
    return Header(
        rank=rank,
        dp_rank=dp_rank,
        dp_ranks=dp_ranks,
        points=statuses,
        partitions=partitions,
        effective=fields.table("effective"),
        host=fields.text("host"),
        buffers=None if buffers is None else tuple(buffers),
    )


def layout(fields: Fields, parameters: tuple[Parameter, ...]) -> tuple[int, Layout]:
    """Read one layout: contiguous from 0, every span inside its parameter.

    Raises:
        DamagedTraceError: a span is outside, negative or out of place.
    """
    spans: list[Span] = []
    flat_offset = 0
    for entry in fields.items("spans"):
        if not (
            isinstance(entry, list)
            and len(entry) == 4
            and (entry[0] == PADDING or is_count(entry[0]))
            and all(map(is_count, entry[1:]))
        ):
            damaged(f"span {str(entry)[:60]}", fields.where, "four whole numbers")
        span = Span(*entry)
        if span.flat_offset != flat_offset:
            damaged(f"span {entry} out of place", fields.where, f"flat offset {flat_offset}")
        if span.param != PADDING:
            if span.param >= len(parameters):
                damaged(f"span {entry} of no parameter", fields.where, f"below {len(parameters)}")
            if span.param_offset + span.numel > parameters[span.param].numel:
                damaged(f"span {entry} past its parameter's end", fields.where, "a span inside it")
        flat_offset += span.numel
        spans.append(span)
    return fields.count("id"), tuple(spans)


def shard(fields: Fields, expected_name: str) -> Shard:
    """Read a shard line; the file name is the one that numbering gives, so no path can leave."""
    name = fields.text("file")
    if name != expected_name:
        damaged(f"shard {name[:60]!r}", fields.where, expected_name)
    digest = fields.text("xxh3")
    return Shard(name, fields.count("size_bytes"), digest)


def record(
    fields: Fields,
    rank: int,
    order: int,
    layouts: Mapping[int, Layout],
    shards: Mapping[str, Shard],
) -> Record:
    """Read a record line.

    Raises:
        DamagedTraceError: it refers to a layout or shard that was not written before it.
    """
    key, shard_file, dtype, number = None, None, None, None
    if fields.body.get("key") is not None:
        key, shard_file, dtype = fields.text("key"), fields.text("shard"), fields.text("dtype")
        number = fields.count("layout")
        if dtype not in DTYPES:
            damaged(f"dtype {dtype[:40]!r}", fields.where, f"one of {', '.join(DTYPES)}")
        if number not in layouts:
            damaged(f"layout {number}", fields.where, "a layout written before the record")
        if shard_file not in shards:
            damaged(f"shard {shard_file[:60]!r}", fields.where, "a shard written before the record")
    elif fields.body.get("layout") is not None:  # a digest: which elements, but not their values
        dtype, number = fields.text("dtype"), fields.count("layout")
        if number not in layouts:
            damaged(f"layout {number}", fields.where, "a layout written before the record")
    facts = fields.body.get("facts", {})
    if not isinstance(facts, dict):
        damaged("facts that are no object", fields.where, "an object")
    fault = fact_checks.fault_of_record(fields.point(), facts)
    if fault is None and number is not None and (key is None or "digest" in facts):
        fault = fact_checks.fault_of_digest(facts.get("digest"), layouts[number])
    elif fault is None and "digest" in facts:
        fault = "a digest without a layout"
    if fault is not None:
        damaged(fault, fields.where, "what docs/format.md says of it")
    return Record(
        rank=rank,
        step=fields.count("step"),
        micro_step=fields.maybe_count("micro_step"),
        point=fields.point(),
        unit=fields.text("unit"),
        occurrence=fields.count("occurrence"),
        order=order,
        key=key,
        shard=shard_file,
        dtype=dtype,
        layout=number,
        facts=facts,
    )


def gap(fields: Fields, rank: int) -> Gap:
    """Read a gap line."""
    point = None if fields.body.get("point") is None else fields.point()
    return Gap(
        rank=rank,
        step=fields.count("step"),
        micro_step=fields.maybe_count("micro_step"),
        point=point,
        unit=fields.maybe_text("unit"),
        reason=fields.text("reason"),
        detail=fields.text("detail"),
    )


def step_end(fields: Fields, rank: int) -> StepEnd:
    """Read a step_end line."""
    micro_steps = fields.count("micro_steps")
    if micro_steps > MAX_MICRO_STEPS:
        damaged(f"micro_steps = {micro_steps}", fields.where, f"at most {MAX_MICRO_STEPS}")
    facts = fields.table("facts")
    fault = fact_checks.fault_of_step(facts)
    if fault is not None:
        damaged(fault, fields.where, "what docs/format.md says of it")
    return StepEnd(
        rank=rank,
        step=fields.count("step"),
        micro_steps=micro_steps,
        records=fields.count("records"),
        gaps=fields.count("gaps"),
        partial=fields.flag("partial"),
        facts=facts,
    )


def report(fields: Fields, rank: int) -> Report:
    """Read a report line."""
    steps = fields.count("steps")
    if steps < 1 or steps > fields.count("step") + 1:
        damaged(f"steps = {steps}", fields.where, "steps that the tracer counted")
    values = fields.table("values")
    fault = fact_checks.fault_of_report(values)
    if fault is not None:
        damaged(fault, fields.where, "what docs/format.md says of it")
    return Report(
        rank=rank,
        step=fields.count("step"),
        steps=steps,
        source=fields.text("source"),
        framework_step=fields.maybe_count("framework_step"),
        values=values,
    )
