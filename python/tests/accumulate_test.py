"""accumulate_weight_gradient_: a gradient in float32 that micro-batches add to."""

import pytest
import torch

import coda_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_in_float32(dtype):
    torch.manual_seed(0)
    main = torch.randn(24, 40)
    want = main.double()
    for tokens in (7, 0, 1, 33):
        d_out, x = torch.randn(tokens, 24).to(dtype), torch.randn(tokens, 40).to(dtype)
        assert coda_torch.accumulate_weight_gradient_(main, d_out, x) is main
        want += d_out.double().T @ x.double()
    assert (main - want).abs().max() <= 1e-5 * want.abs().max()


def test_many_small_steps_do_not_get_lost():
    # In bfloat16 the sum would stay at 256.
    main, ones = torch.zeros(8, 8), torch.ones(1, 8, dtype=torch.bfloat16)
    for _ in range(1024):
        coda_torch.accumulate_weight_gradient_(main, ones, ones)
    assert torch.equal(main, torch.full((8, 8), 1024.0))


def test_writes_into_a_view_and_nothing_beside_it():
    whole = torch.full((8, 20), float("nan"))
    view = whole[:, 4:12]
    view.zero_()
    x = torch.randn(5, 8)
    coda_torch.accumulate_weight_gradient_(view, x, x)
    assert torch.allclose(view, x.T @ x, atol=1e-5)
    assert whole[:, :4].isnan().all() and whole[:, 12:].isnan().all()


def test_runs_under_compile_and_says_what_it_writes():
    main, x = torch.zeros(8, 8), torch.randn(5, 8)
    torch.library.opcheck(torch.ops.coda.accumulate_weight_gradient_, (main, x, x))

    @torch.compile(fullgraph=True)
    def twice(main, x):
        coda_torch.accumulate_weight_gradient_(main, x, x)
        return coda_torch.accumulate_weight_gradient_(main, x, x) * 1.0

    main = torch.zeros(8, 8)
    twice(main, x)
    assert torch.allclose(main, 2 * x.T @ x, atol=1e-5)


def test_refusals_name_the_operand():
    x = torch.randn(5, 8)
    with pytest.raises(TypeError, match="main_grad is of torch.bfloat16; it needs float32"):
        coda_torch.accumulate_weight_gradient_(torch.zeros(8, 8, dtype=torch.bfloat16), x, x)
    with pytest.raises(ValueError, match="main_grad is 8x9 on cpu; it needs to be 8x8"):
        coda_torch.accumulate_weight_gradient_(torch.zeros(8, 9), x, x)
    with pytest.raises(ValueError, match="d_out is of 4 tokens; it needs 5"):
        coda_torch.accumulate_weight_gradient_(torch.zeros(8, 8), x[:4], x)
