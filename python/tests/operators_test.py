"""The operators' numbers, forward and every gradient, against float64."""

import dataclasses
import functools

import coda_torch
import pytest
import reference
import torch
from cases import CASES
from reference import check, frobenius, gradients

F32, BF16 = torch.float32, torch.bfloat16
every_operator = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def exact(case, operands, given, upstream):
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in operands.items()}
    return gradients(case.formula, wide, given, upstream)


def random_upstream(case, operands, given):
    """1 for a loss: what else comes scales gradients that are rounded already, which is a test of its own."""
    with torch.no_grad():
        outputs = reference.as_tuple(case.operator(**operands, **given))
    return [torch.randn_like(x) if x.dim() else torch.ones_like(x) for x in outputs]


@every_operator
@pytest.mark.parametrize("weight_type", [F32, BF16], ids=["weights in float32", "weights in bfloat16"])
@pytest.mark.parametrize("tokens", [(37,), (2, 3, 5), (1,), (), (130,)], ids=str)
def test_float32_is_exact_to_float32(case, weight_type, tokens):
    operands, given = case.operands(tokens, F32, weight_type), case.given(tokens)
    upstream = random_upstream(case, operands, given)
    outputs, grads = gradients(case.operator, operands, given, upstream)
    want, want_grads = exact(case, operands, given, upstream)
    for i, (got, of) in enumerate(zip(outputs, want, strict=True)):
        assert got.dtype == F32
        check(f"output {i}", got, of, 2e-6)
    for name, grad in grads.items():
        assert grad.dtype == operands[name].dtype, name
        check(f"gradient of {name}", grad, want_grads[name], 2e-6 if grad.dtype == F32 else 2.5e-3)


@every_operator
@pytest.mark.parametrize("weight_type", [F32, BF16], ids=["weights in float32", "weights in bfloat16"])
@pytest.mark.parametrize("tokens", [(509,), (2, 257)], ids=str)
def test_bfloat16_is_no_worse_than_pytorchs(case, weight_type, tokens):
    operands, given = case.operands(tokens, BF16, weight_type), case.given(tokens)
    upstream = random_upstream(case, operands, given)
    outputs, grads = gradients(case.operator, operands, given, upstream)
    theirs, their_grads = gradients(case.formula, operands, given, upstream)
    want, want_grads = exact(case, operands, given, upstream)
    got = {**{f"output {i}": x for i, x in enumerate(outputs)}, **grads}
    of_torch = {**{f"output {i}": x for i, x in enumerate(theirs)}, **their_grads}
    right = {**{f"output {i}": x for i, x in enumerate(want)}, **want_grads}
    for name, x in got.items():
        check(name, x, right[name], 1e-2)
        if x.dim() == 0:
            continue  # the error of one number is chance
        ours, theirs = frobenius(x, right[name]), frobenius(of_torch[name], right[name])
        assert ours <= 1.1 * theirs, f"{name}: {ours:.2e} for PyTorch's {theirs:.2e}"


def test_a_limit_of_swiglu():
    """In float32: which side of the limit a value is on is not bfloat16's to say."""
    case, tokens, limits = CASES["linear_clamped_swiglu"], (509,), {"limit": 0.7, "alpha": 1.5}
    operands, given = case.operands(tokens, F32, F32), case.given(tokens)
    case = dataclasses.replace(
        case,
        operator=functools.partial(coda_torch.linear_clamped_swiglu, **limits),
        formula=functools.partial(reference.clamped_swiglu, **limits),
    )
    upstream = random_upstream(case, operands, given)
    outputs, grads = gradients(case.operator, operands, given, upstream)
    want, want_grads = exact(case, operands, given, upstream)
    check("y", outputs[0], want[0], 2e-6)
    for name, grad in grads.items():
        check(f"gradient of {name}", grad, want_grads[name], 2e-6)


@pytest.mark.parametrize("name", ["block", "block_tail"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [(37,), (0,)], ids=str)
def test_every_activation_of_a_block(name, activation, tokens):
    case = CASES[name]
    case = dataclasses.replace(
        case,
        operator=functools.partial(case.operator, activation=activation),
        formula=functools.partial(case.formula, activation=activation),
    )
    for activation_type in (F32, BF16):
        operands, given = case.operands(tokens, activation_type, F32), case.given(tokens)
        upstream = random_upstream(case, operands, given)  # without gradients: gate and up are not kept
        outputs, grads = gradients(case.operator, operands, given, upstream)
        want, want_grads = exact(case, operands, given, upstream)
        bound = 2e-6 if activation_type == F32 else 1e-2
        for i, (got, of) in enumerate(zip(outputs, want, strict=True)):
            check(f"output {i}", got, of, bound)
        for operand, grad in grads.items():
            check(f"gradient of {operand}", grad, want_grads[operand], bound)
        with torch.no_grad():
            without = reference.as_tuple(case.operator(**operands, **given))
        assert all(torch.equal(x, y) for x, y in zip(without, outputs))


def test_an_output_that_is_a_hundredth_off_fails():
    want = torch.randn(40, 30, dtype=torch.float64)
    for bound in (2e-6, 2.5e-3, 5e-3):
        check("right", want, want, bound)
        with pytest.raises(AssertionError):
            check("off", 1.01 * want, want, bound)
    with pytest.raises(AssertionError, match=r"one at \[7, 11\]"):
        check("one", want.index_put((torch.tensor(7), torch.tensor(11)), torch.tensor(9.0).double()), want, 1e-2)


@every_operator
@pytest.mark.parametrize("activation_type", [F32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [(0,), (2, 0)], ids=str)
def test_no_tokens_give_empty_outputs_and_gradients_of_zeros(case, activation_type, tokens):
    operands, given = case.operands(tokens, activation_type, F32), case.given(tokens)
    outputs = reference.as_tuple(case.operator(**operands, **given))
    with torch.no_grad():
        shapes = [x.shape for x in reference.as_tuple(case.formula(**operands, **given))]
    assert [x.shape for x in outputs] == shapes
    grads = torch.autograd.grad(sum(x.sum() for x in outputs), list(operands.values()))
    for name, grad in zip(operands, grads):
        assert grad.shape == operands[name].shape and not grad.any(), name


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ignore_index": 7},
        {"label_smoothing": 0.1},
        {"z_loss": 0.01},
        {"softcap": 15.0},
        {"token_weight": True},
        {"divisor": 11.0},
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 15.0, "token_weight": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("activation_type", [F32, BF16], ids=str)
def test_every_option_of_the_loss(reduction, options, activation_type):
    if "divisor" in options and reduction != "mean":
        pytest.skip("only a mean is divided")
    tokens, vocab, width = (3, 171), 101, 29
    options = dict(options, reduction=reduction)
    if "token_weight" in options:
        options["token_weight"] = torch.rand(tokens)
    x = torch.randn(*tokens, width).to(activation_type).requires_grad_()
    weight = (torch.randn(vocab, width) * 0.5).requires_grad_()
    label = torch.randint(0, vocab, tokens)
    label[:, ::4] = options.get("ignore_index", -100)

    def ours(x, weight):
        return coda_torch.linear_cross_entropy(x, weight, label, return_z_loss=True, **options)

    def formula(x, weight):
        # Under bfloat16 activations the products are of bfloat16 weights, as in PyTorch's own path.
        return reference.cross_entropy(x, weight, label, **options)

    loss, z = ours(x, weight)
    upstream = torch.randn_like(loss) if reduction == "none" else torch.ones_like(loss)
    grads = torch.autograd.grad(loss, (x, weight), upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    if activation_type == BF16:
        theirs, _ = formula(x, weight)
        their_grads = torch.autograd.grad(theirs, (x, weight), upstream)
    want, want_z = formula(*wide)
    want_grads = torch.autograd.grad(want, wide, upstream.double())

    assert loss.dtype == F32 and not z.requires_grad
    loose = activation_type == BF16
    check("loss", loss, want, 5e-3 if loose else 2e-6)
    check("z_loss", z, want_z, 5e-3 if loose else 2e-6)
    for i, (name, grad, of) in enumerate(zip(("x", "weight"), grads, want_grads)):
        if loose:
            bound = 1.1 * frobenius(their_grads[i], of)
            assert frobenius(grad, of) <= bound, f"{name}: {frobenius(grad, of):.2e} for PyTorch's {bound / 1.1:.2e}"
        else:
            check(f"gradient of {name}", grad, of, 3e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_losss_upstream_gradient_scales_what_was_made_with_it(reduction):
    x = torch.randn(9, 16, dtype=BF16, requires_grad=True)
    weight = torch.randn(37, 16, requires_grad=True)
    label = torch.randint(0, 37, (9,))
    loss = coda_torch.linear_cross_entropy(x, weight, label, reduction=reduction)
    of_one = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    of_third = torch.autograd.grad(loss, (x, weight), torch.tensor(1 / 3))
    check("x", of_third[0], of_one[0].double() / 3, 2**-8)  # which is rounded a second time
    check("weight", of_third[1], of_one[1].double() / 3, 2e-7)


def test_gradients_of_a_bfloat16_head_are_rounded_once():
    x = torch.randn(9, 16, dtype=BF16)
    weight = torch.randn(37, 16, dtype=BF16)
    label, upstream = torch.randint(0, 37, (9,)), torch.tensor(1 / 3)
    grads = []
    for head in (weight.clone(), weight.float()):
        loss = coda_torch.linear_cross_entropy(x, head.requires_grad_(), label)
        grads += torch.autograd.grad(loss, head, upstream)
    assert torch.equal(grads[0], grads[1].bfloat16())
