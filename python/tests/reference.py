"""The operators' formulas in plain PyTorch, without coda: in float64 what is right, in bfloat16 what PyTorch gets.

Sums and norms are taken, and values rounded, where Hugging Face's Llama does.
"""

import dataclasses
import typing

import torch
import torch.nn.functional as F


def linear(x, weight, bias=None):
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x, gamma, eps):
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gamma.to(x.dtype) * y.to(x.dtype)


def rotate(x, position, inv_freq, head_dim):
    """x [..., heads · head_dim], halves of a head as partners."""
    angle = position[..., None].double() * inv_freq.double()
    cos, sin = (f(angle).to(x.dtype).repeat_interleave(2, -1)[..., None, :] for f in (torch.cos, torch.sin))
    pairs = x.unflatten(-1, (-1, 2, head_dim // 2)).transpose(-1, -2)  # [..., heads, head_dim / 2, 2]
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    y = pairs.flatten(-2) * cos + turned * sin
    return y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-3)


def unpacked(x, head_dim):
    """q or k as coda stores it, partners in blocks of 8, with halves of a head as partners."""
    blocks = x.unflatten(-1, (-1, head_dim // 16, 2, 8))  # [..., heads, block, partner, 8]
    return blocks.transpose(-2, -3).flatten(-4)


def glu(x, w_gate, w_up, activation):
    return activation(linear(x, w_gate)) * linear(x, w_up)


def clamped_swiglu(x, w_gate, w_up, limit, alpha):
    gate, up = linear(x, w_gate).clamp(max=limit), linear(x, w_up).clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}


def block_tail(a, h, wo, gamma_mlp, w_gate, w_up, w_down, eps, activation="silu"):
    h_mid = h + linear(a, wo)
    return h_mid + linear(glu(rms_norm(h_mid, gamma_mlp, eps), w_gate, w_up, ACTIVATIONS[activation]), w_down)


def qkv(h, gamma, wq, wk, wv, position, inv_freq, head_dim, eps, bq=None, bk=None, bv=None, q_norm=None, k_norm=None):
    x = rms_norm(h, gamma, eps)

    def turned(w, b, norm):
        y = linear(x, w, b)
        if norm is not None:
            y = rms_norm(y.unflatten(-1, (-1, head_dim)), norm, eps).flatten(-2)
        return rotate(y, position, inv_freq, head_dim)

    return turned(wq, bq, q_norm), turned(wk, bk, k_norm), linear(x, wv, bv)


def cross_entropy(x, weight, labels, *, reduction="mean", ignore_index=-100, divisor=None, token_weight=None,
                  label_smoothing=0.0, z_loss=0.0, softcap=None):  # fmt: skip
    """(loss, the part that is z_loss), from logits that are not rounded."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    logits = linear(x, weight).to(wide).reshape(labels.numel(), weight.shape[0])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    label = labels.flatten()
    counted = (label != ignore_index).to(wide)
    scale = counted if token_weight is None else counted * token_weight.flatten().to(wide)
    log_sum_exp = logits.logsumexp(-1)
    at_label = logits.gather(-1, label.where(label != ignore_index, 0)[:, None])[:, 0]
    loss = log_sum_exp - (1 - label_smoothing) * at_label - label_smoothing * logits.mean(-1)
    z = z_loss * log_sum_exp**2
    loss, z = (scale * (loss + z), scale * z)
    if reduction == "none":
        return loss.view(labels.shape), z.view(labels.shape)
    over = 1 if reduction == "sum" else scale.sum() if divisor is None else divisor
    return loss.sum() / over, z.sum() / over


def frobenius(got, want):
    """The relative error of all elements together."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item() if want.numel() else 0.0


def check(name, got, want, bound):
    """got is want to `bound`, relative: all elements together, and the worst of them to 10 bounds of the largest."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} for {tuple(want.shape)}"
    if want.numel() == 0:
        return
    got, want = got.detach().double(), want.detach().double()
    assert torch.isfinite(got).all(), f"{name} is not finite"
    difference = (got - want).abs()
    scale = want.abs().max().item() or 1.0
    worst = difference.flatten().argmax().item()
    at = [i.item() for i in torch.unravel_index(torch.tensor(worst), want.shape)]
    assert difference.max().item() <= 10 * bound * scale, (
        f"{name} at {at}: {got.flatten()[worst].item()} for {want.flatten()[worst].item()}, largest {scale}"
    )
    assert difference.norm().item() <= bound * max(want.norm().item(), 1e-30), (
        f"{name}: {difference.norm().item() / want.norm().item():.2e} relative, bound {bound:.0e}"
    )


@dataclasses.dataclass
class Case:
    """An operator at small sizes, and its formula."""

    operator: typing.Callable  # (operands by name) -> outputs
    formula: typing.Callable
    activations: dict  # name -> width
    weights: dict  # name -> shape
    given: typing.Callable = lambda tokens: {}  # what has no gradient, from the shape of the tokens

    def operands(self, tokens, activation_type, weight_type):
        """Random; norms' weights around 1. Leaves that require gradients."""
        made = {name: torch.randn(*tokens, width) for name, width in self.activations.items()}
        made = {name: x.to(activation_type) for name, x in made.items()}
        for name, shape in self.weights.items():
            w = torch.randn(shape) * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.3 * torch.randn(shape)
            made[name] = w.to(weight_type)
        return {name: x.requires_grad_() for name, x in made.items()}


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients(function, operands, given, upstream):
    """The outputs, and gradients by operand's name, for upstream gradients by output."""
    outputs = as_tuple(function(**operands, **given))
    needed = {name: x for name, x in operands.items() if x.requires_grad}
    grads = torch.autograd.grad(outputs, list(needed.values()), [u.to(o.dtype) for u, o in zip(upstream, outputs)])
    return outputs, dict(zip(needed, grads))
