"""Read safetensors shards by memory map, after checking every offset and the checksum.

Source: the safetensors format (README of safetensors 0.8, "Format"): a little-endian u64 header
length, a JSON header, then one byte buffer that the tensors tile without holes.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

import xxhash
from numpy.typing import NDArray

from gradtrace.errors import MixedRunsError
from gradtrace.trace import schema, validate
from gradtrace.trace.dtypes import BY_CODE, Dtype, raw_bits
from gradtrace.trace.records import Shard

_BLOCK_BYTES: Final = 16 * 1024 * 1024


class ShardReader:
    """Give the raw bits of the tensors in one sealed shard.

    Args:
        path: the file.
        shard: what the index says of it.
        run_id: the run it must belong to.
        rank: the rank it must belong to.
    """

    def __init__(self, path: Path, shard: Shard, run_id: str, rank: int) -> None:
        self.path = path
        self._shard = shard
        self._run_id = run_id
        self._rank = rank
        self._map: mmap.mmap | None = None
        self._tensors: dict[str, tuple[str, int, int]] = {}

    def bits(self, key: str, dtype: Dtype, numel: int) -> NDArray[Any]:
        """Return the raw bits of one tensor, as unsigned integers; no copy.

        Raises:
            DamagedTraceError: the file is not what was sealed, or holds no such tensor.
        """
        if self._map is None:
            self.check()
        assert self._map is not None
        entry = self._tensors.get(key)
        if entry is None:
            validate.damaged(f"no tensor {key[:40]!r}", str(self.path), "every tensor of the index")
        code, start, end = entry
        if code != dtype.code or end - start != numel * dtype.size_bytes:
            validate.damaged(
                f"tensor {key} as {code}, {end - start} bytes",
                str(self.path),
                f"{dtype.code}, {numel * dtype.size_bytes} bytes",
            )
        return raw_bits(memoryview(self._map)[start:end], dtype)

    def check(self) -> None:
        """Check size, checksum and header against the index.

        Raises:
            DamagedTraceError: any of them differs.
            MixedRunsError: the shard names another run, rank or file.
        """
        if self.path.is_symlink():
            validate.damaged("a symbolic link", str(self.path), "a plain file")
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            validate.damaged(f"a file that cannot be mapped ({error})", str(self.path), "a shard")
        if len(self._map) != self._shard.size_bytes:
            validate.damaged(
                f"{len(self._map)} bytes", str(self.path), f"{self._shard.size_bytes} bytes"
            )
        digest = xxhash.xxh3_64()
        view = memoryview(self._map)
        for start in range(0, len(view), _BLOCK_BYTES):
            digest.update(view[start : start + _BLOCK_BYTES])
        if digest.hexdigest() != self._shard.xxh3:
            validate.damaged("a checksum that does not match", str(self.path), "the bytes sealed")
        self._read_header(view)

    def _read_header(self, view: memoryview) -> None:
        where = str(self.path)
        length = struct.unpack("<Q", view[:8])[0] if len(view) >= 8 else None
        if length is None or length > min(len(view) - 8, schema.MAX_JSON_BYTES):
            validate.damaged("a header longer than the file", where, "a safetensors header")
        body = schema.parse_object(bytes(view[8 : 8 + length]), where)
        about = validate.Fields(body.pop("__metadata__", None), where)
        mine = (about.text("run_id"), about.text("rank"), about.text("shard"))
        if mine != (self._run_id, str(self._rank), self._shard.file):
            raise MixedRunsError(
                f"a shard of {' / '.join(mine)[:80]}",
                where=where,
                expected=f"{self._run_id} / {self._rank} / {self._shard.file}",
                remedy="Keep each run's files in a directory of their own.",
            )
        base, at = 8 + length, 0
        for key, entry in body.items():
            fields = validate.Fields(entry, f"{where}, tensor {key[:40]!r}")
            shape, offsets = fields.counts("shape"), fields.counts("data_offsets")
            dtype = BY_CODE.get(fields.text("dtype"))
            if dtype is None or len(shape) != 1 or len(offsets) != 2:
                validate.damaged("a tensor of another kind", fields.where, "a flat float tensor")
            if offsets[0] != at or offsets[1] - at != shape[0] * dtype.size_bytes:
                validate.damaged(
                    f"offsets {offsets}", fields.where, f"tensors without holes at {at}"
                )
            at = offsets[1]
            self._tensors[key] = (dtype.code, base + offsets[0], base + offsets[1])
        if base + at != len(view):
            validate.damaged(f"{len(view)} bytes", where, f"{base + at} bytes for its tensors")
