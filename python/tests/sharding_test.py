"""Operators on DTensors of two processes: what they are on whole tensors, and what is refused."""

import coda_torch
import pytest
import torch
from distributed_test import mesh
from patch_test import distance
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
TOKENS, D, F, HEADS, HEAD, VOCAB = 6, 32, 48, 4, 16, 41
ROWS, REPLICATED, COLUMNS = Shard(0), Replicate(), Shard(1)


def operands(*shapes):
    return [torch.randn(TOKENS, *shape) if isinstance(shape, list) else torch.randn(shape) * 0.3 for shape in shapes]


def mlp_weights():
    return operands((F, D), (F, D))


def qkv_weights():
    return operands((D,), (HEADS * HEAD, D), (HEAD, D), (HEAD, D))


def block_weights():
    return operands((D, HEADS * HEAD), (D,), (F, D), (F, D), (D, F))


def rotary():
    return torch.arange(TOKENS), coda_torch.rotary_turns(torch.rand(HEAD // 2), HEADS, 1)


def labels():
    label = torch.randint(0, VOCAB, (TOKENS,))
    label[2] = -100
    return label


def cases():
    """Function, its operands and the integers or constants behind them, placements of either, and options."""
    rows, weights = [ROWS], [REPLICATED]
    qkv = (coda_torch.norm_linear_rope, [*operands([D]), *qkv_weights()], rotary(), {"head_dim": HEAD})
    block = [*operands([HEADS * HEAD], [D]), *block_weights()]
    loss = [*operands([D]), *operands((VOCAB, D))]
    weighted = {"token_weight": torch.rand(TOKENS)}
    yield (*qkv, rows + 4 * weights, [ROWS, REPLICATED])
    yield coda_torch.linear_swiglu, [*operands([D]), *mlp_weights()], (), {}, rows + 2 * weights, []
    yield coda_torch.linear_swiglu, [*operands([D]), *mlp_weights()], (), {}, weights + 2 * rows, []
    yield coda_torch.linear_geglu, [*operands([D]), *mlp_weights()], (), {}, 3 * weights, []
    yield coda_torch.linear_clamped_swiglu, [*operands([D]), *mlp_weights()], (), {"limit": 1.0}, rows + 2 * weights, []
    yield coda_torch.norm_linear_swiglu, [*operands([D], (D,)), *mlp_weights()], (), {}, rows + 3 * weights, []
    yield coda_torch.norm_linear_swiglu, [*operands([D], (D,)), *mlp_weights()], (), {}, 2 * weights + 2 * rows, []
    yield coda_torch.linear_residual, operands([D], (F, D), [F]), (), {}, [ROWS, REPLICATED, ROWS], []
    yield coda_torch.linear_residual, operands([D], (F, D), [F]), (), {}, [REPLICATED, ROWS, COLUMNS], []
    yield coda_torch.block_tail, block, (), {}, 2 * rows + 5 * weights, []
    yield (coda_torch.block, [*block, *qkv_weights()], rotary(), {"head_dim": HEAD}, 2 * rows + 9 * weights,
           [ROWS, REPLICATED])  # fmt: skip
    for options in ({"reduction": "none"}, {"reduction": "sum"}, {"divisor": 3.0}, {"divisor": 3.0, **weighted}):
        yield coda_torch.linear_cross_entropy, loss, (labels(),), options, [ROWS, REPLICATED], [ROWS]
    narrow = [x.bfloat16() for x in loss]
    yield coda_torch.linear_cross_entropy, narrow, (labels(),), {"divisor": 3.0}, [ROWS, REPLICATED], [ROWS]


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def of_rules():
    torch.manual_seed(0)
    for function, given, constants, options, placements, of_constants in cases():
        name = f"{function.__name__} {placements}"
        plain = [x.clone().requires_grad_() for x in given]
        spread = [distribute_tensor(x, mesh(), [p]).requires_grad_() for x, p in zip(given, placements, strict=True)]
        spread_constants = [distribute_tensor(x, mesh(), [p]) for x, p in zip(constants, of_constants, strict=True)]
        spread_options = {
            key: distribute_tensor(x, mesh(), [ROWS]) if isinstance(x, torch.Tensor) else x for key, x in options.items()
        }
        want = as_tuple(function(*plain, *constants, **options))
        got = as_tuple(function(*spread, *spread_constants, **spread_options))
        upstream = [torch.randn_like(x) for x in want]
        bound = 1e-5 if given[0].dtype == torch.float32 else 2**-7  # a part of a sum is rounded on each process
        want_grads = torch.autograd.grad(want, plain, upstream)
        whole = [x.full_tensor() for x in got]
        got_grads = torch.autograd.grad(whole, spread, upstream)
        for i, (x, y) in enumerate(zip(whole, want, strict=True)):
            assert x.shape == y.shape and distance(x.detach(), y.detach()) <= bound, f"{name}: output {i}"
        for i, (x, y) in enumerate(zip(got_grads, want_grads, strict=True)):
            assert isinstance(x, DTensor)
            assert distance(x.full_tensor(), y) <= bound, f"{name}: gradient {i}"


def test_operators_on_shards_are_those_on_the_whole(both):
    both(of_rules)


def of_placements():
    """Nothing is gathered on the way, and a row-sharded batch keeps its dimensions."""
    x = distribute_tensor(torch.randn(4, 3, D), mesh(), [ROWS])
    gate, up = (distribute_tensor(w, mesh(), [REPLICATED]) for w in mlp_weights())
    y = coda_torch.linear_swiglu(x, gate, up)
    assert y.shape == (4, 3, F) and y.placements == (ROWS,) and y.to_local().shape == (2, 3, F)
    columns = [distribute_tensor(w, mesh(), [ROWS]) for w in mlp_weights()]
    y = coda_torch.linear_swiglu(x.redistribute(placements=[REPLICATED]), *columns)
    assert y.placements == (Shard(2),) and y.to_local().shape == (4, 3, F // 2)


def test_placements_stay(both):
    both(of_placements)


def of_refusals():
    def spread(x, placement):
        return distribute_tensor(x, mesh(), [placement])

    x, wide = torch.randn(TOKENS, D), torch.randn(4, TOKENS, D)
    gate, up = mlp_weights()
    with pytest.raises(NotImplementedError, match=r"coda::norm_linear_glu: h is S\(1\); redistribute h to (R|S\(0\))"):
        coda_torch.linear_swiglu(spread(x, COLUMNS), spread(gate, REPLICATED), spread(up, REPLICATED))
    with pytest.raises(NotImplementedError, match="w_up is R; redistribute w_up to"):
        coda_torch.linear_swiglu(spread(x, REPLICATED), spread(gate, ROWS), spread(up, REPLICATED))
    narrow = [spread(w[:24], ROWS) for w in (gate, up)]  # 12 for each process: no whole blocks of 8
    with pytest.raises(NotImplementedError, match="w_gate is .*, w_up is"):
        coda_torch.linear_swiglu(spread(x, REPLICATED), *narrow)
    with pytest.raises(NotImplementedError, match=r"h is of .*its rows to be sharded in the first dimension|x is of"):
        coda_torch.linear_swiglu(spread(wide, Shard(1)), spread(gate, REPLICATED), spread(up, REPLICATED))
    gamma, *heads = qkv_weights()
    position, turns = (spread(t, REPLICATED) for t in rotary())
    with pytest.raises(NotImplementedError, match="wq is .*, wk is .*, wv is"):
        coda_torch.norm_linear_rope(spread(x, REPLICATED), spread(gamma, REPLICATED), *(spread(w, ROWS) for w in heads),
                                    position, turns, head_dim=HEAD)  # fmt: skip
    part = DTensor.from_local(x, mesh(), [Partial()])
    with pytest.raises(NotImplementedError, match=r"x is P.*; redistribute x to"):
        coda_torch.linear_residual(part, spread(gate, REPLICATED), spread(torch.randn(TOKENS, F), REPLICATED))
    head, label = spread(torch.randn(VOCAB, D), REPLICATED), labels()
    with pytest.raises(NotImplementedError, match="redistribute x to R, label to R"):  # how many count is not known here
        coda_torch.linear_cross_entropy(spread(x, ROWS), head, spread(label, ROWS))
    with pytest.raises(TypeError, match="labels is a plain tensor beside DTensors"):
        coda_torch.linear_cross_entropy(spread(x, ROWS), head, label)
    with pytest.raises(TypeError, match="main_grad is a DTensor"):
        coda_torch.accumulate_weight_gradient_(spread(torch.zeros(F, D), REPLICATED), torch.randn(TOKENS, F), x)
    with pytest.raises(TypeError, match="weight is a DTensor; give what this process has"):
        coda_torch.vocab_parallel_cross_entropy(x, head, label, 0)


def test_other_placements_are_refused_by_what_to_gather(both):
    both(of_refusals)
