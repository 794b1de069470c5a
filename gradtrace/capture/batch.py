"""Describe the batch given to a forward pass: shapes, dtypes and hashes, never values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import xxhash

from gradtrace.capture.digest import hashable, value_hash
from gradtrace.capture.snapshot import dtype_name, pending
from gradtrace.trace.digest import hash_text

MOST: Final = 1000  # tensors and other values that are described; past them, ``truncated``
_DEEPEST: Final = 16
_NAME: Final = 200


def describe_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an `input` record; hashes are computed where the tensors are.

    Args:
        args, kwargs: as given to ``engine.forward``: tensors, and any nesting of sequences, mappings
            (such as transformers' BatchEncoding) and dataclasses. Nothing is modified or kept.
    """
    tensors: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    truncated = False
    roots = [(f"args[{at}]", value) for at, value in enumerate(args)] + list(kwargs.items())
    for name, value in (leaf for root in roots for leaf in _leaves(*root, _DEEPEST)):
        if len(tensors) + len(others) >= MOST:
            truncated = True
            break
        if isinstance(value, torch.Tensor):
            tensors.append(describe_tensor(name, value))
        else:
            others.append({"name": name[:_NAME], **_other(value)})
    return {"tensors": tensors, "others": others, "truncated": truncated}


def _leaves(name: str, value: Any, left: int) -> Iterator[tuple[str, Any]]:
    children: Iterator[tuple[str, Any]] | None = None
    if isinstance(value, Mapping):
        children = ((f"{name}.{key}", entry) for key, entry in value.items())
    elif isinstance(value, (list, tuple)):
        children = ((f"{name}[{at}]", entry) for at, entry in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        children = ((f"{name}.{f.name}", getattr(value, f.name, None)) for f in fields)
    if children is None or left == 0:
        yield name, value
        return
    for child, entry in children:
        yield from _leaves(child, entry, left - 1)


def describe_tensor(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return name, shape and dtype of a tensor, and its hash, computed where it is."""
    mixed = None
    if hashable(tensor):
        mixed = pending((value_hash(tensor),), lambda held: hash_text(int(held[0])))
    return {
        "name": name[:_NAME],
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "hash": mixed,
    }


def _other(value: Any) -> dict[str, Any]:
    """Describe what is no tensor by its type, and a number or a string by its hash too."""
    kind = type(value).__name__
    mixed = None
    if type(value) in (bool, int, float, complex, str, bytes):
        mixed = xxhash.xxh3_64_hexdigest(f"{kind}:{value!r}".encode("utf-8", "backslashreplace"))
    return {"type": kind[:_NAME], "hash": mixed}
