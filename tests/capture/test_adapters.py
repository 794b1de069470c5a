"""Adapters as data: what they declare must hang together, whatever DeepSpeed is installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from gradtrace import errors
from gradtrace.capture.adapters import select
from gradtrace.capture.adapters.declare import Model, Probe
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


class _Old:
    def backward(self, loss: object) -> None: ...


class _New(_Old):
    def backward_epilogue(self) -> None: ...


def _probe(method: str, **declared: object) -> Probe:
    return Probe("local_accum", method, "after", lambda m, c: (), source="here", **declared)  # type: ignore[arg-type]


CHOICE = (
    _probe("backward_epilogue", one_of="local_accum"),
    _probe("backward", one_of="local_accum", arguments=("loss",)),
)


@pytest.mark.parametrize(
    ("optimizer", "chosen"), ((_New(), "backward_epilogue"), (_Old(), "backward"))
)
def test_of_a_choice_the_first_probe_that_binds_is_used_alone(
    optimizer: object, chosen: str
) -> None:
    model = Model(None, optimizer, (), {}, (), (), ())
    assert [r.probe.method for r in select.resolve_probes(model, CHOICE)] == [chosen]


def test_a_choice_of_which_nothing_binds_names_all_that_is_missing() -> None:
    changed = (CHOICE[0], _probe("backward", one_of="local_accum", arguments=("tensor",)))
    model = Model(None, _Old(), (), {}, (), (), ())
    with pytest.raises(errors.ProbeError) as caught:
        select.resolve_probes(model, changed)
    assert "_Old.backward_epilogue" in caught.value.found
    assert "argument tensor of _Old.backward(" in caught.value.found


class _OldEngine:
    scale_wrt_gas: bool | None = None


class _NewEngine(_OldEngine):
    def scale(self) -> None: ...


@pytest.mark.parametrize("asked", (True, False))
def test_an_engine_of_before_may_outweigh_what_backward_was_asked(asked: bool) -> None:
    old, new = _OldEngine(), _NewEngine()
    assert select.divides_by_steps(old, asked) is asked
    old.scale_wrt_gas = new.scale_wrt_gas = not asked
    assert select.divides_by_steps(old, asked) is not asked
    assert select.divides_by_steps(new, asked) is asked


def test_an_optional_probe_may_be_absent_but_not_changed() -> None:
    model = Model(None, _Old(), (), {}, (), (), ())
    assert select.resolve_probes(model, (_probe("finalize", required=False),)) == ()
    with pytest.raises(errors.ProbeError, match="argument tensor"):
        select.resolve_probes(model, (_probe("backward", required=False, arguments=("tensor",)),))


def test_a_step_that_a_scheduler_replaced_is_bound_as_it_is_called() -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before = select.signature_of(optimizer.step)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert select.signature_of(optimizer.step) == before
    assert dict(select.signature_of(optimizer.step).bind().arguments) == {}
