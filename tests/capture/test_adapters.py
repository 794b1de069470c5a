"""Adapters as data: what they declare must hang together, whatever DeepSpeed is installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from gradtrace.capture.adapters.declare import Model
from gradtrace.capture.adapters.select import ADAPTERS
from gradtrace.capture.adapters.zero12 import ZERO12
from gradtrace.trace.points import POINT_NAMES


def _model(*, overlap_comm: bool) -> Model:
    optimizer = SimpleNamespace(reduction_stream="side stream", overlap_comm=overlap_comm)
    return Model(None, optimizer, (), {}, (), (), ())


def test_a_stream_that_is_there_and_not_used_is_not_read_on() -> None:
    """On a GPU, ``reduction_stream`` exists without ``overlap_comm``, ordered with nothing.

    Found on an H200: reading ``reduced`` on it saw the bucket before its reduction.
    """
    streams = [probe.stream for probe in ZERO12.probes if probe.stream is not None]
    assert len(streams) == 4  # reduced, from a buffer and from two kinds of list, and partition
    for stream in streams:
        assert stream(_model(overlap_comm=True)) == "side stream"
        assert stream(_model(overlap_comm=False)) is None


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_every_probe_names_a_point_and_its_source(adapter) -> None:  # type: ignore[no-untyped-def]
    for probe in adapter.probes:
        assert probe.point in POINT_NAMES
        assert probe.source
    assert {"bucket", "master_grad", "clipped_grad"} <= {p.point for p in adapter.probes}
    for refusal in adapter.refusals:
        assert refusal.found
        assert refusal.reason
