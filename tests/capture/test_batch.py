"""What is said of a batch: names, shapes, dtypes and hashes, and nothing is consumed or kept."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gradtrace.capture.batch import MOST, describe_batch  # noqa: E402
from gradtrace.capture.snapshot import resolve  # noqa: E402
from gradtrace.trace.facts import fault_of_record  # noqa: E402


def described(*args: Any, **kwargs: Any) -> dict[str, Any]:
    facts: dict[str, Any] = resolve(describe_batch(args, kwargs))
    assert fault_of_record("input", facts) is None
    return facts


@dataclasses.dataclass
class Packed:
    ids: torch.Tensor
    length: int


class Encoding(collections.UserDict[str, Any]):
    """Stand for transformers' BatchEncoding, which is such a mapping."""


def test_tensors_are_found_wherever_they_are_nested() -> None:
    x = torch.arange(6).reshape(2, 3)
    facts = described(x, [x, {"a": (x,)}], batch=Encoding(ids=x), packed=Packed(x, 3))
    names = [entry["name"] for entry in facts["tensors"]]
    assert names == ["args[0]", "args[1][0]", "args[1][1].a[0]", "batch.ids", "packed.ids"]
    assert len({entry["hash"] for entry in facts["tensors"]}) == 1
    assert {(tuple(e["shape"]), e["dtype"]) for e in facts["tensors"]} == {((2, 3), "int64")}
    assert [(e["name"], e["type"]) for e in facts["others"]] == [("packed.length", "int")]


def test_values_order_and_bits_tell_batches_apart() -> None:
    x = torch.tensor([1.0, 2.0, 0.0])

    def mixed(tensor: torch.Tensor) -> str:
        found: str = described(tensor)["tensors"][0]["hash"]
        return found

    assert mixed(x) == mixed(x.clone())
    assert mixed(x) != mixed(x.flip(0))
    assert mixed(x) != mixed(torch.tensor([1.0, 2.0, -0.0]))


def test_numbers_and_strings_have_hashes_and_other_objects_only_a_type() -> None:
    facts = described(1, 1.0, True, "1", None, object(), use_cache=False)
    hashes = [entry["hash"] for entry in facts["others"]]
    assert len(set(hashes[:4])) == 4
    assert hashes[4:6] == [None, None]
    assert hashes[6] is not None
    assert [entry["type"] for entry in facts["others"]] == [
        "int", "float", "bool", "str", "NoneType", "object", "bool",
    ]  # fmt: skip
    assert described("\ud800")["others"][0]["hash"]  # what no encoding can write


def test_a_generator_is_not_consumed_and_a_cycle_ends() -> None:
    numbers = iter([1, 2])
    knot: list[Any] = []
    knot.append(knot)
    facts = described(numbers, knot)
    assert [entry["type"] for entry in facts["others"]] == ["list_iterator", "list"]
    assert list(numbers) == [1, 2]


def test_a_huge_batch_is_cut_short_and_says_so() -> None:
    facts = described(list(range(2 * MOST)))
    assert (len(facts["others"]), facts["truncated"]) == (MOST, True)


def test_tensors_that_may_communicate_are_described_without_a_hash() -> None:
    class Odd(torch.Tensor):
        pass

    facts = described(torch.ones(2).as_subclass(Odd))
    assert facts["tensors"] == [{"name": "args[0]", "shape": [2], "dtype": "float32", "hash": None}]
