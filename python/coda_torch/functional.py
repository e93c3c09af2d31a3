"""The operators as functions: any leading dimensions, autocast, and errors that name the operand.

M tokens (all leading dimensions together), width d, hidden F. Weights are [out, in], as torch.nn.Linear keeps them, and may
be float32 or bfloat16 whatever the activations are; every gradient has its parameter's type. Activations are float32 or
bfloat16, on a GPU bfloat16. Sums are of float32, and a value is rounded once, when it is stored.
"""

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from .operators import coda

_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_GLU = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_CLAMPED = 3  # of operators outside layers
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # by torch's name of the approximation
NORMED_HEADS = (64, 128)  # what norms over heads are compiled for
_INT32 = torch.iinfo(torch.int32)


def _shape(x):
    return "x".join(str(n) for n in x.shape) or "a single value"


# Checks run in every call: what an error would say is put together only where there is one, and what would change nothing is not
# asked of PyTorch, where each question costs as much as a check.


def _refuse(operand, got, needs, error=ValueError):
    raise error(f"{operand} is {got}; it needs {needs}")


def _is_spread(x):
    return type(x).__name__ == "DTensor"


def _check_tensor(x, name, like=None):
    """Whether x is a DTensor."""
    kind = type(x)
    plain = kind is Tensor or kind is Parameter
    if not plain and not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {kind.__name__}; it needs to be a tensor")
    spread = not plain and _is_spread(x)
    if spread:
        from . import sharding  # noqa: F401  has the operators' rules
    # A DTensor's local part is not the tensor that is meant.
    if like is not None and spread != _is_spread(like):
        if spread:
            raise TypeError(f"{name} is a DTensor beside plain tensors; gather it first, with full_tensor()")
        raise TypeError(f"{name} is a plain tensor beside DTensors; distribute it, or gather them first, with full_tensor()")
    return spread


def _activations(x, name, width=None):
    """x in the type that it is computed in, as a matrix of tokens, and its leading dimensions."""
    spread = _check_tensor(x, name)
    dims = x.dim()
    if dims == 0:
        _refuse(name, "a single value", "at least one dimension")
    on_gpu = x.is_cuda
    if not on_gpu and not x.is_cpu:
        _refuse(name, f"on {x.device}", "a CPU or a CUDA device", NotImplementedError)
    device = "cuda" if on_gpu else "cpu"
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    dtype = x.dtype
    if dtype != torch.bfloat16 and (on_gpu or dtype != torch.float32):
        _refuse(name, f"of {dtype}", "bfloat16 on a GPU" if on_gpu else "float32 or bfloat16", TypeError)
    shape = x.shape
    if width is not None and shape[-1] != width:
        _refuse(name, _shape(x), f"a last dimension of {width}")
    if spread and any(0 < getattr(placement, "dim", 0) < dims - 1 for placement in x.placements):
        _refuse(name, f"of {x.placements}", "its rows to be sharded in the first dimension, or gathered", NotImplementedError)
    lead = shape[:-1]
    return (x if dims == 2 else x.reshape(lead.numel(), shape[-1])).contiguous(), lead


def _beside(x, name, width, like, like_name):
    """x as a matrix of the tokens and of the type of `like`."""
    _check_tensor(x, name, like)
    x, _ = _activations(x, name, width)
    if x.device != like.device:
        _refuse(name, f"on {x.device}", f"to be on {like.device}, as {like_name} is")
    if x.shape[0] != like.shape[0]:
        _refuse(name, f"of {x.shape[0]} tokens", f"{like.shape[0]}, as {like_name} has")
    return x if x.dtype == like.dtype else x.to(like.dtype)


def _lead(x, lead):
    """x with the leading dimensions that the caller's tensors have."""
    return x if len(lead) == 1 else x.view(*lead, x.shape[-1])


def _parameter(x, name, like, shape):
    """x, a parameter of this shape; None in it: any size."""
    _check_tensor(x, name, like)
    if x.device != like.device:
        _refuse(name, f"on {x.device}", f"to be on {like.device}, as the activations are")
    dtype = x.dtype
    if dtype != torch.bfloat16 and dtype != torch.float32:
        _refuse(name, f"of {dtype}", "float32 or bfloat16", TypeError)
    got = x.shape
    fits = len(got) == len(shape)
    for n, m in zip(shape, got):
        fits = fits and (n is None or n == m)
    if not fits:
        _refuse(name, _shape(x), "x".join("any" if n is None else str(n) for n in shape))
    return x.contiguous()


def _multiple(n, of, what):
    if n % of != 0:
        _refuse(what, n, f"a multiple of {of}")


def _keeps(*tensors):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _gate_up(w_gate, w_up, x):
    w_gate = _parameter(w_gate, "w_gate", x, (None, x.shape[1]))
    _multiple(w_gate.shape[0], 8, "w_gate's number of rows")
    return w_gate, _parameter(w_up, "w_up", x, tuple(w_gate.shape))


def _glu(activation):
    if activation not in _GLU:
        raise ValueError(f"activation is {activation!r}; it needs to be 'silu', 'gelu' or 'gelu_tanh'")
    return _GLU[activation]


def _mlp(a, h, wo, gamma_mlp, w_gate, w_up, w_down):
    """Attention's output and the stream as matrices, the stream's leading dimensions, and the weights, checked."""
    h, lead = _activations(h, "h")
    wo = _parameter(wo, "wo", h, (h.shape[1], None))
    a = _beside(a, "a", wo.shape[1], h, "h")
    w_gate, w_up = _gate_up(w_gate, w_up, h)
    w_down = _parameter(w_down, "w_down", h, (h.shape[1], w_gate.shape[0]))
    gamma_mlp = _parameter(gamma_mlp, "gamma_mlp", h, (h.shape[1],))
    return a, h, lead, (wo, gamma_mlp, w_gate, w_up, w_down)


def _qkv(wq, wk, wv, x, head_dim):
    _multiple(head_dim, 16, "head_dim")
    wq = _parameter(wq, "wq", x, (None, x.shape[1]))
    wk = _parameter(wk, "wk", x, (None, x.shape[1]))
    for w, name in ((wq, "wq"), (wk, "wk")):
        if w.shape[0] % head_dim != 0:
            _refuse(f"{name}'s number of rows", w.shape[0], f"a multiple of head_dim, {head_dim}")
    return wq, wk, _parameter(wv, "wv", x, tuple(wk.shape))


def _all_or_none(given, whose):
    """Whether operands that belong together are there."""
    missing = [name for name, x in given.items() if x is None]
    if missing and len(missing) < len(given):
        there = next(name for name in given if name not in missing)
        raise TypeError(f"{missing[0]} is None beside {there}; it needs to be a tensor: {whose} or none has")
    return not missing


def _in_front_of_rotation(bq, bk, bv, q_norm, k_norm, wq, wk, x, head_dim):
    """The optional operands (bq, bk, bv, q_norm, k_norm): biases, or norms over heads, or neither."""
    biased = _all_or_none({"bq": bq, "bk": bk, "bv": bv}, "q, k and v have biases")
    normed = _all_or_none({"q_norm": q_norm, "k_norm": k_norm}, "q and k have norms")
    if biased and normed:
        raise NotImplementedError("q_norm is beside bq; coda has biases or norms over heads in front of the rotation")
    if biased:
        bq, bk, bv = (_parameter(b, n, x, w.shape[:1]) for b, n, w in ((bq, "bq", wq), (bk, "bk", wk), (bv, "bv", wk)))
    if normed:
        if head_dim not in NORMED_HEADS:
            _refuse("head_dim", f"{head_dim} beside q_norm", "64 or 128", NotImplementedError)
        q_norm, k_norm = (_parameter(w, n, x, (head_dim,)) for w, n in ((q_norm, "q_norm"), (k_norm, "k_norm")))
    return bq, bk, bv, q_norm, k_norm


def _rotary(position, turns, x, width):
    _check_tensor(position, "position", x)
    if position.is_floating_point():
        _refuse("position", f"of {position.dtype}", "integers", TypeError)
    if position.numel() != x.shape[0]:
        _refuse("position", f"of {position.numel()} tokens", f"{x.shape[0]}, one for each token")
    _check_tensor(turns, "turns", x)
    if tuple(turns.shape) != (2, width // 2):
        _refuse("turns", _shape(turns), f"2x{width // 2} (coda_torch.rotary_turns)")
    if turns.dtype != torch.float32:
        _refuse("turns", f"of {turns.dtype}", "float32 (coda_torch.rotary_turns)", TypeError)
    position = position.reshape(-1)
    return (position if position.dtype == torch.int32 else position.to(torch.int32)).contiguous(), turns


def rotary_turns(inv_freq: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rotary frequencies for norm_linear_rope and block, [2, (heads + 2 kv_heads) · head_dim / 2].

    inv_freq [head_dim / 2]: radians per position, already scaled if they are (Llama 3), as Hugging Face's rotary_emb.inv_freq.
    In turns, as a float and what it leaves of the exact quotient, so that positions up to 2^24 keep their fraction of a turn.
    """
    _check_tensor(inv_freq, "inv_freq")
    turns = inv_freq.double() / (2 * torch.pi)
    high = turns.float()
    low = (turns - high.double()).float()
    of_head = torch.stack((high, low))
    return torch.cat((of_head.repeat(1, heads + kv_heads), of_head.new_zeros(2, kv_heads * inv_freq.numel())), 1)


def _split_heads(qkv, lead, wq, wk, wv):
    q, k, v = qkv.split((wq.shape[0], wk.shape[0], wv.shape[0]), -1)
    return _lead(q, lead), _lead(k, lead), _lead(v, lead)


def block(
    a, h, wo, gamma_mlp, w_gate, w_up, w_down, gamma_attention, wq, wk, wv, position, turns, *, head_dim, eps=1e-6,
    activation="silu", bq=None, bk=None, bv=None, q_norm=None, k_norm=None,
):  # fmt: skip
    """From one layer's attention to the next one's: (h_next, q, k, v).

        h_mid  = h + a woᵀ
        h_next = h_mid + (f(x w_gateᵀ) · (x w_upᵀ)) w_downᵀ, x = norm(h_mid; gamma_mlp)
        q, k, v = norm(h_next; gamma_attention) by wq, wk, wv, plus bq, bk, bv
        q, k    = norm(q; q_norm), norm(k; k_norm) over every head, turned by their positions

    a [..., heads · head_dim]: attention's output; h [..., d]: the residual stream; position [...]: integers; turns: rotary_turns.
    activation: f, "silu", "gelu" (erf's) or "gelu_tanh". The weight of a norm is what multiplies: of Gemma's, 1 + weight in float32.
    Biases (Qwen 2) are one for each row of wq, wk, wv, all of them or none. Norms over heads (Qwen 3) are q_norm and k_norm
    [head_dim], both or none, with a head_dim of 64 or 128 and no biases: NotImplementedError otherwise. q and k come in packed order:
    within a head, dimensions i and i + head_dim / 2 stand in blocks of 8. Their dot products are what they would be otherwise. For
    the backward pass h_mid, h_next, q, k, v, gate and up are kept, and under norms over heads what they take, too. head_dim is a
    multiple of 16, F of 8.
    """
    a, h, lead, of_mlp = _mlp(a, h, wo, gamma_mlp, w_gate, w_up, w_down)
    gamma_attention = _parameter(gamma_attention, "gamma_attention", h, (h.shape[1],))
    wq, wk, wv = _qkv(wq, wk, wv, h, head_dim)
    position, turns = _rotary(position, turns, h, wq.shape[0] + 2 * wk.shape[0])
    of_heads = _in_front_of_rotation(bq, bk, bv, q_norm, k_norm, wq, wk, h, head_dim)
    weights = (*of_mlp, gamma_attention, wq, wk, wv, *of_heads)
    h_next, qkv, *_ = coda.block(a, h, *weights, position, turns, head_dim, _glu(activation), eps, _keeps(a, h, *weights))
    return (_lead(h_next, lead), *_split_heads(qkv, lead, wq, wk, wv))


def block_tail(a, h, wo, gamma_mlp, w_gate, w_up, w_down, *, eps=1e-6, activation="silu"):
    """The last layer's part of block: h_next [..., d]."""
    a, h, lead, weights = _mlp(a, h, wo, gamma_mlp, w_gate, w_up, w_down)
    return _lead(coda.block_tail(a, h, *weights, _glu(activation), eps, _keeps(a, h, *weights))[0], lead)


def norm_linear_rope(
    h, gamma, wq, wk, wv, position, turns, *, head_dim, eps=1e-6, bq=None, bk=None, bv=None, q_norm=None, k_norm=None
):  # fmt: skip
    """q, k and v of norm(h; gamma), with biases or norms over heads; q and k turned by their positions and in packed order. As
    block's.

    One product and a pass over h for its norm; the backward pass has one elementwise pass, over the gradients of q, k and v.
    """
    h, lead = _activations(h, "h")
    gamma = _parameter(gamma, "gamma", h, (h.shape[1],))
    wq, wk, wv = _qkv(wq, wk, wv, h, head_dim)
    position, turns = _rotary(position, turns, h, wq.shape[0] + 2 * wk.shape[0])
    weights = (gamma, wq, wk, wv, *_in_front_of_rotation(bq, bk, bv, q_norm, k_norm, wq, wk, h, head_dim))
    qkv, *_ = coda.norm_linear_rope(h, *weights, position, turns, head_dim, eps, _keeps(h, *weights))
    return _split_heads(qkv, lead, wq, wk, wv)


def _linear_glu(x, gamma, w_gate, w_up, function, eps, name, limit=math.inf, alpha=1.0):
    x, lead = _activations(x, name)
    w_gate, w_up = _gate_up(w_gate, w_up, x)
    if gamma is not None:
        gamma = _parameter(gamma, "gamma", x, (x.shape[1],))
    keep = _keeps(x, gamma, w_gate, w_up)
    return _lead(coda.norm_linear_glu(x, gamma, w_gate, w_up, function, limit, alpha, eps, keep)[0], lead)


def norm_linear_swiglu(h, gamma, w_gate, w_up, *, eps=1e-6):
    """silu(gate) · up [..., F], with gate and up of norm(h; gamma).

    One product and a pass over h; gate and up are kept. In the backward pass swiglu's derivative is an elementwise pass: only
    block, whose next product is coda's too, has it in an epilogue.
    """
    return _linear_glu(h, gamma, w_gate, w_up, _GLU["silu"], eps, "h")


def linear_swiglu(x, w_gate, w_up):
    """silu(x w_gateᵀ) · (x w_upᵀ) [..., F]. As norm_linear_swiglu without its norm."""
    return _linear_glu(x, None, w_gate, w_up, _GLU["silu"], 0.0, "x")


def linear_geglu(x, w_gate, w_up, *, approximate="none"):
    """gelu(x w_gateᵀ) · (x w_upᵀ) [..., F]; approximate: "none" is erf's, "tanh" the approximation."""
    if approximate not in _GELU:
        raise ValueError(f"approximate is {approximate!r}; it needs to be 'none' or 'tanh'")
    return _linear_glu(x, None, w_gate, w_up, _GLU[_GELU[approximate]], 0.0, "x")


def linear_clamped_swiglu(x, w_gate, w_up, *, limit=7.0, alpha=1.702):
    """g · sigmoid(alpha · g) · (u + 1) [..., F]: g is x w_gateᵀ, at most limit, u is x w_upᵀ, between -limit and limit.

    The MLP of gpt-oss, without its biases. Where a value is clamped its gradient is 0; limit=math.inf clamps nothing. The backward
    pass sees the values as they are kept: of bfloat16 one within a rounding of the limit may be on its other side there.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit!r}; it needs to be more than 0, or math.inf")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha is {alpha!r}; it needs to be finite")
    return _linear_glu(x, None, w_gate, w_up, _CLAMPED, 0.0, "x", float(limit), float(alpha))


def linear_residual(x, weight, residual):
    """x weightᵀ + residual, rounded once. The gradient of residual is the upstream one."""
    x, lead = _activations(x, "x")
    weight = _parameter(weight, "weight", x, (None, x.shape[1]))
    return _lead(coda.linear_residual(x, weight, _beside(residual, "residual", weight.shape[0], x, "x")), lead)


@torch.no_grad()
def accumulate_weight_gradient_(main_grad, d_out, x):
    """main_grad += d_outᵀ x, in place: main_grad float32 [N, K], d_out [..., N], x [..., K] of one type.

    For backward passes of one's own that keep gradients in float32 over micro-batches: one product, whose epilogue adds. Returns
    main_grad.
    """
    x, _ = _activations(x, "x")
    d_out, _ = _activations(d_out, "d_out")
    for operand, name in ((x, "x"), (d_out, "d_out"), (main_grad, "main_grad")):
        if _is_spread(operand):
            raise TypeError(f"{name} is a DTensor; give what this process has of it, with to_local()")
    if d_out.shape[0] != x.shape[0]:
        _refuse("d_out", f"of {d_out.shape[0]} tokens", f"{x.shape[0]}, as x has")
    if d_out.dtype != x.dtype:
        _refuse("d_out", f"of {d_out.dtype}", f"{x.dtype}, as x has", TypeError)
    _check_tensor(main_grad, "main_grad")
    if main_grad.dtype != torch.float32:
        _refuse("main_grad", f"of {main_grad.dtype}", "float32", TypeError)
    if main_grad.device != x.device or tuple(main_grad.shape) != (d_out.shape[1], x.shape[1]) or main_grad.stride(-1) != 1:
        _refuse("main_grad", f"{_shape(main_grad)} on {main_grad.device}",
                f"to be {d_out.shape[1]}x{x.shape[1]} on {x.device}, with columns next to each other")  # fmt: skip
    coda.accumulate_weight_gradient_(main_grad, d_out, x)
    return main_grad


def _labels(labels, ignore_index, lead, like=None):
    _check_tensor(labels, "labels", like)
    if labels.is_floating_point():
        _refuse("labels", f"of {labels.dtype}", "integers", TypeError)
    if not _INT32.min <= ignore_index <= _INT32.max:
        _refuse("ignore_index", ignore_index, "32 bits")
    if labels.shape != lead:
        _refuse("labels", _shape(labels), f"the leading dimensions of x, {tuple(lead)}")
    # What does not fit into 32 bits is no label either way, and must not become one.
    return labels.reshape(-1).clamp(_INT32.min, _INT32.max).to(torch.int32)


def linear_cross_entropy(
    x, weight, labels, *, reduction="mean", ignore_index=-100, divisor=None, token_weight=None, label_smoothing=0.0,
    z_loss=0.0, softcap=None, return_z_loss=False,
):  # fmt: skip
    """The cross-entropy of softmax(x weightᵀ) at labels; the logits [M, V] never exist whole.

    reduction "none": [...], "sum", or "mean" over the tokens whose label is not ignore_index, NaN where there are none, as in
    PyTorch. divisor: what "mean" divides by instead (the tokens of a whole step, so that micro-batches add up). token_weight [...]:
    times each token's loss; "mean" divides by their sum. z_loss m adds m · logsumexp². softcap c makes the logits c · tanh(l / c).
    With return_z_loss the result is a pair, the second the part that is z_loss, without a gradient. Losses are float32.

    Gradients of "sum" and "mean" are made with the loss (three products in all), weight's kept in float32, and scaled by the
    upstream gradient; those of "none" make the logits again. A label outside [0, V) is a ValueError that names it on a CPU; on
    a GPU, where looking would wait for the device, that token's loss is NaN.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it needs to be 'none', 'sum' or 'mean'")
    x, lead = _activations(x, "x")
    weight = _parameter(weight, "weight", x, (None, x.shape[1]))
    label = _labels(labels, ignore_index, lead, x)
    if token_weight is not None:
        _check_tensor(token_weight, "token_weight", x)
        if token_weight.shape != lead:
            _refuse("token_weight", _shape(token_weight), f"the shape of labels, {tuple(lead)}")
        token_weight = token_weight.detach().reshape(-1).float().contiguous()
    needs = _keeps(x, weight)
    try:
        loss, z, *_ = coda.linear_cross_entropy(
            x, weight, label, token_weight, _REDUCTIONS[reduction], divisor, ignore_index, label_smoothing, z_loss, softcap,
            int(needs),
        )  # fmt: skip
    except RuntimeError as error:
        if "; it needs" in str(error):  # coda's own words: an operand that cannot be
            raise ValueError(str(error)) from None
        raise
    if reduction == "none":
        loss, z = loss.view(lead), z.view(lead)
    return (loss, z) if return_z_loss else loss
