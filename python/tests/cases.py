"""Every operator of coda_torch beside its formula, at sizes that are no multiple of a block."""

import functools
import math

import coda_torch
import reference
import torch
import torch.nn.functional as F
from reference import Case

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM, EPS = 68, 88, 4, 2, 32, 1e-5
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
NORMED_DIM = Q // 2  # of two heads: norms over heads are of 64 columns, or of 128


def inv_freq(head_dim):
    return 1e4 ** (-torch.arange(head_dim // 2) / (head_dim // 2))


def turns(head_dim):
    return coda_torch.rotary_turns(inv_freq(head_dim), Q // head_dim, KV // head_dim)


INV_FREQ, TURNS = inv_freq(HEAD_DIM), turns(HEAD_DIM)
MLP = {
    "wo": (WIDTH, Q), "gamma_mlp": (WIDTH,), "w_gate": (FFN, WIDTH), "w_up": (FFN, WIDTH), "w_down": (WIDTH, FFN),
}  # fmt: skip
QKV = {"wq": (Q, WIDTH), "wk": (KV, WIDTH), "wv": (KV, WIDTH)}
BIASES = {"bq": (Q,), "bk": (KV,), "bv": (KV,)}
NORMS = {"q_norm": (NORMED_DIM,), "k_norm": (NORMED_DIM,)}
GLU = {"w_gate": (FFN, WIDTH), "w_up": (FFN, WIDTH)}


def positions(tokens):
    return {"position": torch.arange(torch.Size(tokens).numel()).view(tokens) * 7 % 50}


def block(*, position, head_dim=HEAD_DIM, **operands):
    h, q, k, v = coda_torch.block(**operands, position=position, turns=turns(head_dim), head_dim=head_dim, eps=EPS)
    return h, reference.unpacked(q, head_dim), reference.unpacked(k, head_dim), v


def block_formula(*, gamma_attention, wq, wk, wv, position, head_dim=HEAD_DIM, **operands):
    of_heads = {name: operands.pop(name) for name in (*BIASES, *NORMS) if name in operands}
    h = reference.block_tail(**operands, eps=EPS)
    return h, *reference.qkv(
        h, gamma_attention, wq, wk, wv, position, inv_freq(head_dim), head_dim, EPS, **of_heads
    )  # fmt: skip


def norm_linear_rope(*, position, head_dim=HEAD_DIM, **operands):
    q, k, v = coda_torch.norm_linear_rope(
        **operands, position=position, turns=turns(head_dim), head_dim=head_dim, eps=EPS
    )  # fmt: skip
    return reference.unpacked(q, head_dim), reference.unpacked(k, head_dim), v


def norm_linear_rope_formula(*, head_dim=HEAD_DIM, **operands):
    return reference.qkv(**operands, inv_freq=inv_freq(head_dim), head_dim=head_dim, eps=EPS)


def rope_case(head_dim=HEAD_DIM, **more):
    """norm_linear_rope with these operands in front of the rotation."""
    return Case(
        functools.partial(norm_linear_rope, head_dim=head_dim),
        functools.partial(norm_linear_rope_formula, head_dim=head_dim),
        {"h": WIDTH},
        {"gamma": (WIDTH,), **QKV, **more},
        positions,
    )


def block_case(head_dim=HEAD_DIM, **more):
    return Case(
        functools.partial(block, head_dim=head_dim),
        functools.partial(block_formula, head_dim=head_dim),
        {"a": Q, "h": WIDTH},
        {**MLP, "gamma_attention": (WIDTH,), **QKV, **more},
        positions,
    )


def norm_linear_swiglu_formula(h, gamma, w_gate, w_up):
    return reference.glu(reference.rms_norm(h, gamma, EPS), w_gate, w_up, F.silu)


def labels(tokens):
    label = torch.randint(0, 101, tokens)
    label.flatten()[1::4] = -100
    return {"labels": label}


CASES = {
    "block": block_case(),
    "block with biases": block_case(**BIASES),
    "block with norms over heads": block_case(NORMED_DIM, **NORMS),
    "block_tail": Case(
        functools.partial(coda_torch.block_tail, eps=EPS),
        functools.partial(reference.block_tail, eps=EPS),
        {"a": Q, "h": WIDTH},
        MLP,
    ),
    "norm_linear_rope": rope_case(),
    "norm_linear_rope with biases": rope_case(**BIASES),
    "norm_linear_rope with norms over heads": rope_case(NORMED_DIM, **NORMS),
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
    "linear_clamped_swiglu": Case(
        functools.partial(coda_torch.linear_clamped_swiglu, limit=math.inf, alpha=1.5),
        functools.partial(reference.clamped_swiglu, limit=math.inf, alpha=1.5),
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
