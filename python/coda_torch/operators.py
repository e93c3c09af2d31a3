"""What PyTorch must know of the operators besides their kernels: shapes without data, and derivatives.

Each operator `x` is torch.ops.coda.x, its derivative torch.ops.coda.x_backward; both are whole units for torch.compile,
checkpointing by operator name, and CUDA graphs. What a forward pass keeps is among its outputs. The derivatives have none
of their own: a second one raises.
"""

import torch
from torch.library import register_fake

from . import _library  # noqa: F401  the operators must be there

coda = torch.ops.coda


_autograd = torch.library.Library("coda", "IMPL", "Autograd")


def _differentiate(name, setup_context, backward):
    """torch.library.register_autograd without what it does in every call for default and keyword arguments, which none of coda's
    operators has: a third of an operator's time on the host."""
    operator = getattr(coda, name).default

    def below_autograd(keys, inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    def forward(ctx, *inputs):
        *inputs, keys = inputs
        output = below_autograd(keys, inputs)
        setup_context(ctx, inputs, output)
        return output

    def of_inputs(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return *backward(ctx, *gradients), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(of_inputs)}
    apply = type(f"coda_{name}", (torch.autograd.Function,), members).apply

    def run(keys, *inputs):
        if torch._C.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
            return apply(*inputs, keys)
        return below_autograd(keys, inputs)

    _autograd.impl(name, run, with_keyset=True)


def _mask(needed):
    return sum(1 << bit for bit, need in enumerate(needed) if need)


def _given(gradients, needed):
    """None in the place of what was not asked for."""
    return tuple(g if need else None for g, need in zip(gradients, needed))


def _keep(ctx, *outputs):
    """Outputs that are kept for the backward pass, and have no gradients: none is made of zeros for them either."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*outputs)


def _zeros_if_none(gradient, like):
    return torch.zeros_like(like) if gradient is None else gradient.contiguous()


def _masked(parameters, mask, absent=None):
    """What a backward operator returns for parameters: their shapes, or nothing where the mask has no bit. For an optional one
    that is None, nothing of the type of `absent`."""
    return tuple(
        torch.empty_like(p) if p is not None and mask >> bit & 1 else (absent if p is None else p).new_empty(0)
        for bit, p in enumerate(parameters)
    )


def _differentiated_once(name):
    return NotImplementedError(f"coda::{name} has no such derivative: coda_torch's operators can be differentiated once")


def _no_second_derivative(name):
    def setup(ctx, inputs, output):
        pass

    def backward(ctx, *gradients):
        raise _differentiated_once(name)

    _differentiate(name, setup, backward)


# A layer's boundary: everything between its attention and the next layer's.


@register_fake("coda::block")
def _(
    a, h, wo, gamma_mlp, w_gate, w_up, w_down, gamma_attention, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns,
    head_dim, glu, eps, keep,
):  # fmt: skip
    tokens, width = h.shape
    r = h.new_empty(tokens, dtype=torch.float32)
    qkv_width = wq.shape[0] + wk.shape[0] + wv.shape[0]
    return (
        torch.empty_like(h),
        h.new_empty(tokens, qkv_width),
        r,
        torch.empty_like(h),
        torch.empty_like(r),
        h.new_empty(tokens if keep else 0, 2 * w_gate.shape[0]),
        h.new_empty(tokens if keep and q_norm is not None else 0, qkv_width),
    )


@register_fake("coda::block_backward")
def _(
    d_h_next, d_qkv, a, h_next, qkv, inv_rms_next, h_mid, inv_rms_mid, gate_up, unnormed, wo, gamma_mlp, w_gate, w_up,
    w_down, gamma_attention, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, glu, eps, mask,
):  # fmt: skip
    parameters = (wo, gamma_mlp, w_gate, w_up, w_down, gamma_attention, wq, wk, wv, bq, bk, bv, q_norm, k_norm)
    return (torch.empty_like(a), torch.empty_like(h_next), *_masked(parameters, mask, absent=wq))


def _block_setup(ctx, inputs, output):
    a, h, *weights = inputs[:16]
    position, turns, *ctx.options, _ = inputs[16:]
    h_next, qkv, *kept = output
    _keep(ctx, *kept)
    ctx.save_for_backward(a, h_next, qkv, *kept, *weights, position, turns)


def _block_backward(ctx, d_h_next, d_qkv, *_):
    a, h_next, qkv, *saved = ctx.saved_tensors
    needed = ctx.needs_input_grad[2:16]
    d_a, d_h, *d_weights = coda.block_backward(
        _zeros_if_none(d_h_next, h_next), _zeros_if_none(d_qkv, qkv), a, h_next, qkv, *saved, *ctx.options, _mask(needed)
    )
    return (d_a, d_h, *_given(d_weights, needed), None, None, None, None, None, None)


_differentiate("block", _block_setup, _block_backward)
_no_second_derivative("block_backward")


@register_fake("coda::block_tail")
def _(a, h, wo, gamma_mlp, w_gate, w_up, w_down, glu, eps, keep):
    tokens = h.shape[0]
    return (
        torch.empty_like(h),
        torch.empty_like(h),
        h.new_empty(tokens, dtype=torch.float32),
        h.new_empty(tokens if keep else 0, 2 * w_gate.shape[0]),
    )


@register_fake("coda::block_tail_backward")
def _(d_h_next, a, h_mid, inv_rms_mid, gate_up, wo, gamma_mlp, w_gate, w_up, w_down, glu, mask):
    return (torch.empty_like(a), torch.empty_like(h_mid), *_masked((wo, gamma_mlp, w_gate, w_up, w_down), mask))


def _tail_setup(ctx, inputs, output):
    a, h, *weights = inputs[:7]
    ctx.glu = inputs[7]
    _, h_mid, inv_rms_mid, gate_up = output
    _keep(ctx, h_mid, inv_rms_mid, gate_up)
    ctx.save_for_backward(a, h_mid, inv_rms_mid, gate_up, *weights)


def _tail_backward(ctx, d_h_next, *_):
    needed = ctx.needs_input_grad[2:7]
    d_a, d_h, *d_weights = coda.block_tail_backward(d_h_next.contiguous(), *ctx.saved_tensors, ctx.glu, _mask(needed))
    return (d_a, d_h, *_given(d_weights, needed), None, None, None)


_differentiate("block_tail", _tail_setup, _tail_backward)
_no_second_derivative("block_tail_backward")


# Products with a norm in front of them.


@register_fake("coda::norm_linear_rope")
def _(h, gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps, keep):
    tokens, width = h.shape[0], wq.shape[0] + wk.shape[0] + wv.shape[0]
    return (
        h.new_empty(tokens, width),
        h.new_empty(tokens, dtype=torch.float32),
        h.new_empty(tokens if keep and q_norm is not None else 0, width),
    )


@register_fake("coda::norm_linear_rope_backward")
def _(
    d_qkv, h, qkv, inv_rms, unnormed, gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm, position, turns, head_dim, eps, mask
):  # fmt: skip
    return (torch.empty_like(h), *_masked((gamma, wq, wk, wv, bq, bk, bv, q_norm, k_norm), mask, absent=wq))


def _rope_setup(ctx, inputs, output):
    h, *weights = inputs[:10]
    position, turns, *ctx.options, _ = inputs[10:]
    qkv, *kept = output
    _keep(ctx, *kept)
    ctx.save_for_backward(h, qkv, *kept, *weights, position, turns)


def _rope_backward(ctx, d_qkv, *_):
    needed = ctx.needs_input_grad[1:10]
    d_h, *d_weights = coda.norm_linear_rope_backward(
        d_qkv.contiguous(), *ctx.saved_tensors, *ctx.options, _mask(needed)
    )
    return (d_h, *_given(d_weights, needed), None, None, None, None, None)


_differentiate("norm_linear_rope", _rope_setup, _rope_backward)
_no_second_derivative("norm_linear_rope_backward")


@register_fake("coda::norm_linear_glu")
def _(h, gamma, w_gate, w_up, glu, limit, alpha, eps, keep):
    tokens, ffn = h.shape[0], w_gate.shape[0]
    return (
        h.new_empty(tokens, ffn),
        h.new_empty(tokens if keep else 0, 2 * ffn),
        h.new_empty(tokens, dtype=torch.float32),
    )


@register_fake("coda::norm_linear_glu_backward")
def _(d_y, h, gate_up, inv_rms, gamma, w_gate, w_up, glu, limit, alpha, mask):
    if gamma is None:
        d_gamma = w_gate.new_empty(0)
    else:
        d_gamma = torch.empty_like(gamma) if mask & 1 else gamma.new_empty(0)
    return (torch.empty_like(h), d_gamma, *_masked((w_gate, w_up), mask >> 1))


def _glu_setup(ctx, inputs, output):
    h, gamma, w_gate, w_up = inputs[:4]
    ctx.glu = inputs[4:7]
    _, gate_up, inv_rms = output
    _keep(ctx, gate_up, inv_rms)
    ctx.save_for_backward(h, gate_up, inv_rms, gamma, w_gate, w_up)


def _glu_backward(ctx, d_y, *_):
    needed = ctx.needs_input_grad[1:4]
    d_h, *d_weights = coda.norm_linear_glu_backward(d_y.contiguous(), *ctx.saved_tensors, *ctx.glu, _mask(needed))
    return (d_h, *_given(d_weights, needed), None, None, None, None, None)


_differentiate("norm_linear_glu", _glu_setup, _glu_backward)
_no_second_derivative("norm_linear_glu_backward")


@register_fake("coda::linear_residual")
def _(x, weight, residual):
    return torch.empty_like(residual)


@register_fake("coda::linear_residual_backward")
def _(d_h, x, weight, mask):
    return (torch.empty_like(x), *_masked((weight,), mask))


def _residual_setup(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _residual_backward(ctx, d_h):
    needed = ctx.needs_input_grad[1:2]
    d_x, *d_weight = coda.linear_residual_backward(d_h.contiguous(), *ctx.saved_tensors, _mask(needed))
    return (d_x, *_given(d_weight, needed), d_h)


_differentiate("linear_residual", _residual_setup, _residual_backward)
_no_second_derivative("linear_residual_backward")


# A boundary in parts, between what tensor-parallel processes exchange (parallel.py).


@register_fake("coda::linear")
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx, d_out):
    needed = ctx.needs_input_grad[1:2]
    d_x, *d_weight = coda.linear_residual_backward(d_out.contiguous(), *ctx.saved_tensors, _mask(needed))
    return (d_x, *_given(d_weight, needed))


_differentiate("linear", _linear_setup, _linear_backward)


@register_fake("coda::add_inv_rms")
def _(x, residual, eps):
    return torch.empty_like(residual), x.new_empty(x.shape[0], dtype=torch.float32)


def _add_setup(ctx, inputs, output):
    # The operators that take inv_rms have the norm's derivative in that of the stream.
    _keep(ctx, output[1])


def _add_backward(ctx, d_h, _):
    return d_h, d_h, None


_differentiate("add_inv_rms", _add_setup, _add_backward)


@register_fake("coda::stream_qkv")
def _(h, inv_rms, gamma, wq, wk, wv, position, turns, head_dim):
    return h.new_empty(h.shape[0], wq.shape[0] + wk.shape[0] + wv.shape[0])


def _stream_qkv_setup(ctx, inputs, output):
    h, inv_rms, *weights = inputs[:6]
    position, turns, ctx.head_dim = inputs[6:]
    ctx.save_for_backward(h, output, inv_rms, *weights, position, turns)


def _stream_qkv_backward(ctx, d_qkv):
    needed = ctx.needs_input_grad[2:6]
    h, qkv, inv_rms, *weights, position, turns = ctx.saved_tensors
    no_bias, no_head_norm = (None, None, None), (None, None)
    d_h, *d_weights = coda.norm_linear_rope_backward(
        d_qkv.contiguous(), h, qkv, inv_rms, h.new_empty(0, qkv.shape[1]), *weights, *no_bias, *no_head_norm,
        position, turns, ctx.head_dim, 0.0, _mask(needed),
    )  # fmt: skip
    return (d_h, None, *_given(d_weights[:4], needed), None, None, None)


_differentiate("stream_qkv", _stream_qkv_setup, _stream_qkv_backward)


@register_fake("coda::stream_mlp")
def _(h, inv_rms, gamma, w_gate, w_up, w_down, keep):
    tokens = h.shape[0]
    return h.new_empty(tokens, w_down.shape[0]), h.new_empty(tokens if keep else 0, 2 * w_gate.shape[0])


@register_fake("coda::stream_mlp_backward")
def _(d_out, h, inv_rms, gate_up, gamma, w_gate, w_up, w_down, mask):
    return (torch.empty_like(h), *_masked((gamma, w_gate, w_up, w_down), mask))


def _stream_mlp_setup(ctx, inputs, output):
    h, inv_rms, *weights = inputs[:6]
    _keep(ctx, output[1])
    ctx.save_for_backward(h, inv_rms, output[1], *weights)


def _stream_mlp_backward(ctx, d_out, _):
    needed = ctx.needs_input_grad[2:6]
    d_h, *d_weights = coda.stream_mlp_backward(d_out.contiguous(), *ctx.saved_tensors, _mask(needed))
    return (d_h, None, *_given(d_weights, needed), None)


_differentiate("stream_mlp", _stream_mlp_setup, _stream_mlp_backward)
_no_second_derivative("stream_mlp_backward")


# A gradient that several micro-batches add to: what it writes is in its schema, and it has no derivative.


@register_fake("coda::accumulate_weight_gradient_")
def _(main_grad, d_out, x):
    pass


# The vocabulary's loss.


@register_fake("coda::scaled_to_bf16")
def _(x, scale):
    return torch.empty_like(x, dtype=torch.bfloat16)


_no_second_derivative("scaled_to_bf16")


@register_fake("coda::linear_cross_entropy")
def _(
    x, weight, label, token_weight, reduction, divisor, ignore_index, label_smoothing, z_loss, softcap, mask
):  # fmt: skip
    tokens = x.shape[0]
    made = mask != 0 and reduction != 0
    loss = x.new_empty((tokens,) if reduction == 0 else (), dtype=torch.float32)
    return (
        loss,
        torch.empty_like(loss),
        x.new_empty(tokens, dtype=torch.float32),
        x.new_empty(tokens if made else 0, x.shape[1]),
        weight.new_empty(weight.shape[0] if made else 0, weight.shape[1], dtype=torch.float32),
    )


@register_fake("coda::linear_cross_entropy_backward")
def _(
    d_loss, x, weight, label, token_weight, log_sum_exp, reduction, divisor, ignore_index, label_smoothing, z_loss,
    softcap,
):  # fmt: skip
    return torch.empty_like(x), torch.empty_like(weight)


def _loss_setup(ctx, inputs, output):
    x, weight, label, token_weight, *ctx.options, _ = inputs
    _, z_loss, log_sum_exp, d_x, d_weight = output
    _keep(ctx, z_loss, log_sum_exp, d_x, d_weight)
    if ctx.options[0] == 0:
        ctx.save_for_backward(x, weight, label, token_weight, log_sum_exp)
    else:
        ctx.types = (x.dtype, weight.dtype)
        ctx.save_for_backward(d_x, d_weight)


def _scaled(gradient, d_loss, dtype):
    if dtype != torch.bfloat16:
        return gradient * d_loss
    return coda.scaled_to_bf16(gradient, d_loss.float().expand(gradient.shape[1]).contiguous())


def _loss_backward(ctx, d_loss, *_):
    if torch.is_grad_enabled():
        # What was made with the loss depends, for autograd, on nothing: a second derivative would be silently left out.
        raise _differentiated_once("linear_cross_entropy")
    needed = ctx.needs_input_grad[:2]
    if ctx.options[0] == 0:
        made = coda.linear_cross_entropy_backward(d_loss.float().contiguous(), *ctx.saved_tensors, *ctx.options)
        gradients = _given(made, needed)
    else:
        # Made with the loss, for an upstream gradient of 1. The caller may come again: they stay as they are.
        gradients = [
            _scaled(made, d_loss, dtype) if need else None
            for made, dtype, need in zip(ctx.saved_tensors, ctx.types, needed)
        ]
    return (*gradients, *(None,) * 9)


_differentiate("linear_cross_entropy", _loss_setup, _loss_backward)
_no_second_derivative("linear_cross_entropy_backward")
