"""Every operator of coda_torch beside its formula, at sizes that are no multiple of a block."""

import functools

import coda_torch
import reference
import torch
import torch.nn.functional as F
from reference import Case

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, EPS = 68, 88, 4, 2, 32, 1e-5
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
INV_FREQ = 1e4 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
TURNS = coda_torch.rotary_turns(INV_FREQ, HEADS, KV_HEADS)
MLP = {
    "wo": (WIDTH, Q), "gamma_mlp": (WIDTH,), "w_gate": (FFN, WIDTH), "w_up": (FFN, WIDTH), "w_down": (WIDTH, FFN),
}  # fmt: skip
QKV = {"wq": (Q, WIDTH), "wk": (KV, WIDTH), "wv": (KV, WIDTH)}
BIASES = {"bq": (Q,), "bk": (KV,), "bv": (KV,)}
GLU = {"w_gate": (FFN, WIDTH), "w_up": (FFN, WIDTH)}


def positions(tokens):
    return {"position": torch.arange(torch.Size(tokens).numel()).view(tokens) * 7 % 50}


def block(*, position, **operands):
    h, q, k, v = coda_torch.block(**operands, position=position, turns=TURNS, head_dim=HEAD_DIM, eps=EPS)
    return h, reference.unpacked(q, HEAD_DIM), reference.unpacked(k, HEAD_DIM), v


def block_formula(*, gamma_attention, wq, wk, wv, position, bq=None, bk=None, bv=None, **operands):
    h = reference.block_tail(**operands, eps=EPS)
    return h, *reference.qkv(h, gamma_attention, wq, wk, wv, position, INV_FREQ, HEAD_DIM, EPS, bq, bk, bv)


def norm_linear_rope(*, position, **operands):
    q, k, v = coda_torch.norm_linear_rope(**operands, position=position, turns=TURNS, head_dim=HEAD_DIM, eps=EPS)
    return reference.unpacked(q, HEAD_DIM), reference.unpacked(k, HEAD_DIM), v


def norm_linear_swiglu_formula(h, gamma, w_gate, w_up):
    return reference.glu(reference.rms_norm(h, gamma, EPS), w_gate, w_up, F.silu)


def labels(tokens):
    label = torch.randint(0, 101, tokens)
    label.flatten()[1::4] = -100
    return {"labels": label}


CASES = {
    "block": Case(
        block,
        block_formula,
        {"a": Q, "h": WIDTH},
        {**MLP, "gamma_attention": (WIDTH,), **QKV},
        positions,
    ),
    "block with biases": Case(
        block,
        block_formula,
        {"a": Q, "h": WIDTH},
        {**MLP, "gamma_attention": (WIDTH,), **QKV, **BIASES},
        positions,
    ),
    "block_tail": Case(
        functools.partial(coda_torch.block_tail, eps=EPS),
        functools.partial(reference.block_tail, eps=EPS),
        {"a": Q, "h": WIDTH},
        MLP,
    ),
    "norm_linear_rope": Case(
        norm_linear_rope,
        functools.partial(reference.qkv, inv_freq=INV_FREQ, head_dim=HEAD_DIM, eps=EPS),
        {"h": WIDTH},
        {"gamma": (WIDTH,), **QKV},
        positions,
    ),
    "norm_linear_rope with biases": Case(
        norm_linear_rope,
        functools.partial(reference.qkv, inv_freq=INV_FREQ, head_dim=HEAD_DIM, eps=EPS),
        {"h": WIDTH},
        {"gamma": (WIDTH,), **QKV, **BIASES},
        positions,
    ),
    "norm_linear_swiglu": Case(
        functools.partial(coda_torch.norm_linear_swiglu, eps=EPS),
        norm_linear_swiglu_formula,
        {"h": WIDTH},
        {"gamma": (WIDTH,), **GLU},
    ),
    "linear_swiglu": Case(
        coda_torch.linear_swiglu, functools.partial(reference.glu, activation=F.silu), {"x": WIDTH}, GLU
    ),
    "linear_geglu_erf": Case(
        coda_torch.linear_geglu, functools.partial(reference.glu, activation=F.gelu), {"x": WIDTH}, GLU
    ),
    "linear_geglu_tanh": Case(
        functools.partial(coda_torch.linear_geglu, approximate="tanh"),
        functools.partial(reference.glu, activation=reference.gelu_tanh),
        {"x": WIDTH},
        GLU,
    ),
    "linear_residual": Case(
        coda_torch.linear_residual,
        lambda x, weight, residual: reference.linear(x, weight) + residual,
        {"x": 29, "residual": 53},
        {"weight": (53, 29)},
    ),
    "linear_cross_entropy": Case(
        functools.partial(coda_torch.linear_cross_entropy, reduction="sum"),
        lambda x, weight, labels: reference.cross_entropy(x, weight, labels, reduction="sum")[0],
        {"x": WIDTH},
        {"weight": (101, WIDTH)},
        labels,
    ),
    "linear_cross_entropy_of_tokens": Case(
        functools.partial(coda_torch.linear_cross_entropy, reduction="none"),
        lambda x, weight, labels: reference.cross_entropy(x, weight, labels, reduction="none")[0],
        {"x": WIDTH},
        {"weight": (101, WIDTH)},
        labels,
    ),
}
