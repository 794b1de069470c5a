"""Plant faults into live DeepSpeed methods, to prove that a trace of them convicts.

A fault is a `gradtrace.testing.mutators.Fault`, the same words as for synthetic traces. `plant`
replaces methods of an engine before gradtrace wraps it, so that gradtrace sees the fault as
DeepSpeed's own behaviour. What a fault changed is told by the `Strike`s that it leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gradtrace.testing import mutators
from gradtrace.testing.mutators import Fault, Hop
from gradtrace.testing.planted import Planted, replace_method, start_clock
from gradtrace.testing.sites import Live, Site, Stretch, site_of
from gradtrace.testing.specials import SPECIAL
from gradtrace.trace.dtypes import Float64

# These need no knowledge of the hop but a factor, which `mutators` cannot know of a synthetic run.
_FACTORS: Final = ("not_unscaled", "wrong_clip")
_SUMS: Final = ("accumulate_local", "accumulate")  # hops that add to what they held
_WEIGHTS: Final = ("update", "publish")
_OF_THE_STEP: Final = ("master", "unscale_clip", *_WEIGHTS)


def keep_last_micro_step_only(engine: Any) -> None:
    """Make ZeRO-1/2 forget, at every reduction, what was accumulated before it.

    The fault of DeepSpeed issue 7718 and open-instruct PR 1498: the accumulation buffer is replaced
    by the newest reduced micro-step instead of added to.
    """
    optimizer = engine.optimizer
    original = optimizer.independent_gradient_partition_epilogue

    def epilogue(*args: Any, **kwargs: Any) -> Any:
        for name in ("all_grad_tensors", "averaged_gradients"):
            buffers = getattr(optimizer, name, {})
            for group in buffers:
                buffers[group] = None
        return original(*args, **kwargs)

    optimizer.independent_gradient_partition_epilogue = epilogue


def plant(engine: Any, *faults: Fault, report: Path | None = None) -> Planted:
    """Plant faults into an engine that gradtrace has not wrapped yet; they stay for its lifetime.

    Args:
        engine: from ``deepspeed.initialize``, any ZeRO stage.
        faults: what goes wrong, and where; ``micro_step`` is not looked at for `master`,
            `unscale_clip`, `update` and `publish`. What `publish` strikes are the weights that
            ``step`` begins with.
        report: directory into which each rank writes its `Strike`s as JSON.

    Raises:
        LookupError: the engine's optimizer has no such hop.
    """
    names = {id(param): name for name, param in engine.module.named_parameters()}
    live = Live(engine, engine.optimizer, names)
    planted = Planted(live, start_clock(engine), torch.distributed.get_rank(), report=report)
    for fault in faults:
        special = SPECIAL.get((fault.law, fault.kind))
        if special is not None:
            special(planted, fault)
        elif fault.law == "accumulate_local" and site_of(live, fault.law) is None:
            _Spoiler(planted, fault, None).watch_parameters()
        else:
            site = site_of(live, fault.law)
            if site is None:
                raise LookupError(f"{type(live.optimizer).__name__} has no hop {fault.law}")
            _Spoiler(planted, fault, site).install()
    return planted


def override_loss_scale(engine: Any, scale: float) -> None:
    """Train with a fixed loss scale in any dtype, by DeepSpeed's own call for it."""
    engine.optimizer.override_loss_scale(scale)


class _Spoiler:
    """Let one fault strike the results of one hop.

    Args:
        planted: the engine, the clock, and where strikes are noted.
        fault: what goes wrong.
        site: where the hop's results lie; ``None`` for the gradients of the parameters themselves.
    """

    def __init__(self, planted: Planted, fault: Fault, site: Site | None) -> None:
        self._planted = planted
        self._fault = fault
        self._site = site
        self._own: dict[str, Float64] = {}
        self._began: dict[tuple[str, int], Float64] = {}  # the weights before the step
        self._contributed: dict[tuple[str, int], Float64] = {}
        self._parts: dict[tuple[str, int], list[Float64]] = {}
        # The latest result, with its step and micro-step.
        self._last: dict[tuple[str, int], tuple[int, int, Float64]] = {}
        self._kept: dict[
            tuple[str, int], Float64
        ] = {}  # the result that the step before ended with

    def install(self) -> None:
        """Replace the site's method, and watch what an accumulation adds."""
        assert self._site is not None
        live = self._planted.live
        if self._site.law == "accumulate_local":
            self._watch_gradients()
        if self._site.law == "accumulate":
            self._watch_reductions()
        owner = {
            "optimizer": live.optimizer,
            "engine": live.engine,
            "base": getattr(live.optimizer, "optimizer", live.optimizer),
        }.get(self._site.owner)
        if owner is None:
            owner = _module_of(live.optimizer)
        self._bind = replace_method(owner, self._site.method, self._around)

    def watch_parameters(self) -> None:
        """Strike ``param.grad`` itself, once every parameter has its gradient of a micro-step."""
        self._watch_gradients()
        waiting: list[Stretch] = []
        live = self._planted.live
        everyone = [p for p in live.engine.module.parameters() if p.requires_grad]

        def seen(param: Any) -> None:
            reduced = getattr(live.optimizer, "get_gradient_for_reduction", None)
            gradient = param.grad if reduced is None else reduced(param)
            waiting.append(Stretch(live.name(param), 0, gradient.view(-1)))
            if len(waiting) == len(everyone):
                self._strike(waiting)
                waiting.clear()

        for param in everyone:
            param.register_post_accumulate_grad_hook(seen)

    def _watch_gradients(self) -> None:
        live = self._planted.live
        for param in live.engine.module.parameters():
            if param.requires_grad:

                def seen(gradient: torch.Tensor, name: str = live.name(param)) -> None:
                    self._contributed[name, 0] = _widened(gradient.reshape(-1))

                param.register_hook(seen)

    def _watch_reductions(self) -> None:
        live = self._planted.live
        site = site_of(live, "reduce")
        assert site is not None

        def around(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for stretch in site.stretches(live, {**bind(args, kwargs), "result": result}):
                self._contributed[stretch.name, stretch.start] = _widened(stretch.values)
            return result

        bind = replace_method(live.optimizer, site.method, around)

    def _around(self, original: Any, args: Any, kwargs: Any) -> Any:
        site, live = self._site, self._planted.live
        assert site is not None
        call = self._bind(args, kwargs)
        if site.entered is not None:
            self._enter(site.entered(live, call))
        if site.when == "before":
            self._strike(site.stretches(live, call))
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        self._strike(site.stretches(live, {**call, "result": result}))
        return result

    def _enter(self, stretches: Iterable[Stretch]) -> None:
        """Keep what this rank puts into a reduction; leave it out if that is the fault."""
        fault, planted = self._fault, self._planted
        missing = fault.kind == "rank_missing" and planted.rank == int(fault.amount)
        for stretch in stretches:
            if fault.law in _WEIGHTS:
                self._began[stretch.name, stretch.start] = _widened(stretch.values)
                continue
            own = self._own[stretch.name] = _widened(stretch.values)
            if missing and self._strikes_now() and fault.param in (None, stretch.name):
                stretch.values.zero_()
                planted.struck(fault, stretch, own, np.zeros_like(own))

    def _strikes_now(self) -> bool:
        fault, clock = self._fault, self._planted.clock
        micro_step = None if fault.law in _OF_THE_STEP else clock.micro_step
        # A rank that is left out spoils the result of all; ``rank`` then says nothing of it.
        rank = fault.rank if fault.kind == "rank_missing" else self._planted.rank
        return fault.strikes(fault.law, clock.step, micro_step, rank)

    def _strike(self, stretches: Iterable[Stretch]) -> None:
        fault, step = self._fault, self._planted.clock.step
        results = {stretch.name: (stretch, _widened(stretch.values)) for stretch in stretches}
        spoiled: dict[str, Float64] = {}
        for name, (stretch, values) in results.items():
            key = (name, stretch.start)
            last = self._last.get(key)
            if last is not None and last[0] != step:
                self._kept[key] = last[2]
            if last is None or last[0] != step:
                self._parts[key] = []
            now = self._contributed.get(key, values)
            self._parts[key].append(now)
            chosen = fault.param in (None, name) and fault.kind != "rank_missing"
            if not chosen or not self._strikes_now():
                continue
            peers: Mapping[str, Float64] = {
                other: theirs
                for other, (_, theirs) in sorted(results.items())
                if other != name and theirs.size == values.size
            }
            if not peers:
                peers = self._earlier(name, values.size)
            spoiled[name] = self._spoil(key, values, now, peers)
            twin = next(iter(peers), name)
            if fault.kind == "swapped" and fault.param is not None and twin in results:
                spoiled[twin] = values
        for name, (stretch, values) in results.items():
            if name in spoiled:
                stretch.values.copy_(torch.from_numpy(spoiled[name]))
                self._planted.struck(fault, stretch, values, _widened(stretch.values))
            left = _widened(stretch.values)
            self._last[name, stretch.start] = (step, self._planted.clock.micro_step, left)

    def _earlier(self, name: str, size: int) -> Mapping[str, Float64]:
        """Return other parameters' results of now, where each comes in a call of its own."""
        now = (self._planted.clock.step, self._planted.clock.micro_step)
        latest = sorted(self._last.items(), key=lambda item: item[0])
        return {
            other: values
            for (other, _), (*when, values) in latest
            if other != name and values.size == size and tuple(when) == now
        }

    def _spoil(
        self, key: tuple[str, int], values: Float64, now: Float64, peers: Mapping[str, Float64]
    ) -> Float64:
        fault = self._fault
        if fault.kind in _FACTORS:
            return values * fault.amount
        zeros = np.zeros_like(values)
        if fault.kind == "lost_micro_step":
            parts = enumerate(self._parts[key])
            return sum((part for at, part in parts if at != int(fault.amount)), start=zeros)
        if fault.law in _WEIGHTS:
            return mutators.apply(fault, self._weights(key, values, peers))
        last = self._last.get(key)
        kept = self._kept.get(key, zeros)
        fresh = last is None or last[0] != self._planted.clock.step
        earlier = zeros if fresh or last is None else last[2]
        own = self._own.get(key[0])
        hop = Hop(
            values=values,
            now=now,
            carry=earlier if fault.law in _SUMS else zeros,
            before=kept if fresh else earlier,
            last_step=kept,
            own=values if own is None else own[key[1] : key[1] + values.size],
            ranks=(values,),
            world_size=torch.distributed.get_world_size(),
            peers=peers,
        )
        return mutators.apply(fault, hop)

    def _weights(self, key: tuple[str, int], values: Float64, peers: Mapping[str, Float64]) -> Hop:
        """Return weights as a hop: an optimizer adds a change to what they were."""
        began = self._began[key]
        adds = self._fault.law == "update"
        return Hop(
            values=values,
            now=values - began if adds else values,
            carry=began if adds else np.zeros_like(values),
            before=began,
            last_step=began,
            own=began,
            ranks=(values,),
            world_size=torch.distributed.get_world_size(),
            peers=peers,
        )


def _module_of(thing: Any) -> Any:
    return sys.modules[type(thing).__module__]


def _widened(values: torch.Tensor) -> Float64:
    """Return a copy in float64."""
    result: Float64 = values.detach().to(torch.float64).numpy().copy()
    return result
