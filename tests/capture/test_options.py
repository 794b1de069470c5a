"""Capture options: one grammar, and named errors for what means nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.capture.options import choose_options, parse_options
from gradtrace.errors import BadOptionError


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("0:3", {0, 1, 2}),
        ("::4", {0, 4, 8}),
        ("5", {5}),
        ("1:", set(range(1, 10))),
        (":2,7:9", {0, 1, 7, 8}),
        ("3 , 5", {3, 5}),
        ("2:9:3", {2, 5, 8}),
    ],
)
def test_step_ranges(text: str, selected: set[int]) -> None:
    options = parse_options(steps=text)
    assert {step for step in range(10) if options.selects_step(step)} == selected


@given(
    start=st.integers(0, 20),
    length=st.integers(1, 20),
    stride=st.integers(1, 7),
    step=st.integers(0, 60),
)
def test_step_ranges_are_pythons_ranges(start: int, length: int, stride: int, step: int) -> None:
    options = parse_options(steps=f"{start}:{start + length}:{stride}")
    assert options.selects_step(step) == (step in range(start, start + length, stride))


def test_numbers_select_steps_too() -> None:
    assert parse_options(steps=[1, 4]).selects_step(4)
    assert not parse_options(steps=4).selects_step(3)
    assert parse_options().selects_step(10**9)


def test_globs_select_parameters() -> None:
    options = parse_options(params="layers.0.*,head.?eight")
    assert options.selects_param("layers.0.mlp.weight")
    assert options.selects_param("head.weight")
    assert not options.selects_param("layers.1.mlp.weight")
    assert not options.selects_param("LAYERS.0.x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": "a"},
        {"steps": ""},
        {"steps": "3:3"},
        {"steps": "::0"},
        {"steps": "-1"},
        {"params": []},
        {"points": "gradients"},
        {"points": ""},
        {"ranks": "x"},
        {"ranks": [-1]},
        {"ranks": []},
        {"mode": "digest"},
        {"max_bytes": -1},
        {"max_bytes": True},
        {"on_error": "ignore"},
    ],
)
def test_what_means_nothing_is_a_named_error(wrong: dict[str, object]) -> None:
    with pytest.raises(BadOptionError) as caught:
        parse_options(**wrong)  # type: ignore[arg-type]
    assert next(iter(wrong)) in caught.value.where
    assert caught.value.remedy


def test_the_plan_says_what_was_asked_for() -> None:
    plan = parse_options(steps="0:2", points=["loss", "bucket"], ranks="1,0", max_bytes=9).plan()
    assert plan == {
        "steps": "0:2",
        "params": ["*"],
        "points": ["loss", "bucket"],
        "digested": [],
        "ranks": [0, 1],
        "mode": "full",
        "max_bytes": 9,
        "on_error": "disarm",
    }


def test_the_caller_goes_before_the_environment_before_the_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = {"steps": "0:1", "params": ["a.*"], "max_bytes": 7, "on_error": "raise"}
    monkeypatch.setenv("GRADTRACE_STEPS", "0:2")
    monkeypatch.setenv("GRADTRACE_PARAMS", "b.*")
    monkeypatch.setenv("GRADTRACE_OUT", "somewhere")  # no capture option
    options = choose_options({"steps": "0:3", "mode": None}, section)
    plan = options.plan()
    assert (plan["steps"], plan["params"], plan["max_bytes"]) == ("0:3", ["b.*"], 7)
    assert (plan["on_error"], plan["mode"]) == ("raise", "full")
    assert options.named("steps") == "capture option steps"
    assert options.named("params") == (
        "capture option params, from environment variable GRADTRACE_PARAMS"
    )
    assert options.named("max_bytes").endswith("section 'gradtrace' of the ds_config")


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"steps": "x"}, "capture option steps, from section 'gradtrace' of the ds_config"),
        ({"steps": {"from": 0}}, "capture option steps, from section 'gradtrace' of the ds_config"),
        ({"steps": 1.5}, "capture option steps, from section 'gradtrace' of the ds_config"),
        ({"params": [1]}, "capture option params, from section 'gradtrace' of the ds_config"),
        ({"ranks": True}, "capture option ranks, from section 'gradtrace' of the ds_config"),
        ({"max_bytes": "1"}, "capture option max_bytes, from section 'gradtrace' of the ds_config"),
        ({"enabled": True}, "section 'gradtrace' of the ds_config"),
        ({"out": "traces"}, "section 'gradtrace' of the ds_config"),
        ([], "section 'gradtrace' of the ds_config"),
    ],
)
def test_a_bad_section_is_named(section: object, where: str) -> None:
    with pytest.raises(BadOptionError) as caught:
        choose_options({}, section)  # type: ignore[arg-type]
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("variable", "value", "where"),
    [
        ("GRADTRACE_STEPS", "x", "GRADTRACE_STEPS"),
        ("GRADTRACE_MAX_BYTES", "1e9", "GRADTRACE_MAX_BYTES"),
        ("GRADTRACE_ON_ERROR", "ignore", "GRADTRACE_ON_ERROR"),
        ("GRADTRACE_STEP", "0:2", "the environment"),
    ],
)
def test_a_bad_variable_is_named(
    variable: str, value: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BadOptionError) as caught:
        choose_options({})
    assert where in caught.value.where
    assert variable in str(caught.value)


def test_variables_of_others_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADTRACE_CATALOG", "whole")
    assert choose_options({}) == parse_options()
