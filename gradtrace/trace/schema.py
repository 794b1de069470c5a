"""Fix the bytes of format version 1: sealed JSON, chained lines, names (docs/format.md).

Two kinds of sealed text exist, and both are checked byte by byte, so that no change goes unseen:

- a *sealed file* (manifest.json, header.json) is indented JSON whose last member is the XXH3-64 of
  every byte before it;
- a *chained line* (index segments) is compact JSON whose last member is a CRC-32 that continues from
  the line before.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import xxhash

from gradtrace.errors import DamagedTraceError

FORMAT: Final = "gradtrace.trace"
RANK_FORMAT: Final = "gradtrace.rank"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
HEADER: Final = "header.json"
TEMPORARY: Final = ".tmp"  # suffix of files that are not sealed yet

_SEAL_HEAD: Final = b',\n "xxh3": "'
_SEAL_TAIL: Final = b'"\n}\n'
_SEAL_SIZE: Final = len(_SEAL_HEAD) + 16 + len(_SEAL_TAIL)
_LINE_HEAD: Final = b',"crc":"'
_LINE_TAIL: Final = b'"}'
_LINE_SIZE: Final = len(_LINE_HEAD) + 8 + len(_LINE_TAIL)
MAX_JSON_BYTES: Final = 256 * 1024 * 1024
MAX_DEPTH: Final = 64

_NON_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def rank_dir(rank: int) -> str:
    """Return the directory name of a rank."""
    return f"rank-{rank:05d}"


def segment_name(number: int) -> str:
    """Return the file name of an index segment."""
    return f"index-{number:06d}.jsonl"


def shard_name(number: int) -> str:
    """Return the file name of a tensor shard."""
    return f"{number:06d}.safetensors"


def encode_float(value: float) -> float | str:
    """Write a float as JSON can hold it: non-finite values become ``NaN``, ``Infinity`` strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def decode_float(value: Any) -> float | None:
    """Read what `encode_float` wrote; ``None`` stays ``None``.

    Raises:
        ValueError: the value is no number.
    """
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"not a number: {value[:40]!r}")
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"not a number: {type(value).__name__}")
    return float(value)


def seal_file(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sealed file with this body."""
    text = json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode("ascii")
    head = text[: -len(b"\n}")]
    return head + _SEAL_HEAD + xxhash.xxh3_64_hexdigest(head).encode() + _SEAL_TAIL


def unseal_file(data: bytes, where: str) -> dict[str, Any]:
    """Return the body of a sealed file.

    Raises:
        DamagedTraceError: a byte was altered or lost, or the text is not such a file.
    """
    if len(data) > MAX_JSON_BYTES:
        _damaged(f"{len(data)} bytes of JSON", where, f"at most {MAX_JSON_BYTES}")
    head, seal = data[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    digest = xxhash.xxh3_64_hexdigest(head).encode()
    if seal != _SEAL_HEAD + digest + _SEAL_TAIL:
        _damaged("a checksum that does not match", where, "the bytes that were sealed")
    return parse_object(head + b"\n}", where)


def seal_line(body: Mapping[str, Any], crc: int) -> tuple[bytes, int]:
    """Return one chained line, newline included, and the CRC that the next one continues from."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode("ascii")
    crc = zlib.crc32(text, crc)
    return text[:-1] + _LINE_HEAD + f"{crc:08x}".encode() + _LINE_TAIL + b"\n", crc


def unseal_line(line: bytes, crc: int, where: str) -> tuple[dict[str, Any], int]:
    """Return the body of one chained line (without its newline) and the next CRC.

    Raises:
        DamagedTraceError: the chain is broken here.
    """
    text = line[:-_LINE_SIZE] + b"}"
    crc = zlib.crc32(text, crc)
    if line[-_LINE_SIZE:] != _LINE_HEAD + f"{crc:08x}".encode() + _LINE_TAIL:
        _damaged("a line that breaks the checksum chain", where, "the lines that were sealed")
    return parse_object(text, where), crc


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object strictly: no duplicate keys, no NaN, bounded depth.

    Raises:
        DamagedTraceError: it is not such an object.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_constant,
            parse_int=_small_int,
            parse_float=_finite_float,
        )
        _check_depth(value, MAX_DEPTH)
    except (ValueError, RecursionError) as error:
        _damaged(f"text that is not JSON ({str(error)[:80]})", where, "strict JSON")
    if not isinstance(value, dict):
        _damaged("JSON that is not an object", where, "an object")
    return value


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError("nested too deeply")
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    for child in children:
        _check_depth(child, left - 1)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _small_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("an integer of more than 20 digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number beyond float64")
    return value


def _damaged(found: str, where: str, expected: str) -> NoReturn:
    raise DamagedTraceError(
        found,
        where=where,
        expected=expected,
        remedy="Copy the trace again from where it was written, or record it again.",
    )
