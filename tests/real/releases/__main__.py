"""Run the catalog on releases of DeepSpeed, each installed for real, and judge what comes of it.

    python -m tests.real.releases --releases 0.16.9,0.18.2 --install DIR [--entries GLOB ...]

Prints one line for each release and one for each problem; exits with 1 if there is one. ``--results``
keeps what was observed as JSON, from which ``--page`` writes docs/deepspeed-compat.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.real.catalog import ENTRIES
from tests.real.releases import install, judge, page
from tests.real.releases.drift import Sources, drift
from tests.real.releases.observe import TRAINED, Observation

# Every minor line from 0.14, at the releases where what gradtrace reads changed (docs/deepspeed-compat.md
# says what); 0.14.0 to 0.14.2 cannot be imported on a CPU without Intel's extension.
RELEASES = (
    *("0.14.4", "0.14.5", "0.15.0", "0.15.1", "0.15.4", "0.16.0", "0.16.9", "0.17.0", "0.17.5"),
    *("0.17.6", "0.18.0", "0.18.2", "0.18.3", "0.18.5", "0.18.6", "0.18.9"),
    *("0.19.0", "0.19.2", "0.19.3", "0.19.7"),
)
# What every release is tried on by default: each optimizer, what moved between releases, and what the
# table of defects speaks of. The whole catalog on all releases takes hours: --entries '*'.
CORE = (
    "z0-fp32-n4-r2-managed-mlp",
    "z0-bf16-n4-r2-managed-mlp-client=sgd",
    "z0-bf16-n4-r2-managed-mlp-client=fused_sgd",
    "z1-bf16-n4-r2-managed-mlp-data_types={'grad_accum_dtype': 'fp32'}",
    "z1-bf16-n4-r2-by_hand-mlp-data_types={'grad_accum_dtype': 'fp32'}",
    "z1-fp32-n4-r2-managed-mlp-reduce_bucket_size=60",
    "z1-fp32-n4-r2-mixed-mlp",
    "z1-fp16-n4-r2-managed-mlp",
    "z2-fp32-n4-r2-managed-mlp",
    "z2-bf16-n4-r2-managed-mlp-data_types={'grad_accum_dtype': 'fp32'}",
    "z2-bf16-n4-r2-by_hand-mlp-data_types={'grad_accum_dtype': 'fp32'}",
    "z2-fp32-n4-r2-managed-mlp-offload_optimizer={'device': 'cpu'}-client=adamw",
    "z2-fp32-n4-r2-managed-mlp-contiguous_gradients=False",
    "z2-fp32-n4-r2-managed-mlp-torch_autocast={'enabled': True, 'dtype': 'bfloat16'}",
    "z2-fp32-n4-r2-by_hand-mlp",
    "z3-fp32-n4-r2-managed-mlp",
    "z3-fp32-n4-r2-managed-tied",
    "z3-fp16-n4-r2-managed-mlp",
    "z3-fp32-n4-r2-managed-mlp-offload_optimizer={'device': 'cpu'}-client=adamw",
    "z3-fp32-n4-r2-managed-mlp-offload_param={'device': 'cpu'}",
)


def run_release(release: str, directory: Path, entries: Sequence[str]) -> dict[str, Any]:
    """Observe one release in a process of its own.

    Raises:
        RuntimeError: the process ended with an error; its last words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="gradtrace-release-") as scratch:
        out = Path(scratch) / "observed.jsonl"
        command = [sys.executable, "-W", "ignore", "-m", "tests.real.releases.observe", str(out)]
        done = subprocess.run(
            [*command, *entries],
            env=install.environment(release, directory),
            cwd=install.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"deepspeed {release}: {done.stderr[-2000:]}")
        return gather(out)


def gather(path: Path) -> dict[str, Any]:
    """Read what `observe` wrote."""
    found: dict[str, Any] = {"packages": {}, "bindings": [], "observations": []}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kind = entry.pop("kind")
        if kind == "packages":
            found["packages"] = entry["packages"]
        else:
            found[f"{kind}s"].append(entry)
    return found


def problems(release: str, found: dict[str, Any], newest: str) -> list[str]:
    """Return what is not as it must be, a line each."""
    by_name = {entry.name: entry for entry in ENTRIES}
    lines = [
        f"{binding['family']}: {binding['error']}"
        for binding in found["bindings"]
        if binding["error"] and not (judge.by_name(binding["error"]) and release != newest)
    ]
    for raw in found["observations"]:
        seen = Observation(**raw)
        wrong = judge.problem(by_name[seen.entry], seen, release, newest)
        if wrong is not None:
            lines.append(f"{seen.entry}: {wrong}")
    return lines


def summary(found: dict[str, Any]) -> str:
    """Count what became of the configurations."""
    counts: Counter[str] = Counter()
    for raw in found["observations"]:
        seen = Observation(**raw)
        if seen.untraced != TRAINED:
            counts["not trained by DeepSpeed itself"] += 1
        elif seen.refused is not None:
            counts["refused"] += 1
        elif judge.bypassed(seen):
            counts["said to be seen in part"] += 1
        else:
            counts[f"audit: {seen.verdict}"] += 1
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def drifts(releases: list[str], directory: Path) -> list[dict[str, Any]]:
    """Return what moved from each release to the next."""
    found = []
    for before, after in itertools.pairwise(releases):
        sources = (Sources(install.location(release, directory)) for release in (before, after))
        found.append({"before": before, "after": after, "changes": drift(*sources)})
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.real.releases", description=__doc__)
    newest = install.installed()
    parser.add_argument(
        "--releases",
        type=lambda text: text.split(","),
        default=[*RELEASES, newest],
        help=f"comma-separated; the installed one, {newest}, needs no second copy",
    )
    parser.add_argument("--install", type=Path, help="where releases are, or will be, installed")
    parser.add_argument("--entries", nargs="+", default=CORE, help="globs over the catalog's names")
    parser.add_argument("--jobs", type=int, default=1, help="releases that run at a time")
    parser.add_argument("--results", type=Path, help="file to add what was observed to, as JSON")
    parser.add_argument("--page", type=Path, help="page to write from the results")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run, judge, and keep the results."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="gradtrace-releases-") as scratch:
        directory = (options.install or Path(scratch)).resolve()
        with ThreadPoolExecutor(options.jobs) as pool:
            observed = pool.map(
                lambda release: run_release(release, directory, options.entries), options.releases
            )
            found = dict(zip(options.releases, observed, strict=True))
        count = report(found)
        if options.results is not None:
            keep(found, options.results, directory)
    if options.page is not None:
        known = json.loads(options.results.read_text(encoding="utf-8"))
        options.page.write_text(page.render(known), encoding="utf-8")
    return 1 if count else 0


def report(found: dict[str, Any]) -> int:
    """Print a line for each release and each problem; return how many problems there are."""
    count = 0
    for release, observed in found.items():
        print(f"deepspeed {release}: {summary(observed)}")
        for line in problems(release, observed, install.installed()):
            count += 1
            print(f"  PROBLEM {line}")
    return count


def keep(found: dict[str, Any], path: Path, directory: Path) -> None:
    """Put what was observed beside what is known of other releases, and the drift between all."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"releases": {}}
    known["releases"].update(found)
    releases = sorted(known["releases"], key=page.version)
    known["releases"] = {release: known["releases"][release] for release in releases}
    known["drift"] = drifts(releases, directory)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
