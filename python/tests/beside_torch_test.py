"""bench/beside_torch.py without a GPU: that every spelling of a case is the same mathematics, and counts what it says."""
import ctypes
import importlib.util
import pathlib
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = pathlib.Path(__file__).parents[2]
D = 256


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("beside_torch", ROOT / "bench" / "beside_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cases(script):
    torch.manual_seed(0)
    maker = script.Maker(device="cpu", dtype=torch.float64, tokens=48, loss_tokens=32, vocab=96)
    return maker.operators(D) | maker.blocks(D, "block", 512, 128, 64)


NAMES = ["rope", "swiglu", "residual_rms", "swiglu_b", "norm_b", "loss", "loss_fb", "fwd", "fwd_bwd"]


def joined(outputs):
    """All of them side by side, gradients of weights below each other as they are."""
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return torch.cat([x.double().flatten() for x in outputs]).sort().values


@pytest.mark.parametrize("name", NAMES)
def test_spellings_agree(cases, name):
    case = cases[name]()
    wanted = joined(case.torch["torch_compile"]())
    for spelling, function in case.torch.items():
        torch.testing.assert_close(joined(function()), wanted, rtol=1e-9, atol=1e-9, msg=spelling)


@pytest.mark.parametrize("name", NAMES)
def test_products_have_the_flops_that_are_counted(cases, name):
    case = cases[name]()
    with FlopCounterMode(display=False) as counter:
        case.gemms()
    assert counter.get_total_flops() == case.flops


@pytest.mark.parametrize("name", NAMES)
def test_coda_reads_the_inputs(cases, name):
    sources = "".join(file.read_text() for file in (ROOT / "src" / "bench" / "torch").glob("*.cc"))
    case = cases[name]()
    for tensor in case.inputs:
        assert f'"{tensor}"' in sources
    for output in case.outputs:
        assert output is None or f'"{output}"' in sources


def test_swiglu_backward_is_the_derivative(script, cases):
    case = cases["swiglu_b"]()
    dh, wd, z = (case.inputs[k] for k in ("dh", "wd", "z"))
    z = z.detach().requires_grad_()
    y = script.swiglu(z)
    (dz,) = torch.autograd.grad(y, z, dh @ wd)
    d_gate, d_up, again = case.torch["torch_compile"]()
    torch.testing.assert_close(torch.cat([d_gate, d_up], -1), dz)
    torch.testing.assert_close(again, y.detach())


def test_norm_backward_is_the_derivative(script, cases):
    case = cases["norm_b"]()
    dz, wgu, h, gamma, residual = (case.inputs[k] for k in ("dz", "wgu", "h", "gamma", "d_residual"))
    h, gamma = h.detach().requires_grad_(), gamma.detach().requires_grad_()
    d_h, d_gamma = torch.autograd.grad(script.norm(h, gamma), (h, gamma), dz @ wgu)
    got_h, got_gamma = case.torch["torch_compile"]()
    torch.testing.assert_close(got_h, d_h + residual)
    torch.testing.assert_close(got_gamma, d_gamma)


def test_rotation_keeps_lengths_and_v(script):
    x = torch.randn(8, 3 * 128, dtype=torch.float64)
    cos, sin = script.angles(8, 128, x)
    out = script.rotated(x, cos, sin, 256)
    torch.testing.assert_close(out[:, 256:], x[:, 256:])
    torch.testing.assert_close(out[0], x[0])  # position 0
    torch.testing.assert_close(out[:, :256].view(8, 2, 128).norm(dim=-1), x[:, :256].view(8, 2, 128).norm(dim=-1))
    assert not torch.allclose(out[1, :256], x[1, :256])


class Clock:
    """In the place of CUDA's events: the n-th measurement takes n milliseconds."""

    def __init__(self):
        self.count = 0

    def back_to_back(self, run, launches):
        run()
        self.count += 1
        return float(self.count), (1500.0, 600.0)

    def alone(self, run):
        return self.back_to_back(run, 1)[0]


class Library:
    """In the place of libcoda_bench.so: results are copied from what it was given."""

    def __init__(self, results):
        self.results, self.closed = results, []

    def coda_bench_open(self, name, d, count, names, addresses):
        return 7 if name == b"op.loss_fb" else -1

    def coda_bench_result(self, handle, name, address):
        values = self.results[name.decode()].contiguous()
        ctypes.memmove(address, values.data_ptr(), values.numel() * values.element_size())
        return 0

    def coda_bench_close(self, handle):
        self.closed.append(handle)


@pytest.fixture
def measured(script, cases):
    case = cases["loss_fb"]()
    value, d_x, d_wlm = case.torch["torch_compile"]()
    coda = object.__new__(script.Coda)
    coda.library = Library({"loss": value, "d_x": d_x, "d_wlm": d_wlm})
    coda.runner = lambda handle: lambda: None
    return case, coda, types.SimpleNamespace(rounds=3, settle=0.01, measure=0.01)


def test_rows_are_medians_of_every_implementation(script, measured):
    case, coda, options = measured
    rows = script.measure(case, coda, Clock(), options)
    assert {(row["impl"], row["regime"]) for row in rows} >= {
        (name, regime) for name in ("cublas_gemms", "torch_compile", "coda") for regime in ("sustained", "cool")
    }
    for row in rows:
        assert row["case"] == "op.loss_fb" and row["d"] == D
        assert row["low"] <= row["ms"] <= row["high"]
        assert row["tflops"] == round(case.flops / row["ms"] / 1e9, 1)
        assert ("mhz" in row) == (row["regime"] == "sustained")
    assert coda.library.closed == [7]
    text = script.text_of(rows)
    assert "torch ÷ coda" in text
    assert all(f"{row['ms']:.4f} ({row['low']:.4f} to {row['high']:.4f})" in text for row in rows)


def test_a_wrong_result_stops_the_run(script, measured):
    case, coda, options = measured
    coda.library.results["d_x"] = coda.library.results["d_x"] * 1.03
    with pytest.raises(SystemExit, match="op.loss_fb, d = 256: d_x differs from torch's by 3.0e-02"):
        script.measure(case, coda, Clock(), options)


def test_a_case_that_coda_does_not_have_is_measured_without(script, cases, measured):
    _, coda, options = measured
    rows = script.measure(cases["fwd_bwd"](), coda, Clock(), options)
    assert "coda" not in {row["impl"] for row in rows}
    assert "torch ÷ coda" not in script.text_of(rows)
