"""The law `update`: torch's and DeepSpeed's optimizers stay inside its bound, and faults do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis import bounds
from gradtrace.analysis.laws import optimizers, publish
from gradtrace.trace.dtypes import DTYPES
from tests.analysis.properties import DEEP, examples, rounded, seeds, tensor

torch = pytest.importorskip("torch")

NUMEL = 67  # not a multiple of a vector register
SINGLE = DTYPES["float32"]
WAYS = ({"foreach": False}, {"foreach": True}, {"fused": True})


def _values(rng, dtype, *, wild):
    if wild:
        return tensor(rng, dtype, NUMEL, special=0.05)
    return rounded(rng.standard_normal(NUMEL) * 10.0 ** rng.uniform(-6, 1), dtype)


def _tensor(values, dtype):
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype.name))


def _numpy(tensor_):
    return tensor_.detach().to(torch.float64).numpy().copy()


def _adam_settings(rng):
    return {
        "lr": float(10.0 ** rng.uniform(-5, -1)),
        "betas": (float(rng.choice([0.9, 0.0, 0.3, 0.95])), float(rng.choice([0.999, 0.95, 0.5]))),
        "eps": float(rng.choice([1e-8, 1e-6, 1e-15])),
        "weight_decay": float(rng.choice([0.0, 0.01, 0.1])),
        "maximize": bool(rng.random() < 0.2),
    }


def _rule(settings, step, *, decoupled):
    return optimizers.Adam(
        lr=settings["lr"],
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        step=step,
        decoupled=decoupled,
        maximize=settings["maximize"],
    )


def _silent(result, weight, moments, *what):
    pairs = [("weight", weight, result.weight)]
    pairs += [(name, moments[name], estimate) for name, estimate in result.moments.items()]
    for name, found, estimate in pairs:
        outside = bounds.breaks(found, estimate)
        assert not outside.any(), (
            what, name, found[outside], estimate.value[outside], estimate.error[outside]
        )  # fmt: skip


@examples(120)
@given(
    seeds,
    st.sampled_from(WAYS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["float32", "float32", "bfloat16"]),
)
def test_torchs_adam_and_adamw(seed, way, decoupled, wild, name):
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    if "fused" in way and name != "float32":
        way = {"foreach": True}
    settings = _adam_settings(rng)
    param = torch.nn.Parameter(_tensor(_values(rng, dtype, wild=wild), dtype))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([param], **settings, **way)
    moments = {"exp_avg": np.zeros(NUMEL), "exp_avg_sq": np.zeros(NUMEL)}
    first = int(rng.choice([1, 1, 50, 3000]))
    if first > 1:  # as loaded from a checkpoint
        optimizer.state[param] = {
            "step": torch.tensor(float(first - 1)),
            "exp_avg": _tensor(_values(rng, dtype, wild=wild), dtype),
            "exp_avg_sq": _tensor(np.abs(_values(rng, dtype, wild=wild)), dtype),
        }
        moments = {key: _numpy(optimizer.state[param][key]) for key in moments}
    flush = bool(rng.random() < 0.3) and torch.set_flush_denormal(True)
    try:
        for step in range(first, first + 4):
            param.grad = _tensor(_values(rng, dtype, wild=wild), dtype)
            before, grad = _numpy(param), _numpy(param.grad)
            optimizer.step()
            rule = _rule(settings, step, decoupled=decoupled)
            result = optimizers.adam(
                before, grad, *moments.values(), rule, dtype, optimizers.KERNELS["torch"]
            )
            moments = {key: _numpy(optimizer.state[param][key]) for key in moments}
            _silent(result, _numpy(param), moments, settings, way, step, flush)
    finally:
        torch.set_flush_denormal(False)


@examples(120)
@given(
    seeds, st.sampled_from(WAYS), st.booleans(), st.sampled_from(["float32", "float32", "bfloat16"])
)
def test_torchs_sgd(seed, way, wild, name):
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    if "fused" in way and name != "float32":
        way = {"foreach": True}
    momentum = float(rng.choice([0.0, 0.9, 0.5]))
    nesterov = bool(momentum and rng.random() < 0.4)
    settings = {
        "lr": float(10.0 ** rng.uniform(-4, 0)),
        "momentum": momentum,
        "dampening": 0.0 if nesterov else float(rng.choice([0.0, 0.1, 0.5])),
        "weight_decay": float(rng.choice([0.0, 0.01, 0.1])),
        "nesterov": nesterov,
        "maximize": bool(rng.random() < 0.2),
    }
    param = torch.nn.Parameter(_tensor(_values(rng, dtype, wild=wild), dtype))
    optimizer = torch.optim.SGD([param], **settings, **way)
    held = None
    for step in range(4):
        param.grad = _tensor(_values(rng, dtype, wild=wild), dtype)
        before, grad = _numpy(param), _numpy(param.grad)
        optimizer.step()
        result = optimizers.sgd(before, grad, held, optimizers.Sgd(**settings), dtype)
        moments = {}
        if momentum:
            held = _numpy(optimizer.state[param]["momentum_buffer"])
            moments = {"momentum_buffer": held}
        _silent(result, _numpy(param), moments, settings, way, step)


FAULTS = {
    "another learning rate": lambda rule: replace(rule, lr=rule.lr * 1.01),
    "no bias correction": lambda rule: replace(rule, bias_correction=False),
    "a step too far": lambda rule: replace(rule, step=rule.step + 1),
    "coupled weight decay": lambda rule: replace(rule, decoupled=not rule.decoupled),
    "no weight decay": lambda rule: replace(rule, weight_decay=0.0),
    "betas swapped": lambda rule: replace(rule, beta1=rule.beta2, beta2=rule.beta1),
    "the other sign": lambda rule: replace(rule, maximize=True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", optimizers.KERNELS)
def test_a_wrong_rule_breaks_it(fault, kernel):
    """On weights of order 0.02 and a learning rate of 1e-3, as training has them."""
    rng = np.random.default_rng(5)
    weight = rounded(0.02 * rng.standard_normal(1000), SINGLE)
    grad, first = (rounded(1e-3 * rng.standard_normal(1000), SINGLE) for _ in range(2))
    second = rounded(1e-6 * rng.random(1000), SINGLE)
    right = optimizers.Adam(1e-3, 0.9, 0.95, 1e-8, 0.1, 5, decoupled=True)
    tensors = (weight, grad, first, second)
    expected = optimizers.adam(*tensors, right, SINGLE, optimizers.KERNELS[kernel]).weight
    found = optimizers.adam(
        *tensors, FAULTS[fault](right), SINGLE, optimizers.KERNELS[kernel]
    ).weight.value
    assert not bounds.breaks(rounded(expected.value, SINGLE), expected).any()
    assert bounds.breaks(rounded(found, SINGLE), expected).mean() > 0.5, fault
    step = 4 * expected.error
    assert bounds.breaks(expected.value + step, expected).all()
    assert bounds.breaks(expected.value - step, expected).all()


@pytest.mark.deepspeed
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decoupled", [True, False])
def test_deepspeeds_cpu_adam(cpu_adam, seed, decoupled):
    rng = np.random.default_rng(seed)
    settings = _adam_settings(rng)
    settings["maximize"] = False
    settings["eps"] = float(rng.choice([1e-8, 1e-6]))
    param = torch.nn.Parameter(_tensor(_values(rng, SINGLE, wild=False), SINGLE))
    given_ = {key: settings[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = cpu_adam([param], **given_, adamw_mode=decoupled)
    moments = {"exp_avg": np.zeros(NUMEL), "exp_avg_sq": np.zeros(NUMEL)}
    for step in range(1, 40):
        param.grad = _tensor(_values(rng, SINGLE, wild=False), SINGLE)
        before, grad = _numpy(param), _numpy(param.grad)
        optimizer.step()
        rule = _rule(settings, step, decoupled=decoupled)
        kernel = optimizers.KERNELS["DeepSpeedCPUAdam"]
        result = optimizers.adam(before, grad, *moments.values(), rule, SINGLE, kernel)
        moments = {key: _numpy(optimizer.state[param][key]) for key in moments}
        _silent(result, _numpy(param), moments, settings, step)


@pytest.fixture(scope="module")
def cpu_adam():
    if not DEEP:
        pytest.skip("compiling DeepSpeed's op takes a minute: --hypothesis-profile=deep")
    ops = pytest.importorskip("deepspeed.ops.adam")
    return ops.DeepSpeedCPUAdam


@examples(40)
@given(seeds, st.sampled_from(["float32", "bfloat16", "float16"]))
def test_publish(seed, name):
    rng, model = np.random.default_rng(seed), DTYPES[name]
    master = tensor(rng, SINGLE, NUMEL, special=0.05)
    found = _numpy(_tensor(master, SINGLE).to(getattr(torch, name)))
    estimate = publish.expect(master, SINGLE, model)
    assert not bounds.breaks(found, estimate).any()
    away = np.copysign(0.05 * np.abs(found) + 4 * estimate.error + 1e-44, found)
    stale = np.where(np.isfinite(found), found + away, np.nan)
    usable = np.isfinite(found) & ~estimate.overflow
    assert bounds.breaks(stale, estimate)[usable].all()
