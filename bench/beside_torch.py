#!/usr/bin/env python3
"""Blocks and operators on one GPU: coda's beside torch.compile, cuBLAS' products alone and Liger (where installed), taking turns.

  beside_torch.py [--coda build/libcoda_bench.so] [--cases 'op.*' 'block.*' 'llama.*' 'sq.*'] [--hidden 2048 4096 8192]
                  [--rounds 5] [--settle 0.2] [--measure 0.25] [--json FILE]

bf16, random normal data, 16384 tokens (the loss: 4096 of a vocabulary of 32768), F = 8/3 d rounded up to 256, heads of 128. In a round
each implementation runs once, in random order: for --settle seconds, so that the card comes to the clock that this one brings it to
under its power limit, and then for --measure seconds (`sustained`); and three times alone after a rest, the L2 cache cleared, launches
hidden behind a spinning kernel (`cool`). A figure is the median over rounds. coda's outputs are held to torch's first (relative
Frobenius 2e-2).

  op.rope          x Wqkvᵀ, q and k rotated               coda: times a given 1/rms too
  op.swiglu        x Wguᵀ, silu(gate)·up, both kept       the same
  op.residual_rms  a Woᵀ + residual, RMSNorm              coda: h and 1/rms; the norm's weight is in the next product's
  op.swiglu_b      dh Wd, SwiGLU's derivative             coda: times a given 1/rms, and a row sum
  op.norm_b        dz Wgu, RMSNorm's derivative, + residual
  op.loss          x Wlmᵀ, mean cross-entropy; op.loss_fb: and its gradients
  block.fwd        attention's output to the next layer's q, k, v; block.fwd_bwd: and all gradients
  llama.*          the same with Llama 3's F and grouped heads (1B, 8B, 70B)
  sq.*             N = 3n, n, 32768 beside M = K = n, for n in --hidden
coda packs its own copies of weights when a case is opened; gradients of weights are fp32 in coda, bf16 in torch.
docs/plot_benchmarks.py draws what --json writes.
"""
import argparse
import ctypes
import fnmatch
import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

EPS = 1e-6
DOCUMENT = 8192  # positions begin anew after so many tokens
THETA = 1e4
VOCAB = 32768
LLAMA = {2048: (512, 8192, 64), 4096: (1024, 14336, 128), 8192: (1024, 28672, 128)}  # k and v columns, F, heads of


@dataclass
class Case:
    name: str
    d: int
    flops: float
    inputs: dict  # by the names that libcoda_bench knows
    outputs: list  # of every implementation, by those names; None: not of coda's
    torch: dict  # spellings of the same mathematics: functions without arguments
    gemms: Callable  # the products alone
    compiled: bool = True  # whether spellings are to be compiled; otherwise they are already
    further: dict = field(default_factory=dict)  # implementations that are not compiled


# ---- the mathematics, as a user writes it


def norm(h, gamma):
    return F.rms_norm(h, (h.shape[-1],), gamma, EPS)


def swiglu(z):
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def angles(tokens, head_dim, like):
    frequency = THETA ** (-torch.arange(head_dim // 2, device=like.device, dtype=torch.float64) * 2 / head_dim)
    angle = (torch.arange(tokens, device=like.device, dtype=torch.float64) % DOCUMENT)[:, None, None] * frequency
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angle.cos().to(wide), angle.sin().to(wide)


def rotated_heads(x, cos, sin):
    """Halves of a head are partners. x [M, heads · head_dim], cos and sin [M, 1, head_dim / 2]."""
    a, b = x.view(x.shape[0], -1, 2 * cos.shape[-1]).to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1).to(x.dtype)


def rotated(qkv, cos, sin, width):
    """q and k are the first `width` columns."""
    return torch.cat([rotated_heads(qkv[:, :width], cos, sin), qkv[:, width:]], -1)


def swiglu_product(x, wgu):
    z = x @ wgu.t()
    return swiglu(z), z


def swiglu_product_split(x, wgu):
    ffn = wgu.shape[0] // 2
    gate, up = x @ wgu[:ffn].t(), x @ wgu[ffn:].t()
    return F.silu(gate) * up, gate, up


def residual_norm(x, wo, residual, gamma):
    h = x @ wo.t() + residual
    return h, norm(h, gamma)


def swiglu_backward(dh, wd, z):
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    dy = (dh @ wd).to(wide)
    gate, up = (v.to(wide) for v in z.chunk(2, -1))
    s = torch.sigmoid(gate)
    return tuple(v.to(z.dtype) for v in (dy * up * s * (1 + gate * (1 - s)), dy * gate * s, gate * s * up))


def swiglu_backward_joined(dh, wd, z):
    d_gate, d_up, y = swiglu_backward(dh, wd, z)
    return torch.cat([d_gate, d_up], -1), y


def norm_backward(dz, wgu, h, gamma, d_residual):
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    dx, h = (dz @ wgu).to(wide), h.to(wide)
    inv_rms = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    unit = h * inv_rms
    dn = dx * gamma.to(wide)
    d_h = inv_rms * (dn - unit * (dn * unit).mean(-1, keepdim=True)) + d_residual.to(wide)
    return d_h.to(dz.dtype), (dx * unit).sum(0)


def loss(x, wlm, labels):
    return F.cross_entropy((x @ wlm.t()).float(), labels)


def block(a, h0, wo, wgu, wd, wqkv, g2, g1, cos, sin, width):
    h1 = h0 + a @ wo.t()
    h2 = h1 + swiglu(norm(h1, g2) @ wgu.t()) @ wd.t()
    return h2, rotated(norm(h2, g1) @ wqkv.t(), cos, sin, width)


def block_split(a, h0, wo, wgu, wd, wqkv, g2, g1, cos, sin, width):
    """gate, up, q with k, and v as products of their own."""
    h1 = h0 + a @ wo.t()
    n, ffn = norm(h1, g2), wgu.shape[0] // 2
    h2 = h1 + (F.silu(n @ wgu[:ffn].t()) * (n @ wgu[ffn:].t())) @ wd.t()
    n = norm(h2, g1)
    return h2, rotated_heads(n @ wqkv[:width].t(), cos, sin), n @ wqkv[width:].t()


# ---- the cases


class Maker:
    def __init__(self, device="cuda", dtype=torch.bfloat16, tokens=16384, loss_tokens=4096, vocab=VOCAB):
        self.device, self.dtype, self.tokens, self.loss_tokens, self.vocab = device, dtype, tokens, loss_tokens, vocab

    def normal(self, *shape, scale=1.0):
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * scale

    def weight(self, rows, cols):
        return self.normal(rows, cols, scale=cols**-0.5)

    def ones(self, count):
        return torch.ones(count, device=self.device)

    def operators(self, d, prefix="op", tokens=None, ffn=None):
        """A function for each case, so that only one has its tensors at a time."""
        m = tokens or self.tokens
        ffn = ffn or (8 * d // 3 + 255) // 256 * 256

        def rope():
            x, w = self.normal(m, d), self.weight(3 * d, d)
            cos, sin = angles(m, 128, x)

            def split():
                return rotated_heads(x @ w[: 2 * d].t(), cos, sin), x @ w[2 * d :].t()

            return Case(f"{prefix}.rope", d, 6 * m * d * d, {"x": x, "wqkv": w, "inv_rms": self.ones(m)}, ["qkv"],
                        {"torch_compile": lambda: rotated(x @ w.t(), cos, sin, 2 * d), "torch_compile_split": split},
                        lambda: x @ w.t())  # fmt: skip

        def swiglu_forward():
            x, w = self.normal(m, d), self.weight(2 * ffn, d)
            return Case(f"{prefix}.swiglu", d, 4 * m * d * ffn, {"x": x, "wgu": w, "inv_rms": self.ones(m)}, ["y", "z"],
                        {"torch_compile": lambda: swiglu_product(x, w), "torch_compile_split": lambda: swiglu_product_split(x, w)},
                        lambda: x @ w.t(), further=liger_swiglu(x, w))  # fmt: skip

        def residual_rms():
            x, w, r, g = self.normal(m, d), self.weight(d, d), self.normal(m, d), self.normal(d)
            return Case(f"{prefix}.residual_rms", d, 2 * m * d * d, {"x": x, "wo": w, "residual": r}, ["h", None],
                        {"torch_compile": lambda: residual_norm(x, w, r, g)}, lambda: x @ w.t())  # fmt: skip

        def swiglu_b():
            dh, w, z = self.normal(m, d), self.weight(d, ffn), self.normal(m, 2 * ffn)
            return Case(f"{prefix}.swiglu_b", d, 2 * m * d * ffn, {"dh": dh, "wd": w, "z": z, "inv_rms": self.ones(m)},
                        ["d_gate", "d_up", "y"],
                        {"torch_compile": lambda: swiglu_backward(dh, w, z),
                         "torch_compile_split": lambda: swiglu_backward_joined(dh, w, z)}, lambda: dh @ w)  # fmt: skip

        def norm_b():
            dz, w, h = self.normal(m, 2 * ffn), self.weight(2 * ffn, d), self.normal(m, d)
            g, r = self.normal(d), self.normal(m, d)
            return Case(f"{prefix}.norm_b", d, 4 * m * d * ffn, {"dz": dz, "wgu": w, "h": h, "gamma": g, "d_residual": r},
                        [None, None], {"torch_compile": lambda: norm_backward(dz, w, h, g, r)}, lambda: dz @ w)  # fmt: skip

        def loss_forward(gradients):
            tokens_of_loss = tokens or self.loss_tokens
            x, w = self.normal(tokens_of_loss, d), self.weight(self.vocab, d)
            labels = torch.randint(0, self.vocab, (tokens_of_loss,), device=self.device)
            inputs, flops = {"x": x, "wlm": w, "labels": labels}, 2 * tokens_of_loss * d * self.vocab
            if not gradients:
                return Case(f"{prefix}.loss", d, flops, inputs, ["loss"], {"torch_compile": lambda: loss(x, w, labels)},
                            lambda: x @ w.t())  # fmt: skip
            leaves, dl = [v.detach().requires_grad_() for v in (x, w)], self.normal(tokens_of_loss, self.vocab)
            compiled = torch.compile(loss, fullgraph=True, dynamic=False) if self.device == "cuda" else loss

            def trained(function):
                value = function()
                return value.detach(), *torch.autograd.grad(value, leaves)

            return Case(f"{prefix}.loss_fb", d, 3 * flops, inputs, ["loss", "d_x", "d_wlm"],
                        {"torch_compile": lambda: trained(lambda: compiled(*leaves, labels))},
                        lambda: (x @ w.t(), dl @ w, dl.t() @ x), compiled=False,
                        further=liger_loss(trained, leaves, labels))  # fmt: skip

        return {"rope": rope, "swiglu": swiglu_forward, "residual_rms": residual_rms, "swiglu_b": swiglu_b, "norm_b": norm_b,
                "loss": lambda: loss_forward(False), "loss_fb": lambda: loss_forward(True)}  # fmt: skip

    def blocks(self, d, prefix, ffn, kv, head_dim):
        m, width = self.tokens, d + kv
        columns = width + kv

        def made(backward):
            weights = {"a": self.normal(m, d), "h0": self.normal(m, d), "wo": self.weight(d, d), "wgu": self.weight(2 * ffn, d),
                       "wd": self.weight(d, ffn), "wqkv": self.weight(columns, d), "g2": self.normal(d), "g1": self.normal(d)}  # fmt: skip
            a, h0, wo, wgu, wd, wqkv = (weights[k] for k in ("a", "h0", "wo", "wgu", "wd", "wqkv"))
            cos, sin = angles(m, head_dim, a)
            y = self.normal(m, ffn)
            flops = 2 * m * (d * d + 3 * ffn * d + columns * d)

            def forward():
                return a @ wo.t(), h0 @ wgu.t(), y @ wd.t(), h0 @ wqkv.t()

            if not backward:
                values = (*weights.values(), cos, sin, width)
                return Case(f"{prefix}.fwd", d, flops, weights, ["h2", "qkv"],
                            {"torch_compile": lambda: block(*values), "torch_compile_split": lambda: block_split(*values)},
                            forward)  # fmt: skip
            dqkv, dz, dh2 = self.normal(m, columns), self.normal(m, 2 * ffn), self.normal(m, d)
            leaves = [w.detach().requires_grad_() for w in weights.values()]

            def trained(function, upstream):
                if self.device == "cuda":
                    function = torch.compile(function, fullgraph=True, dynamic=False)
                return lambda: torch.autograd.grad(function(*leaves, cos, sin, width), leaves, upstream)

            def gemms():
                forward()
                return (dqkv @ wqkv, dqkv.t() @ h0, h0 @ wd, h0.t() @ y, dz @ wgu, dz.t() @ h0, h0 @ wo, h0.t() @ a)

            return Case(f"{prefix}.fwd_bwd", d, 3 * flops, weights | {"d_h2": dh2, "d_qkv": dqkv},
                        ["d_" + name for name in weights],
                        {"torch_compile": trained(block, (dh2, dqkv)),
                         "torch_compile_split": trained(block_split, (dh2, dqkv[:, :width], dqkv[:, width:]))},
                        gemms, compiled=False)  # fmt: skip

        return {"fwd": lambda: made(False), "fwd_bwd": lambda: made(True)}

    def all(self, hidden):
        """(name, function that makes the case), in the order of hidden sizes."""
        for d in hidden:
            for name, make in self.operators(d).items():
                yield "op." + name, make
            for name, make in self.blocks(d, "block", (8 * d // 3 + 255) // 256 * 256, d, 128).items():
                yield "block." + name, make
            if d in LLAMA:
                kv, ffn, head_dim = LLAMA[d]
                for name, make in self.blocks(d, "llama", ffn, kv, head_dim).items():
                    yield "llama." + name, make
            for name, make in self.operators(d, "sq", tokens=d, ffn=d // 2).items():
                if name in ("rope", "swiglu", "loss"):
                    yield "sq." + name, make


def liger_swiglu(x, wgu):
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    ffn = wgu.shape[0] // 2
    return {"liger": lambda: LigerSiLUMulFunction.apply(x @ wgu[:ffn].t(), x @ wgu[ffn:].t())}


def liger_loss(trained, leaves, labels):
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return {}
    return {"liger": lambda: trained(lambda: LigerFusedLinearCrossEntropyFunction.apply(*leaves, labels)[0])}


# ---- coda


class Coda:
    """The C functions of libcoda_bench.so (src/bench/torch/library.cc)."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.coda_bench_error.restype = ctypes.c_char_p

    def error(self):
        return self.library.coda_bench_error().decode()

    def open(self, case):
        """None where coda has no such case."""
        names = (ctypes.c_char_p * len(case.inputs))(*[name.encode() for name in case.inputs])
        addresses = (ctypes.c_void_p * len(case.inputs))(*[x.data_ptr() for x in case.inputs.values()])
        handle = self.library.coda_bench_open(case.name.encode(), case.d, len(case.inputs), names, addresses)
        if handle == -1:
            return None
        if handle < 0:
            raise SystemExit(f"{case.name}, d = {case.d}: {self.error()}")
        return handle

    def runner(self, handle):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        return lambda: self.library.coda_bench_run(handle, 1, stream)

    def check(self, handle, case, wanted):
        for name, want in zip(case.outputs, wanted):
            if name is None:
                continue
            got = torch.full_like(want, float("nan"))
            if self.library.coda_bench_result(handle, name.encode(), ctypes.c_void_p(got.data_ptr())):
                raise SystemExit(f"{case.name}, d = {case.d}, {name}: {self.error()}")
            apart = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not apart < 2e-2:
                raise SystemExit(f"{case.name}, d = {case.d}: {name} differs from torch's by {apart:.1e}")

    def close(self, handle):
        self.library.coda_bench_close(handle)


# ---- the clock


class Card:
    """The GPU's clock and power by NVML, where it is there."""

    def __init__(self):
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self.device = ctypes.c_void_p()
            bad = self.nvml.nvmlInit_v2() or self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))
        except OSError:
            bad = True
        if bad:
            self.nvml = None

    def state(self):
        """MHz and watts."""
        if self.nvml is None:
            return float("nan"), float("nan")
        mhz, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(mhz))
        self.nvml.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(milliwatts))
        return float(mhz.value), milliwatts.value / 1e3


class Clock:
    def __init__(self):
        self.card = Card()
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def back_to_back(self, run, launches):
        """Milliseconds of a launch, and the card's state in the middle of them."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(launches):
            if i == launches // 2:
                middle = torch.cuda.Event()
                middle.record()
            run()
        end.record()
        middle.synchronize()
        state = self.card.state()
        end.synchronize()
        return begin.elapsed_time(end) / launches, state

    def alone(self, run):
        self.flush.zero_()
        torch.cuda.synchronize()
        time.sleep(0.015)
        torch.cuda._sleep(2_000_000)
        return self.back_to_back(run, 1)[0]


def measure(case, coda, clock, o):
    runs = {"cublas_gemms": case.gemms}
    for name, function in case.torch.items():
        runs[name] = torch.compile(function, fullgraph=True, dynamic=False) if case.compiled else function
    runs |= case.further
    handle = coda.open(case) if coda else None
    if handle is not None:
        runs["coda"] = coda.runner(handle)
        runs["coda"]()
        wanted = runs["torch_compile"]()
        coda.check(handle, case, wanted if isinstance(wanted, (tuple, list)) else [wanted])
        del wanted
    for run in runs.values():
        run()
        run()
    ms = {name: clock.back_to_back(run, 2)[0] for name, run in runs.items()}
    times = {(name, regime): [] for name in runs for regime in ("sustained", "cool")}
    states = {name: [] for name in runs}
    for _ in range(o.rounds):
        for name in random.sample(list(runs), len(runs)):
            clock.back_to_back(runs[name], max(1, round(1e3 * o.settle / ms[name])))
            took, state = clock.back_to_back(runs[name], max(1, round(1e3 * o.measure / ms[name])))
            times[name, "sustained"].append(took)
            states[name].append(state)
        for name in random.sample(list(runs) * 3, 3 * len(runs)):
            times[name, "cool"].append(clock.alone(runs[name]))
    if handle is not None:
        coda.close(handle)
    rows = []
    for (name, regime), values in times.items():
        took = statistics.median(values)
        row = {"case": case.name, "d": case.d, "impl": name, "regime": regime, "ms": round(took, 5),
               "low": round(min(values), 5), "high": round(max(values), 5),
               "tflops": round(case.flops / took / 1e9, 1)}  # fmt: skip
        if regime == "sustained":
            mhz, watt = (statistics.median(column) for column in zip(*states[name]))
            row |= {"mhz": mhz, "watt": round(watt, 1)}
        rows.append(row)
    return rows


def text_of(rows):
    lines = []
    for regime in ("sustained", "cool"):
        of_regime = sorted((row for row in rows if row["regime"] == regime), key=lambda row: row["ms"])
        times = {row["impl"]: row["ms"] for row in of_regime}
        best = min(v for k, v in times.items() if k.startswith("torch"))
        ratio = f"; torch ÷ coda {best / times['coda']:.3f}" if "coda" in times else ""
        # With the range: under the power limit a card has two states, and a median may be of either.
        lines.append(f"  {regime:9} " + ", ".join("{impl} {ms:.4f} ({low:.4f} to {high:.4f})".format(**row) for row in of_regime) + ratio)
    return f"{rows[0]['case']}, d = {rows[0]['d']}, ms\n" + "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--coda", metavar="FILE", help="libcoda_bench.so, which `make cuda` builds")
    p.add_argument("--cases", nargs="+", default=["op.*", "block.*"], metavar="PATTERN")
    p.add_argument("--hidden", nargs="+", type=int, default=[2048, 4096, 8192], metavar="D")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--settle", type=float, default=0.2, metavar="SECONDS")
    p.add_argument("--measure", type=float, default=0.25, metavar="SECONDS")
    p.add_argument("--json", metavar="FILE")
    o = p.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("beside_torch.py needs a GPU, and PyTorch sees none")
    torch.manual_seed(0)
    random.seed(0)
    coda, clock = Coda(o.coda) if o.coda else None, Clock()
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "settle_s": o.settle, "measure_s": o.measure,
              "rounds": o.rounds, "beside_torch": []}  # fmt: skip
    chosen = [make for name, make in Maker().all(o.hidden) if any(fnmatch.fnmatch(name, pattern) for pattern in o.cases)]
    if not chosen:
        raise SystemExit(f"no case is called {' or '.join(o.cases)}")
    for make in chosen:
        rows = measure(make(), coda, clock, o)
        print(text_of(rows), flush=True)
        report["beside_torch"] += rows
        if o.json:
            with open(o.json, "w") as file:
                json.dump(report, file)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
