"""Watch backward passes begin and end, and measure the seed at the caller's loss.

A backward pass is one call of ``engine.backward``, or one autograd run that starts at an output of
``engine.forward`` when the caller calls ``loss.backward()`` himself. DeepSpeed divides by the
accumulation steps in different places in the two cases (0.19.8, runtime/engine.py:3413 and the hook
at 3177), so the factor across every forward-output hook is measured, not believed.

Up to 0.18.2 DeepSpeed knows the first kind alone: a ``loss.backward()`` of the caller's leaves out what
the engine does around a backward pass. There it is no micro-step, but a gap in the trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from gradtrace.capture.adapters import select
from gradtrace.capture.adapters.declare import Model, optimizer_boundary
from gradtrace.capture.clock import StepClock
from gradtrace.capture.patching import Patches, add_accumulated_hook, add_hook

ENGINE_PATH: Final = "engine.backward"
TENSOR_PATH: Final = "tensor.backward"
_RESOLVED: Final = 1e-30  # below it, gradients may be subnormal, and ratios of them mean little


class Guard(Protocol):
    """Make a context that keeps exceptions of the observer out of the training."""

    def __call__(self, point: str | None, unit: str | None = None) -> Any:
        """Return the context."""
        ...


@dataclass(slots=True)
class _Output:
    """Hold what is seen of one output tensor's gradient, on both sides of DeepSpeed's hook.

    Attributes:
        tensor: the output, weakly.
        version: counts the changes that were made to it in place.
        above: outputs that were computed from this one: their gradients come through here.
    """

    tensor: weakref.ref[torch.Tensor]
    version: int
    scalar: bool
    value: torch.Tensor | None
    above: list[_Output] = field(default_factory=list)
    factor: torch.Tensor | None = None
    index: torch.Tensor | None = None
    before: torch.Tensor | None = None


class BackwardWatch:
    """Drive the clock's micro-steps.

    Args:
        model: the engine and its optimizer.
        clock: told of every backward pass, recorded or not.
        on_forward: called before a forward pass that autograd records; returns facts of its batch.
        on_begin: called when one begins.
        on_end: called with the facts of the `loss` record, and with those of the batches of the forward
            passes whose outputs a gradient came to, in the order of these passes.
        on_failure: called when one raised; the exception goes on.
        on_bypass: called when gradients were accumulated by a backward pass that the engine cannot see.
        recording: whether this step is recorded.
        guard: see `Guard`.
    """

    def __init__(
        self,
        model: Model,
        clock: StepClock,
        *,
        on_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], Mapping[str, Any] | None],
        on_begin: Callable[[], None],
        on_end: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], None],
        on_failure: Callable[[BaseException], None],
        on_bypass: Callable[[], None],
        recording: Callable[[], bool],
        guard: Guard,
    ) -> None:
        self._model = model
        self._clock = clock
        self._on_forward = on_forward
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_failure = on_failure
        self._on_bypass = on_bypass
        self._recording = recording
        self._guard = guard
        self._path: str | None = None
        self._task = -1
        self._facts: dict[str, Any] = {}
        self._factors: list[tuple[_Output, torch.Tensor, torch.dtype]] = []
        self._pending: dict[int, _Output] = {}
        self._outputs: dict[int, _Output] = {}
        self._batch: Mapping[str, Any] | None = None  # of the forward pass that is running
        self._forwards = 0
        self._reached: dict[int, Mapping[str, Any]] = {}  # forward passes that a gradient came to
        self._scaled: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._backward_signature = select.signature_of(model.engine.backward)

    def install(self, patches: Patches) -> None:
        """Replace the engine's methods that begin and end a backward pass."""
        engine = self._model.engine
        patches.wrap(engine, "backward", self._around_backward)
        patches.wrap(engine, "forward", self._around_forward)
        if select.begins_at_tensors(engine):
            patches.wrap(engine, "_backward_epilogue", self._around_epilogue)
            patches.wrap(engine, "_backward_prologue", self._around_prologue)
            patches.wrap(engine, "scale", self._around_scale)
        else:
            for parameter in self._model.parameters:
                if parameter.requires_grad:
                    patches.keep_handle(add_accumulated_hook(parameter, self._accumulated_hook))
        patches.keep_handle(engine.module.register_forward_hook(self._module_hook))

    # --- begin and end -------------------------------------------------------------------------

    def _begin(self, path: str, scale_wrt_gas: bool | None) -> None:
        self._clock.begin_backward()
        self._path = path
        self._factors = []
        self._on_begin()
        if not self._recording():
            return
        with self._guard("loss"):
            engine = self._model.engine
            self._facts = {
                "path": path,
                "loss": None,
                "loss_grad": None,
                "loss_scale": select.loss_scale(self._model),
                "gas": int(engine.gradient_accumulation_steps()),
                "scale_wrt_gas": scale_wrt_gas,
                "boundary": bool(engine.is_gradient_accumulation_boundary()),
                "engine_micro_steps": int(engine.micro_steps),
            }

    def _finish(self) -> None:
        self._clock.end_backward()
        self._path = None
        if self._recording():
            with self._guard("loss"):
                batches = [batch for _, batch in sorted(self._reached.items())]
                self._on_end(self._complete(), batches)
        self._reached = {}
        self._factors = []
        self._scaled = None
        self._forget_outputs()

    def _forget_outputs(self) -> None:
        """Drop what is known of outputs that are gone."""
        alive = (item for item in self._outputs.items() if item[1].tensor() is not None)
        self._outputs = dict(alive)

    def _complete(self) -> dict[str, Any]:
        facts = dict(self._facts)
        for seen, after, _ in self._factors:
            seen.factor = _ratio(after, seen.before)
        # Where one output was computed from another, the hooks' factors multiply.
        factors = [_through(seen) for seen, _, _ in self._factors]
        scalars = [seen for seen, _, _ in self._factors if seen.scalar]
        own = facts.pop("output", None)
        if own is not None:
            # The caller's loss is an output itself: a hook of ours on it runs after DeepSpeed's.
            facts["loss_grad"] = own.before
        if facts["path"] == TENSOR_PATH:
            if self._scaled is not None and self._scaled[1]:
                facts.update(loss=self._scaled[0], loss_grad=self._scaled[1][0])
            elif len(scalars) == 1:
                facts.update(loss=scalars[0].value, loss_grad=scalars[0].before)
        grad = facts["loss_grad"]
        facts["seed"] = None if grad is None else grad * (factors[0] if factors else 1.0)
        facts["output_factors"] = factors
        facts["output_dtypes"] = [
            str(dtype).removeprefix("torch.") for _, _, dtype in self._factors
        ]
        facts["optimizer_boundary"] = optimizer_boundary(self._model)
        return facts

    def _around_backward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._path is not None and self._path == ENGINE_PATH:
            return original(*args, **kwargs)  # an engine that calls its own backward again
        if self._path == TENSOR_PATH:
            self._abandon(_never_ended())
        asked = self._asked(args, kwargs)
        divides = select.divides_by_steps(self._model.engine, asked.get("scale_wrt_gas"))
        self._begin(ENGINE_PATH, divides)
        handle = self._hook_loss(asked.get("loss"))
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            if handle is not None:
                handle.remove()
        self._finish()
        return result

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return what backward was called with; a call that does not fit is the original's to refuse."""
        try:
            bound = self._backward_signature.bind_partial(*args, **kwargs)
        except TypeError:
            return kwargs
        bound.apply_defaults()
        return bound.arguments

    def _abandon(self, error: BaseException) -> None:
        self._clock.end_backward()
        self._path = None
        self._factors = []
        self._reached = {}
        if self._recording():
            with self._guard("loss"):
                self._on_failure(error)

    def _accumulated_hook(self, parameter: torch.Tensor) -> None:
        # Only a backward pass accumulates; torch.autograd.grad() does not come here.
        if self._path is None and self._recording():
            self._on_bypass()

    def _hook_loss(self, loss: Any) -> Any:
        handle = None
        if not self._recording() or not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return handle
        with self._guard("loss"):
            self._facts["loss"] = loss.detach().clone()
            facts = self._facts
            output = self._outputs.get(id(loss))
            # Changed in place it is another tensor for autograd (Trainer multiplies its loss so), and
            # hooks of before the change are given the gradient of what it was.
            if output is not None and output.tensor() is loss and output.version == loss._version:
                facts["output"] = output
                return handle

            def hook(gradient: torch.Tensor) -> None:
                facts["loss_grad"] = gradient.detach().to(torch.float64)

            handle = add_hook(loss, hook)
        return handle  # noqa: RET504  the guard may have swallowed an exception

    def _around_prologue(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        task = torch._C._current_graph_task_id()
        if self._path == TENSOR_PATH and task != self._task:
            self._abandon(_never_ended())
        if self._path is None:
            self._task = task
            self._begin(TENSOR_PATH, None)
        return original(*args, **kwargs)

    def _around_epilogue(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = original(*args, **kwargs)
        if self._path == TENSOR_PATH:
            self._finish()
        return result

    # --- factors across the forward-output hooks -----------------------------------------------

    def _around_scale(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        loss = args[0] if args else kwargs.get("loss")
        if self._recording() and isinstance(loss, torch.Tensor) and loss.requires_grad:
            with self._guard("loss"):
                arrived: list[torch.Tensor] = []
                add_hook(loss, lambda g: arrived.append(g.detach().to(torch.float64)))
                self._scaled = (loss.detach().clone(), arrived)
        return original(*args, **kwargs)

    def _module_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        if not self._recording():
            return
        with self._guard("loss"):
            self._pending = {}
            tensors = list({id(tensor): tensor for tensor in _tensors(outputs)}.values())
            for tensor in tensors:
                scalar = tensor.numel() == 1
                value = tensor.detach().clone() if scalar else None
                seen = _Output(weakref.ref(tensor), tensor._version, scalar, value)
                self._pending[id(tensor)] = seen
                add_hook(tensor, _before_hook(seen))
                if self._batch is not None:
                    add_hook(tensor, self._reached_hook(self._forwards, self._batch))
            _link(tensors, self._pending)
            self._forget_outputs()
            self._outputs.update(self._pending)

    def _around_forward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._batch = None
        if self._recording() and torch.is_grad_enabled():
            self._forwards += 1
            self._batch = self._on_forward(args, kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            self._batch = None
        if self._recording():
            with self._guard("loss"):
                for tensor in _tensors(result):
                    seen = self._pending.get(id(tensor))
                    if seen is not None:
                        add_hook(tensor, self._after_hook(seen))
        self._pending = {}
        return result

    def _reached_hook(
        self, number: int, batch: Mapping[str, Any]
    ) -> Callable[[torch.Tensor], None]:
        """Note that a forward pass is trained on: evaluation is not of the trace."""

        def hook(_: torch.Tensor) -> None:
            self._reached[number] = batch

        return hook

    def _after_hook(self, seen: _Output) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if seen.index is not None and self._recording():
                flat = gradient.detach().reshape(-1)
                after = flat.gather(0, seen.index).to(torch.float64).squeeze(0)
                self._factors.append((seen, after, gradient.dtype))

        return hook


def _never_ended() -> RuntimeError:
    return RuntimeError("the backward pass before this one never came to its end")


def _before_hook(seen: _Output) -> Callable[[torch.Tensor], None]:
    """Look at the gradient's largest element before DeepSpeed's own hook may scale it."""

    def hook(gradient: torch.Tensor) -> None:
        flat = gradient.detach().reshape(-1)
        if flat.numel():
            seen.index = flat.abs().argmax().unsqueeze(0)
            seen.before = flat.gather(0, seen.index).to(torch.float64).squeeze(0)

    return hook


def _ratio(after: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return the factor between two sides of a hook; NaN, which states nothing, for tiny gradients."""
    assert before is not None
    return torch.where(before.abs() < _RESOLVED, torch.nan, after / before)


def _through(seen: _Output) -> torch.Tensor:
    """Return the factor of an output's own hook and of those that its gradient came through."""
    assert seen.factor is not None
    product = seen.factor
    for other in seen.above:
        if other.factor is not None:
            product = product * other.factor
    return product


def _link(tensors: list[torch.Tensor], seen: Mapping[int, _Output]) -> None:
    """Find which outputs were computed from which others, by walking the autograd graph.

    DeepSpeed (0.18.3 to 0.19.8) puts its hook on every output, so that a loss computed from logits
    that are returned too has its gradient divided twice.
    """
    nodes = {tensor.grad_fn: seen[id(tensor)] for tensor in tensors}
    if len(nodes) < 2:
        return
    direct: dict[int, list[_Output]] = {id(output): [] for output in nodes.values()}
    for start, output in nodes.items():
        visited = {start}
        waiting = [start]
        while waiting:
            node = waiting.pop()
            for below, _ in () if node is None else node.next_functions:
                if below is None or below in visited:
                    continue
                visited.add(below)
                if below in nodes:  # what lies further down is reached from there
                    direct[id(nodes[below])].append(output)
                else:
                    waiting.append(below)
    for output in nodes.values():
        found: dict[int, _Output] = {}
        pending = list(direct[id(output)])
        while pending:
            other = pending.pop()
            if id(other) not in found:
                found[id(other)] = other
                pending += direct[id(other)]
        output.above = list(found.values())


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs
    elif isinstance(outputs, (tuple, list)):
        for entry in outputs:
            yield from _tensors(entry)
    elif isinstance(outputs, Mapping):
        for entry in outputs.values():
            yield from _tensors(entry)
