"""Patches: everything is put back, and what others put on top is left alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from gradtrace.capture.patching import Patches


class Owner:
    def method(self, value: int) -> int:
        return value + 1


def _twice(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return 2 * original(*args, **kwargs)


def test_wrapping_and_restoring_a_class_method() -> None:
    owner = Owner()
    patches = Patches()
    patches.wrap(owner, "method", _twice)
    patches.wrap(owner, "method", _twice)
    assert owner.method(1) == 8
    assert patches.restore() == []
    assert owner.method(1) == 2
    assert "method" not in vars(owner)


def test_an_attribute_of_the_instance_is_put_back_as_it_was() -> None:
    owner = Owner()
    mine = owner.method
    owner.method = mine  # type: ignore[method-assign]
    patches = Patches()
    patches.wrap(owner, "method", _twice)
    patches.restore()
    assert vars(owner)["method"] is mine


def test_what_somebody_else_put_on_top_stays() -> None:
    owner = Owner()
    patches = Patches()
    patches.wrap(owner, "method", _twice)
    inner = owner.method
    owner.method = lambda value: inner(value) + 100  # type: ignore[method-assign]
    assert patches.restore() == ["method"]
    assert owner.method(1) == 104
