"""Troubles that users of fused operators have reported elsewhere, each with the value that is right."""

import math

import coda_torch
import pytest
import reference
import torch
from reference import check
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

F32, BF16 = torch.float32, torch.bfloat16


def loss_of_logits(logits, label, **options):
    """The loss of one token's logits, and its gradient by them: a weight of these, against an x of 1."""
    weight = torch.tensor(logits).view(-1, 1).requires_grad_()
    loss = coda_torch.linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([label]), **options)
    (d_weight,) = torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, weight)
    return loss, d_weight[:, 0]


def close(got, want):
    assert_close(torch.as_tensor(got).detach().float(), torch.as_tensor(want).float(), rtol=2e-6, atol=2e-7)


def test_losses_of_tokens_are_scaled_each_by_its_own_upstream_gradient():
    x, weight = torch.eye(2, requires_grad=True), torch.eye(2, requires_grad=True)
    loss = coda_torch.linear_cross_entropy(x, weight, torch.tensor([0, 1]), reduction="none")
    d_x, d_weight = torch.autograd.grad(loss, (x, weight), torch.tensor([1.0, 0.0]))
    assert_close(d_weight, torch.tensor([[-0.26894, 0], [0.26894, 0]]), rtol=0, atol=5e-6)
    assert_close(d_x, torch.tensor([[-0.26894, 0.26894], [0, 0]]), rtol=0, atol=5e-6)


def test_a_first_token_that_is_ignored_leaves_the_others_their_gradients():
    x, weight = torch.eye(2, requires_grad=True), torch.eye(2, requires_grad=True)
    loss = coda_torch.linear_cross_entropy(x, weight, torch.tensor([-100, 1]), reduction="none")
    _, d_weight = torch.autograd.grad(loss, (x, weight), torch.tensor([5.0, 1.0]))
    assert_close(d_weight, torch.tensor([[0, 0.26894], [0, -0.26894]]), rtol=0, atol=5e-6)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_only_ignored_tokens_give_gradients_of_zeros(reduction):
    x = torch.randn(4, 16, dtype=BF16, requires_grad=True)
    weight = torch.randn(9, 16, dtype=BF16, requires_grad=True)
    loss = coda_torch.linear_cross_entropy(x, weight, torch.full((4,), -100), reduction=reduction)
    if reduction == "mean":
        assert loss.isnan()  # 0/0, as in PyTorch, whose gradients are zeros too
    else:
        assert not loss.any() and loss.shape == ((4,) if reduction == "none" else ())
    for grad in torch.autograd.grad(loss.sum(), (x, weight)):
        assert grad is not None and not grad.any()


def test_micro_batches_add_up_by_the_divisor_of_the_whole_step():
    def mean_by_ten(loss, tokens):
        # log(1 + e^l) is the loss of label 0 of the logits 0 and l.
        x = torch.full((tokens, 1), math.log(math.expm1(loss)))
        weight = torch.tensor([[0.0], [1.0]])
        return coda_torch.linear_cross_entropy(x, weight, torch.zeros(tokens, dtype=int), divisor=10.0)

    close(mean_by_ten(4.0, 2) + mean_by_ten(1.0, 8), 1.6)


def test_a_bfloat16_gradient_of_1024_rows_does_not_stop_growing():
    weight = torch.zeros(8, 8, dtype=BF16, requires_grad=True)
    ones = torch.ones(1024, 8, dtype=BF16)
    coda_torch.linear_residual(ones, weight, ones).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 1024))  # a running sum in bfloat16 stays at 256

    head = torch.zeros(2, 8, dtype=BF16, requires_grad=True)  # both logits 0: each token adds a half
    coda_torch.linear_cross_entropy(ones.repeat(2, 1), head, torch.zeros(2048, dtype=int), reduction="sum").backward()
    assert torch.equal(head.grad, torch.tensor([[-1024], [1024]], dtype=BF16).expand(2, 8))


def test_a_vocabulary_that_is_no_multiple_of_a_tile_has_no_logits_behind_its_end():
    loss, d_logits = loss_of_logits([-20.0] * 5, 0)
    close(loss, math.log(5))
    close(d_logits, [-0.8, 0.2, 0.2, 0.2, 0.2])


def test_a_softcap_caps_and_its_derivative_is_in_the_gradient():
    loss, d_logits = loss_of_logits([124.0, 0.0], 1, softcap=30.0)
    close(loss, 29.98459)
    assert_close(d_logits[0].item(), 0.00102723, rtol=1e-4, atol=0)


def test_z_loss_is_nothing_when_off_and_a_part_of_its_own_when_on():
    off, _ = loss_of_logits([0.0, 0.0], 0)
    assert off.item() == pytest.approx(math.log(2), abs=6e-8)
    (loss, z), d_logits = loss_of_logits([0.0, 0.0], 0, z_loss=0.1, return_z_loss=True)
    close(loss, 0.741192)
    close(z, 0.0480453)
    close(d_logits, [-0.430685, 0.569315])


def test_label_smoothing_beside_an_ignored_row():
    weight = torch.tensor([[2.0], [0.0], [0.0], [0.0]], requires_grad=True)
    loss = coda_torch.linear_cross_entropy(torch.ones(2, 1), weight, torch.tensor([0, -100]), label_smoothing=0.1)
    loss.backward()
    close(loss, 0.490753)
    close(weight.grad[:, 0], [-0.213765, 0.0712551, 0.0712551, 0.0712551])


@pytest.mark.parametrize("label", [100, -5, 2**40])
def test_a_label_that_is_no_id_is_an_error_that_names_row_and_value(label):
    labels = torch.tensor([1, 2, label, 3])
    with pytest.raises(ValueError, match="row 2") as raised:
        coda_torch.linear_cross_entropy(torch.randn(4, 8), torch.randn(100, 8), labels)
    assert label == 2**40 or str(label) in str(raised.value)


def test_backward_twice_through_the_operator_in_front():
    scores = torch.randn(6, 16, requires_grad=True)
    weight = torch.randn(9, 16, requires_grad=True)
    x = scores.softmax(-1)
    kept = x.detach().clone()
    loss = coda_torch.linear_cross_entropy(x, weight, torch.arange(6))
    first = torch.autograd.grad(loss, (scores, weight), torch.tensor(1.0), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (scores, weight), torch.tensor(3.0))
    wide = scores.detach().double().requires_grad_()
    want = reference.cross_entropy(wide.softmax(-1), weight.detach().double(), torch.arange(6))[0]
    check("scores", first[0], torch.autograd.grad(want, wide)[0], 2e-6)
    for one, three, copy in zip(first, second, copies):
        close(three, 3 * one)
        assert torch.equal(one, copy)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("weight_type", [BF16, F32], ids=str)
def test_a_norm_takes_any_leading_dimensions_and_a_weight_of_either_type(weight_type):
    h = torch.randn(2, 4, 256, dtype=BF16)
    gamma = (1 + 0.1 * torch.randn(256)).to(weight_type).requires_grad_()
    w_gate, w_up = (torch.randn(64, 256, dtype=BF16) / 16 for _ in range(2))
    y = coda_torch.norm_linear_swiglu(h, gamma, w_gate, w_up)
    y.sum().backward()
    assert y.shape == (2, 4, 64) and y.dtype == BF16 and y.isfinite().all()
    assert gamma.grad.dtype == weight_type and gamma.grad.isfinite().all()


def test_the_gradient_of_a_sum_has_strides_of_0_and_is_like_any_other():
    h = torch.randn(2, 1024, 256, dtype=BF16, requires_grad=True)
    gamma = torch.ones(256, requires_grad=True)
    weights = [(torch.randn(32, 256) / 16).requires_grad_() for _ in range(2)]
    y = coda_torch.norm_linear_swiglu(h, gamma, *weights)
    got = torch.autograd.grad(y.sum(), (h, gamma, *weights), retain_graph=True)
    want = torch.autograd.grad(y, (h, gamma, *weights), torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_the_residuals_gradient_is_added_behind_the_norms():
    """Where nothing comes through the norms, the stream's gradient passes bit for bit."""
    width, heads = 32, {"head_dim": 16, "turns": coda_torch.rotary_turns(torch.ones(8), 1, 1)}
    h = torch.randn(5, width, requires_grad=True)
    square = torch.randn(width, width) / 6
    qkv = [torch.randn(16, width) for _ in range(3)]
    out, *_ = coda_torch.block(
        torch.randn(5, width), h, square, torch.ones(width), square, square, torch.zeros(width, width),
        torch.ones(width), *qkv, torch.arange(5), **heads,
    )  # fmt: skip
    upstream = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, h, upstream)[0], upstream)

    residual = torch.randn(5, width, requires_grad=True)
    out = coda_torch.linear_residual(torch.randn(5, width), square, residual)
    assert torch.equal(torch.autograd.grad(out, residual, upstream)[0], upstream)


def test_the_norm_behind_an_addition_is_of_the_sum_before_it_is_rounded():
    width = 64
    a, h = torch.full((3, width), 2.0**-8, dtype=BF16), torch.ones(3, width, dtype=BF16)
    eye, zeros = torch.eye(width, dtype=BF16), torch.zeros(width, width, dtype=BF16)
    _, h_mid, inv_rms, _ = torch.ops.coda.block_tail(a, h, eye, torch.ones(width), eye, eye, zeros, 0, 0.0, True)
    assert torch.equal(h_mid, h)  # 1 + 2⁻⁸ is rounded to 1
    close(inv_rms**-2, torch.full((3,), 1.0078278))  # and not 1


def v_of(h, eps):
    """norm(h) itself: what a projection by the identity makes of it, without a rotation."""
    width = h.shape[-1]
    eye, turns = torch.eye(width), coda_torch.rotary_turns(torch.ones(width // 2), 1, 1)
    ones, position = torch.ones(width), torch.zeros(h.shape[0], dtype=int)
    return coda_torch.norm_linear_rope(h, ones, eye, eye, eye, position, turns, head_dim=width, eps=eps)[2]


def test_epsilon_is_inside_of_the_root():
    close(v_of(torch.full((2, 16), 1e-4), 1e-6), torch.full((2, 16), 0.0995037))


def test_a_row_of_zeros_has_a_norm_of_zeros_and_a_finite_gradient():
    h = torch.zeros(2, 16, requires_grad=True)
    v = v_of(h, 1e-6)
    v.sum().backward()
    assert not v.any() and h.grad.isfinite().all()


def turned(q, position, inv_freq):
    """q [16], halves as partners, rotated by the operator at each of the positions."""
    h = torch.ones(len(position), 16)  # its norm is 1 everywhere
    wq = (torch.as_tensor(q, dtype=F32) / 16)[:, None].expand(16, 16).contiguous()
    turns = coda_torch.rotary_turns(torch.as_tensor(inv_freq, dtype=F32), 1, 1)
    q, _, _ = coda_torch.norm_linear_rope(
        h, torch.ones(16), wq, wq, wq, torch.as_tensor(position), turns, head_dim=16, eps=0.0
    )
    return reference.unpacked(q, 16)


INV_FREQ_OF_FOUR = [1.0, 0.01] + [0.0] * 6


def test_rotary_halves_are_partners():
    q = torch.zeros(16)
    q[[0, 1, 8, 9]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    got = turned(q, [1], INV_FREQ_OF_FOUR)[0, [0, 1, 8, 9]]
    assert_close(got, torch.tensor([-1.98411, 1.95990, 2.46238, 4.01980]), rtol=0, atol=6e-6)


def test_an_interleaved_checkpoint_is_rotated_after_its_rows_are_permuted():
    q = torch.zeros(16)
    q[[0, 8, 1, 9]] = torch.tensor([1.0, 2.0, 3.0, 4.0])  # neighbours become halves
    got = turned(q, [1], INV_FREQ_OF_FOUR)[0, [0, 8, 1, 9]]
    assert_close(got, torch.tensor([-1.14264, 1.92208, 2.95985, 4.02980]), rtol=0, atol=6e-6)


@pytest.mark.parametrize("position", [[[0, 1, 2], [5, 6, 7]], [[0, 1, 2, 0, 1]]], ids=["two rows", "packed documents"])
def test_each_token_is_rotated_by_its_own_position(position):
    position = torch.tensor(position)
    inv_freq = 1e4 ** (-torch.arange(8) / 8)
    h = torch.randn(*position.shape, 16, requires_grad=True)
    weights = [torch.randn(16, 16) / 4 for _ in range(3)]
    turns = coda_torch.rotary_turns(inv_freq, 1, 1)
    q, k, v = coda_torch.norm_linear_rope(h, torch.ones(16), *weights, position, turns, head_dim=16)
    got = (reference.unpacked(q, 16), reference.unpacked(k, 16), v)
    upstream = [torch.randn_like(x) for x in got]
    wide = h.detach().double().requires_grad_()
    want = reference.qkv(wide, torch.ones(16), *weights, position, inv_freq, 16, 1e-6)
    for name, x, y in zip("qkv", got, want):
        check(name, x, y, 1e-6)
    (d_h,) = torch.autograd.grad(got, h, upstream)
    check("h", d_h, torch.autograd.grad(want, wide, [u.double() for u in upstream])[0], 1e-6)


def test_an_angle_keeps_its_fraction_of_a_turn_at_far_positions():
    position = [257, 15962, 131071, 2**24 - 1]
    q = torch.zeros(16)
    q[0] = 1.0
    got = turned(q, position, [1.0] + [0.0] * 7)[:, 0]
    assert_close(got, torch.tensor([0.819306, -0.908016, -0.817983, math.cos(2**24 - 1)]), rtol=0, atol=1e-5)


def of_gate_and_up(operator, gate, up, **options):
    """The operator at these values: a product with the identity."""
    size = -(-len(gate) // 8) * 8
    x = torch.zeros(1, 2 * size)
    x[0, : len(gate)], x[0, size : size + len(up)] = torch.tensor(gate), torch.tensor(up)
    eye, none = torch.eye(size), torch.zeros(size, size)
    return operator(x, torch.cat((eye, none), 1), torch.cat((none, eye), 1), **options)[0, : len(gate)]


def test_the_two_gelus_are_asked_for_by_name():
    assert_close(of_gate_and_up(coda_torch.linear_geglu, [-2.7], [1.0]).item(), -0.0093608, rtol=0, atol=5e-8)
    got = of_gate_and_up(coda_torch.linear_geglu, [-2.7], [1.0], approximate="tanh")
    assert_close(got.item(), -0.0088876, rtol=0, atol=5e-8)


def test_nothing_is_clamped():
    close(of_gate_and_up(coda_torch.linear_swiglu, [9.0], [-9.0]), [-81 / (1 + math.exp(-9))])


def test_what_is_clamped_has_no_gradient():
    clamped = coda_torch.linear_clamped_swiglu
    close(of_gate_and_up(clamped, [9.0], [-9.0], limit=7.0, alpha=1.702), [-41.99972])
    close(of_gate_and_up(clamped, [9.0], [-9.0], limit=math.inf), [-72 / (1 + math.exp(-9 * 1.702))])  # no limit, no clamp
    # Gradients reach a value through the identity: of rows (9, -9), (9, 2), (-9, 2), those within the limit alone.
    x = torch.zeros(3, 16)
    x[:, 0], x[:, 8] = torch.tensor([9.0, 9.0, -9.0]), torch.tensor([-9.0, 2.0, 2.0])
    x.requires_grad_()
    eye, none = torch.eye(8), torch.zeros(8, 8)
    clamped(x, torch.cat((eye, none), 1), torch.cat((none, eye), 1))[:, 0].sum().backward()
    free = x.grad[:, [0, 8]] != 0
    assert free.tolist() == [[False, False], [False, True], [True, True]]


def test_gate_is_the_first_and_up_the_second():
    close(of_gate_and_up(coda_torch.linear_swiglu, [1.0, 2.0], [3.0, 4.0]), [2.193176, 7.046377])


def test_products_without_inputs_or_outputs():
    residual = torch.randn(3, 5)
    weight = torch.zeros(5, 0, requires_grad=True)
    got = coda_torch.linear_residual(torch.zeros(3, 0), weight, residual)
    assert torch.equal(got, residual)  # K = 0
    got.sum().backward()
    assert weight.grad.shape == (5, 0)
    assert coda_torch.linear_residual(torch.zeros(3, 7), torch.zeros(0, 7), torch.zeros(3, 0)).shape == (3, 0)


def test_the_loss_of_no_tokens():
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    none = torch.zeros(0, dtype=int)
    loss = coda_torch.linear_cross_entropy(x, weight, none, reduction="sum")
    assert loss.item() == 0
    d_x, d_weight = torch.autograd.grad(loss, (x, weight))
    assert d_x.shape == (0, 8) and torch.equal(d_weight, torch.zeros(9, 8))
    assert coda_torch.linear_cross_entropy(x, weight, none).isnan()


def test_a_view_is_read_by_its_strides():
    base = torch.randn(6, 40)
    x = base[:, :20]
    weight = torch.randn(9, 40)[:, ::2]
    residual = torch.randn(9, 6).T
    before = base.clone()
    got = coda_torch.linear_residual(x, weight, residual)
    assert torch.equal(got, coda_torch.linear_residual(x.clone(), weight.clone(), residual.clone()))
    check("h", got, x.double() @ weight.double().T + residual, 1e-6)
    assert torch.equal(base, before)


def test_autocast_takes_a_bfloat16_weight_beside_float32_activations():
    x = torch.randn(8, 32, requires_grad=True)
    weight = torch.randn(50, 32, dtype=BF16, requires_grad=True)
    label = torch.randint(0, 50, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = coda_torch.linear_cross_entropy(x, weight, label)
    loss.backward()
    want, _ = reference.cross_entropy(x.detach().bfloat16().double(), weight.detach().double(), label)
    assert loss.dtype == F32 and x.grad.dtype == F32 and weight.grad.dtype == BF16
    check("loss", loss, want, 2e-3)  # logits rounded to bfloat16 lie up to 0.03 off, these from their row's largest


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_gives_the_same_bits(use_reentrant):
    h = torch.randn(7, 32, requires_grad=True)
    gamma = torch.ones(32, requires_grad=True)
    weights = [(torch.randn(24, 32) / 6).requires_grad_() for _ in range(2)]
    want = torch.autograd.grad(coda_torch.norm_linear_swiglu(h, gamma, *weights).sum(), (h, gamma, *weights))
    y = checkpoint(coda_torch.norm_linear_swiglu, h, gamma, *weights, use_reentrant=use_reentrant)
    y.sum().backward()
    for name, x, y in zip(("h", "gamma", "w_gate", "w_up"), (h, gamma, *weights), want):
        assert torch.equal(x.grad, y), name


def test_gradients_of_4096_tokens_are_the_same_bits_twenty_times():
    x = torch.randn(4096, 16, requires_grad=True)
    weight = torch.randn(33, 16, requires_grad=True)
    label = torch.randint(0, 33, (4096,))
    first = None
    for _ in range(20):
        loss = coda_torch.linear_cross_entropy(x, weight, label)
        now = (loss.detach(), *torch.autograd.grad(loss, (x, weight)))
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now))
