"""The command line: exit statuses, JSON documents, errors, and what is never overwritten."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradtrace
from gradtrace.analysis import inspect as inspect_module
from gradtrace.cli import main
from gradtrace.report.html import MARK
from gradtrace.testing.synthetic import PARAMETERS, Fault, Omission, Run, write_run

ROOT = Path(gradtrace.__file__).resolve().parents[1]
GOOD = Run(stage=2, micro_steps=2, steps=2)
BAD = Run(stage=2, micro_steps=2, steps=2, faults=(Fault("dropped_micro_steps", "accumulate"),))
ELEMENTS = sum(math.prod(shape) for _, shape in PARAMETERS)

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    write_run(root / "good", GOOD)
    write_run(root / "z3", Run(stage=3, micro_steps=2, steps=2))
    write_run(root / "bad", BAD)
    write_run(root / "gap", Run(stage=2, micro_steps=2, omissions=(Omission("reduced"),)))
    write_run(root / "bf16", Run(stage=1, model_dtype="bfloat16", shard_bytes=512))
    return root


@pytest.fixture
def traces(originals: Path, tmp_path: Path) -> Path:
    """Copy the traces, for tests that damage them."""
    return Path(shutil.copytree(originals, tmp_path / "traces"))


def document(out: str) -> dict[str, Any]:
    """Return the one JSON document that is all of the output."""
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


# ---- verdicts and exit statuses


@pytest.mark.parametrize(
    ("argv", "status", "verdict"),
    [
        (["diff", "good", "good"], 0, "agree"),
        (["diff", "good", "z3"], 0, None),
        (["diff", "bad", "good"], 1, "diverged"),
        (["audit", "good"], 0, "pass"),
        (["audit", "bad"], 1, "fail"),
        (["audit", "gap"], 2, "inconclusive"),
        (["verify", "bf16"], 0, "sound"),
    ],
)
def test_statuses(
    cli: Cli, originals: Path, argv: list[str], status: int, verdict: str | None
) -> None:
    paths = [originals / name for name in argv[1:]]
    found, out, _ = cli(argv[0], *paths, "--json")
    body = document(out)
    assert (found, body["format"], body["version"]) == (status, f"gradtrace.{argv[0]}", 1)
    if verdict is None:
        assert body["verdict"] in ("agree", "rounding")
    else:
        assert body["verdict"] == verdict
    plain, text, _ = cli(argv[0], *paths)
    assert plain == status
    assert text.split(maxsplit=1)[0].strip(":").lower() == body["verdict"].split("_")[0]


def test_diff_json_is_section_7(cli: Cli, originals: Path) -> None:
    _, out, _ = cli("diff", originals / "bad", originals / "good", "--json")
    body = document(out)
    members = "format version verdict first blame counts reported growth envelope notes"
    assert list(body) == members.split()
    assert (body["first"]["step"], body["first"]["point"]) == (0, "accumulated")
    assert body["blame"]["side"] == "baseline"
    assert body == gradtrace.diff(originals / "bad", originals / "good").to_dict()


def test_diff_envelope(cli: Cli, originals: Path, tmp_path: Path) -> None:
    noise = []
    for sample in (0, 1):
        path = write_run(tmp_path / f"n{sample}", replace(GOOD, perturb_sample=sample))
        noise += ["--envelope", path]
    pair = ("diff", originals / "good", originals / "z3")
    status, out, _ = cli(*pair, *noise, "--json")
    body = document(out)
    assert status == 0
    assert list(body["envelope"]) == [
        "samples", "factor", "chance", "p_value", "first_outside", "steps", "reading",
    ]  # fmt: skip
    assert body["envelope"]["samples"] == [0, 1]
    assert body["envelope"]["chance"] == 1 / 3
    status, out, _ = cli(*pair, *noise)
    assert status == 0 and "Noise envelope" in out
    status, out, err = cli(*pair, "--envelope", originals / "bad", "--json")
    assert status == 2
    assert document(out)["slug"] == "not_an_envelope"
    assert "[not_an_envelope]" in err


def test_info_of_a_perturbed_run(cli: Cli, originals: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "noise", replace(GOOD, perturb_sample=5))
    _, out, _ = cli("info", path, "--json")
    assert document(out)["perturbation"] == {"sample": 5, "ulp": 1, "hash": "splitmix64/xxh3-64"}
    _, out, _ = cli("info", path)
    assert "moved by one unit in the last place before the run, sample 5" in " ".join(out.split())
    _, out, _ = cli("info", originals / "good", "--json")
    assert document(out)["perturbation"] is None


@pytest.mark.parametrize("sample", ["-1", "x", "1.5"])
def test_run_wants_the_number_of_a_sample(cli: Cli, tmp_path: Path, sample: str) -> None:
    status, _, err = cli("run", "-o", tmp_path / "t", "--perturb-ulp", sample, "train.py")
    assert status == 2
    assert "--perturb-ulp" in err and "[bad_option]" in err


def test_audit_json_is_section_7(cli: Cli, originals: Path) -> None:
    _, out, _ = cli("audit", originals / "bad", "--json")
    body = document(out)
    section_7 = ["format", "version", "verdict", "first", "laws", "reported", "notes"]
    assert list(body) == [*section_7, "findings", "path"]
    assert body["first"]["law"] == "accumulate"
    assert body["first"].items() <= body["findings"][0].items()
    assert body == gradtrace.audit(originals / "bad").to_dict()


# ---- info


def test_info_json(cli: Cli, originals: Path) -> None:
    status, out, _ = cli("info", originals / "gap", "--json")
    body = document(out)
    assert status == 0
    assert body["world_size"] == 2
    assert body["effective"]["zero_stage"] == 2
    assert body["parameters"] == {
        "count": 6,
        "captured": 6,
        "elements": 97,
        "dtypes": ["float32"],
    }
    points = {point["point"]: point for point in body["points"]}
    assert points["reduced"]["records"] == 0
    assert points["reduced"]["gaps"] == len(body["gaps"]) > 0
    assert points["local_accum"]["status"].startswith("absent")
    assert points["master_grad"]["bytes"] == 100 * 4
    assert [step["micro_steps"] for step in body["steps"]] == [2]


def test_info_of_a_run_that_was_killed(cli: Cli, traces: Path) -> None:
    for segment in (traces / "good/rank-00001").glob("index-*"):
        segment.unlink()
    for shard in (traces / "good/rank-00001").glob("*.safetensors"):
        if shard.name != "000000.safetensors":
            shard.unlink()
    status, out, _ = cli("info", traces / "good")
    assert status == 0
    assert "never closed on rank 1" in out
    assert "incomplete" in out
    body = document(cli("info", traces / "good", "--json")[1])
    assert body["closed"]["1"] is None
    assert not any(step["complete"] for step in body["steps"])


def test_info_names_settings_that_ranks_disagree_on(
    originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = gradtrace.open_trace(originals / "good")
    trace.ranks[1].header.effective["gradient_clipping"] = 1.0  # type: ignore[index]
    monkeypatch.setattr(inspect_module, "open_trace", lambda _: trace)
    info = inspect_module.inspect("x")
    assert info.effective_differs == {"gradient_clipping": {0: 0.0, 1: 1.0}}
    assert "gradient_clipping" not in info.effective


# ---- show


def test_show_cuts_a_parameter_out_of_a_flat_buffer(cli: Cli, originals: Path) -> None:
    argv = ["show", originals / "good", "--step", 0, "--micro-step", 1, "--rank", 0]
    argv += ["--point", "accumulated", "--param", "layers.0.weight"]
    status, out, _ = cli(*argv, "--json")
    record = document(out)["record"]
    assert status == 0
    assert record["shape"] == [5, 5]
    assert {span["param"] for span in record["spans"]} == {"layers.0.weight"}
    assert record["statistics"]["numel"] == sum(span["numel"] for span in record["spans"])
    assert len(record["values"]) == 8
    assert (originals / "good" / record["shard"]).is_file()
    status, out, _ = cli(*argv)
    assert out.startswith("accumulated of layers.0.weight, step 0, micro-step 1, rank 0")
    assert "L2 norm" in out


def test_show_agrees_with_the_trace(cli: Cli, originals: Path) -> None:
    argv = ["--step", 1, "--micro-step", 0, "--rank", 1, "--point", "local_grad"]
    out = cli("show", originals / "good", *argv, "--param", "head.scale", "--json")[1]
    shown = document(out)["record"]
    trace = gradtrace.open_trace(originals / "good")
    wanted = ("local_grad", "head.scale", 1, 0)
    [record] = [
        r for r in trace.ranks[1].records if (r.point, r.unit, r.step, r.micro_step) == wanted
    ]
    value = float(trace.values(record)[0])
    assert shown["values"] == [value]
    assert shown["statistics"]["l2"] == pytest.approx(abs(value))


def test_show_facts_without_a_tensor(cli: Cli, originals: Path) -> None:
    argv = ["--step", 0, "--micro-step", 0, "--rank", 0, "--point", "loss"]
    status, out, _ = cli("show", originals / "good", *argv, "--json")
    record = document(out)["record"]
    assert status == 0
    assert record["statistics"] is None
    assert "seed" in record["facts"]


def test_show_lists_several(cli: Cli, originals: Path) -> None:
    status, out, _ = cli("show", originals / "good", "--point", "local_grad", "--json")
    body = document(out)
    assert status == 0
    assert body["record"] is None
    assert len(body["matches"]) > 40
    text = cli("show", originals / "good", "--point", "local_grad")[1]
    assert f"{len(body['matches'])} records match" in text
    assert f"and {len(body['matches']) - 40} more" in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--step", "7"], "Expected step 0, 1."),
        (["--point", "local_accum"], "local_accum is absent"),
        (["--param", "layers.0.weigth"], "layers.0.weight"),
        (["--point", "master_grad", "--micro-step", "0"], "none (once a step)"),
        (["--point", "loss", "--param", "head.scale"], "a record with a tensor"),
        (["--rank", "5"], "Expected rank 0, 1."),
        (["--unit", "nothing"], "Expected unit"),
    ],
)
def test_show_says_what_there_is(cli: Cli, originals: Path, argv: list[str], expected: str) -> None:
    status, out, err = cli("show", originals / "good", *argv)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.rstrip().endswith("[no_such_record]")


def test_show_says_that_a_gap_is_there(cli: Cli, originals: Path) -> None:
    err = cli("show", originals / "gap", "--point", "reduced")[2]
    assert "a gap, write_failed" in err


# ---- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_lists_every_damaged_shard(cli: Cli, traces: Path) -> None:
    shards = sorted((traces / "bf16").rglob("*.safetensors"))
    assert len(shards) > 3
    for shard in (shards[0], shards[-1]):
        flip(shard, -1)
    status, out, _ = cli("verify", traces / "bf16", "--json")
    body = document(out)
    assert (status, body["verdict"]) == (2, "damaged")
    faults = [file["fault"] for file in body["files"] if file["fault"]]
    assert [fault["slug"] for fault in faults] == ["damaged_trace", "damaged_trace"]
    status, out, _ = cli("verify", traces / "bf16")
    assert (status, out.splitlines()[0][:17]) == (2, "DAMAGED: 2 shards")


def test_verify_opens_shards_with_another_reader(
    cli: Cli, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not a safetensors file")

    monkeypatch.setattr("gradtrace.analysis.verify.safe_open", refuse)
    status, out, _ = cli("verify", originals / "good")
    assert status == 2
    assert "safetensors' own reader disagrees" in " ".join(out.split())


def damage_version(trace: Path) -> None:
    path = trace / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "not a trace": ("not_a_trace", shutil.rmtree),
    "no manifest": ("not_a_trace", lambda trace: (trace / "manifest.json").unlink()),
    "another version": ("unsupported_version", damage_version),
    "missing rank": ("missing_rank", lambda trace: shutil.rmtree(trace / "rank-00001")),
    "truncated shard": (
        "damaged_trace",
        lambda trace: os.truncate(trace / "rank-00000/000000.safetensors", 100),
    ),
    "altered index": ("damaged_trace", lambda t: flip(t / "rank-00000/index-000000.jsonl", 40)),
    "altered byte": ("damaged_trace", lambda t: flip(t / "rank-00000/000000.safetensors", -1)),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("command", ["diff", "audit", "info", "show", "verify"])
def test_bad_input_is_a_named_error(cli: Cli, traces: Path, name: str, command: str) -> None:
    slug, damage = DAMAGES[name]
    damage(traces / "good")
    argv = [command, traces / "good"]
    argv += [traces / "z3"] if command == "diff" else []
    if name == "altered byte" and command in ("info", "show", "verify"):
        return  # info reads no shard, show here none either, verify lists it: tested above
    argv += ["--point", "local_grad"] if command == "show" else []
    status, out, err = cli(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("gradtrace: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith(f"[{slug}]")
    status, out, _ = cli(*argv, "--json")
    body = document(out)
    assert (status, body["format"], body["version"]) == (2, "gradtrace.error", 1)
    assert body["slug"] == slug
    assert all(body[member] for member in ("found", "where", "expected", "remedy"))


def test_error_lines_are_escaped(cli: Cli, tmp_path: Path) -> None:
    err = cli("info", tmp_path / "a\x1b[31m\nb")[2]
    assert "\x1b" not in err
    assert err.count("\n") == 1


# ---- usage


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "no such command 'nothing'"),
        (["diff", "only-one"], "missing argument 'CANDIDATE'"),
        (["audit", "x", "--nothing"], "no such option"),
        (["show", "x", "--point", "nowhere"], "'nowhere' is not one of"),
        (["run", "script.py"], "no directory for the trace"),
        (["run", "-o", "x", "--stepz", "1", "script.py"], "no such option"),
    ],
)
def test_usage_errors(cli: Cli, argv: list[str], words: str) -> None:
    status, out, err = cli(*argv)
    assert (status, out) == (2, "")
    assert words.lower() in err.lower()
    assert err.rstrip().endswith("[bad_option]")


def test_usage_errors_as_json(cli: Cli) -> None:
    status, out, _ = cli("diff", "--json")
    assert status == 2
    assert document(out)["slug"] == "bad_option"


def test_json_of_a_script_is_the_scripts(cli: Cli) -> None:
    assert not main.wants_json(["run", "-o", "x", "s.py", "--json"])
    assert main.wants_json(["--debug", "audit", "x", "--json"])
    assert not main.wants_json(["audit", "--", "--json"])


def test_help_and_version(cli: Cli) -> None:
    status, out, _ = cli("--help")
    assert status == 0
    assert all(name in out for name in main.COMMANDS)
    assert cli("--version") == (0, f"gradtrace, version {gradtrace.__version__}\n", "")
    for name in main.COMMANDS:
        status, out, _ = cli(name, "--help")
        assert status == 0
        assert out.startswith(f"Usage: gradtrace {name}")


# ---- what nobody expected


def test_internal_error(cli: Cli, originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("gradtrace.analysis.inspect.open_trace", burst)
    monkeypatch.delenv("GRADTRACE_DEBUG", raising=False)
    status, out, err = cli("info", originals / "good")
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert "ZeroDivisionError: boom" in err
    assert "GRADTRACE_DEBUG=1" in err
    status, out, _ = cli("info", originals / "good", "--json")
    assert (status, document(out)["slug"]) == (3, "internal")
    assert "Traceback" in cli("--debug", "info", originals / "good")[2]
    monkeypatch.setenv("GRADTRACE_DEBUG", "1")
    assert "Traceback" in cli("info", originals / "good")[2]


def test_interrupt(cli: Cli, originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradtrace.analysis.inspect.open_trace", interrupt)
    status, _, err = cli("info", originals / "good")
    assert (status, err) == (130, "gradtrace: interrupted\n")


def test_refusal_of_the_system(cli: Cli, originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("gradtrace.analysis.inspect.open_trace", refuse)
    status, _, err = cli("info", originals / "good")
    assert status == 2
    assert "permission denied" in err
    assert err.rstrip().endswith("[os_error]")


def spawn(*argv: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gradtrace", *map(str, argv)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def test_broken_pipe_is_quiet(originals: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = spawn("info", originals / "good", stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (main.BROKEN_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout(originals: Path) -> None:
    with open("/dev/full", "wb") as full:
        _, err = (process := spawn("info", originals / "good", stdout=full)).communicate(timeout=60)
    assert process.returncode == 2
    assert b"[os_error]" in err


def test_terminal_that_knows_only_ascii(originals: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    out, err = (
        process := spawn(
            "diff", originals / "bad", originals / "good", stdout=subprocess.PIPE, env=environment
        )
    ).communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")
    out.decode("ascii")


# ---- run: what needs no deepspeed


def test_run_leaves_the_scripts_options_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    theirs = ["--steps", "9", "-o", "theirs", "--json", "--help", "--", "x"]
    argv = ["run", "-o", tmp_path / "t", "--steps", "0:2", "--params", "a.*", "--params", "b"]
    process = spawn(*argv, script, *theirs, stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == theirs


@pytest.mark.parametrize(
    "option", [["--steps", "x"], ["--points", "nowhere"], ["--mode", "tiny"], ["--on-error", "x"]]
)
def test_run_checks_its_options_before_the_script(
    cli: Cli, tmp_path: Path, option: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)\n")
    status, _, err = cli("run", "-o", tmp_path / "t", *option, script)
    assert status == 2
    assert err.rstrip().endswith("[bad_option]")


# ---- demo, without what it needs


def test_demo_without_deepspeed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    status, out, err = cli("demo", "-o", tmp_path / "demo")
    assert (status, out) == (2, "")
    assert "pip install -c constraints.txt '.[deepspeed]'" in err
    assert err.rstrip().endswith("[missing_dependency]")


# ---- html


@pytest.mark.parametrize("argv", [["diff", "bad", "good"], ["audit", "bad"]])
def test_html(cli: Cli, originals: Path, tmp_path: Path, argv: list[str]) -> None:
    page = tmp_path / "report.html"
    words = [argv[0], *(originals / name for name in argv[1:]), "--html", page]
    assert cli(*words)[0] == 1
    first = page.read_text(encoding="utf-8")
    assert MARK in first
    assert "accumulated" in first
    status, out, _ = cli(*words, "--json")
    assert (status, document(out)["format"]) == (1, f"gradtrace.{argv[0]}")
    assert page.read_text(encoding="utf-8") == first
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_html_replaces_nothing_but_reports(cli: Cli, traces: Path, tmp_path: Path) -> None:
    precious = tmp_path / "thesis.html"
    precious.write_text("<html>years of work</html>")
    (tmp_path / "directory").mkdir()
    for target in (
        precious,
        tmp_path / "directory",
        tmp_path / "nowhere" / "report.html",
        traces / "good" / "manifest.json",
        traces / "good" / "report.html",
        traces / "good" / "rank-00000" / "report.html",
    ):
        status, _, err = cli("audit", traces / "good", "--html", target)
        assert status == 2
        assert err.rstrip().endswith("[bad_option]")
    assert precious.read_text() == "<html>years of work</html>"
    assert cli("verify", traces / "good")[0] == 0
