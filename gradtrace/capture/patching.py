"""Replace methods of live objects, and put everything back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def add_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Look at a tensor's gradient as autograd computes it; the hook changes nothing."""
    return tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def add_accumulated_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Learn that a backward pass accumulated into a leaf's ``grad``; the hook changes nothing."""
    return tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class Patches:
    """Hold what was replaced, so that `restore` can undo it in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, bool, Any]] = []
        self._handles: list[Any] = []

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """Replace ``owner.name`` on the instance by ``around(original, args, kwargs)``."""
        original = getattr(owner, name)
        had = name in vars(owner)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, args, kwargs)

        object.__setattr__(owner, name, replacement)
        self._undo.append((owner, name, original, had, replacement))

    def keep_handle(self, handle: Any) -> None:
        """Remember a torch hook handle, to remove it with the rest."""
        self._handles.append(handle)

    def restore(self) -> list[str]:
        """Undo every replacement that is still ours.

        Returns:
            The names that somebody else replaced after us; those stay as they are, and our wrapper
            inside them passes straight through.
        """
        foreign: list[str] = []
        for owner, name, original, had, replacement in reversed(self._undo):
            if vars(owner).get(name) is not replacement:
                foreign.append(name)
            elif had:
                object.__setattr__(owner, name, original)
            else:
                object.__delattr__(owner, name)
        for handle in self._handles:
            handle.remove()
        self._undo.clear()
        self._handles.clear()
        return foreign
