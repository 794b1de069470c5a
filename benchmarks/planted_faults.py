"""Plant faults into live DeepSpeed runs and score what `gradtrace audit` says of them.

    python benchmarks/planted_faults.py [--seed N] [--faults N] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.real import planting


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    number = 0
    bad = causes = total = 0
    start = time.time()
    for name in planting.SETUPS:
        for at, kind in enumerate(planting.possible(name)):
            if only and only not in f"{name} {kind.hop} {kind.kind}":
                continue
            rng = np.random.default_rng([seed, hash_of(name), at])
            one = planting.draw(rng, number, name, kind)
            number += 1
            with tempfile.TemporaryDirectory() as directory:
                try:
                    score = planting.run(one, Path(directory))
                except Exception as error:
                    print("ERROR", one.title, repr(error)[-3000:], error.__cause__)
                    continue
            total += 1
            bad += bool(score.wrong)
            causes += score.cause
            mark = "ok " if not score.wrong and score.cause else "BAD"
            first = score.findings[0] if score.findings else None
            print(mark, one.title, "| want", kind.cause, "| got", first and first.cause, flush=True)
            if mark == "BAD":
                print("     ", "; ".join(score.wrong), flush=True)
                print("     ", first and (first.detail, first.param, first.folded), flush=True)
                print("     struck", {k: round(v,1) for k,v in score.struck.items()}, "visible", planting.visible(score))
    print(total, "wrong", bad, "causes right", causes, time.time() - start)


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31


main()
