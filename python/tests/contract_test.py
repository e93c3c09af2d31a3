"""What PyTorch expects of an operator besides its numbers."""

import functools
import math

import coda_torch
import pytest
import reference
import torch
from cases import CASES, HEAD_DIM, INV_FREQ, TURNS
from reference import check
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

F32, BF16 = torch.float32, torch.bfloat16
every_operator = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def total(outputs):
    """A number that every output has a part in, none of them with the same gradient everywhere."""
    return sum((x * torch.linspace(-1, 1, x.numel() or 1).view(x.shape)).sum() for x in reference.as_tuple(outputs))


def backward(case, operands, given, **options):
    return torch.autograd.grad(total(case.operator(**operands, **given)), list(operands.values()), **options)


class CodaCalls(TorchDispatchMode):
    """Records the calls of coda's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "coda":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def calls_of(case, tokens=(5,)):
    operands, given = case.operands(tokens, F32, F32), case.given(tokens)
    with CodaCalls() as recorded:
        backward(case, operands, given)
    return recorded.calls


@every_operator
def test_opcheck(case):
    for operator, args in calls_of(case):
        if "_backward" not in operator.name():
            torch.library.opcheck(operator, args)
        torch.library.opcheck(operator, [x.detach() if isinstance(x, torch.Tensor) else x for x in args])


def test_opcheck_of_what_scales_the_gradients_of_a_loss():
    for dtype in (F32, BF16):
        torch.library.opcheck(torch.ops.coda.scaled_to_bf16.default, [torch.randn(7, 13, dtype=dtype), torch.randn(13)])


def test_no_operator_is_left_unchecked():
    checked = {operator.name() for case in CASES.values() for operator, _ in calls_of(case)}
    checked.add("coda::scaled_to_bf16")
    checked.add("coda::accumulate_weight_gradient_")  # accumulate_test.py
    of_parts = ("linear", "add_inv_rms", "stream_qkv", "stream_mlp", "stream_mlp_backward")
    checked |= {f"coda::{name}" for name in of_parts}  # parallel_test.py
    assert checked == {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("coda::")}


# With operands in front of the rotation patch_test.py compiles them, in a Qwen2 and a Qwen3.
@pytest.mark.parametrize("name", [name for name in CASES if " with " not in name])
def test_one_graph_under_compile(name):
    case = CASES[name]
    torch.compiler.reset()

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def compiled(operands, given):
        return case.operator(**operands, **given)

    for tokens in ((6,), (11,)):  # the second number of tokens makes them a symbol
        operands, given = case.operands(tokens, F32, F32), case.given(tokens)
        grads = torch.autograd.grad(total(compiled(operands, given)), list(operands.values()))
        for name, got, want in zip(operands, grads, backward(case, operands, given)):
            assert torch.equal(got, want), name


def test_inductor_compiles_a_block_between_operators_of_its_own():
    case = CASES["block"]
    operands, given = case.operands((6,), F32, F32), case.given((6,))

    @functools.partial(torch.compile, fullgraph=True)
    def compiled(operands, given):
        operands = dict(operands, a=torch.sin(operands["a"]))
        return tuple(torch.cos(x) for x in case.operator(**operands, **given))

    def eager(operands, given):
        operands = dict(operands, a=torch.sin(operands["a"]))
        return tuple(torch.cos(x) for x in case.operator(**operands, **given))

    got = torch.autograd.grad(total(compiled(operands, given)), list(operands.values()))
    want = torch.autograd.grad(total(eager(operands, given)), list(operands.values()))
    for name, x, y in zip(operands, got, want):
        check(name, x, y, 1e-6)


@every_operator
def test_a_second_backward_is_like_the_first(case):
    operands, given = case.operands((7,), F32, F32), case.given((7,))
    loss = total(case.operator(**operands, **given))
    before = {name: x.detach().clone() for name, x in operands.items()}
    first = torch.autograd.grad(loss, list(operands.values()), retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(loss, list(operands.values()), torch.tensor(2.0))
    for name, x, y, z in zip(operands, first, second, kept):
        assert torch.equal(y, 2 * x), name
        assert torch.equal(x, z), f"the first gradient of {name} was written"
        assert torch.equal(operands[name], before[name]), f"{name} was written"


@every_operator
def test_a_derivative_of_the_derivative_is_refused(case):
    operands, given = case.operands((3,), F32, F32), case.given((3,))
    with pytest.raises(NotImplementedError, match="differentiated once"):
        grads = backward(case, operands, given, create_graph=True)
        torch.autograd.grad(sum((g * g).sum() for g in grads), list(operands.values()), allow_unused=True)


@every_operator
def test_an_expanded_upstream_gradient_is_like_a_whole_one(case):
    operands, given = case.operands((2, 9), F32, F32), case.given((2, 9))
    outputs = reference.as_tuple(case.operator(**operands, **given))
    for output in outputs:
        expanded = torch.ones(()).expand(output.shape)
        got = torch.autograd.grad(output, list(operands.values()), expanded, retain_graph=True, allow_unused=True)
        whole = torch.ones(output.shape)
        want = torch.autograd.grad(output, list(operands.values()), whole, retain_graph=True, allow_unused=True)
        for name, x, y in zip(operands, got, want):
            assert x is y is None or torch.equal(x, y), name


class Cut(torch.autograd.Function):
    """Has no gradient to pass on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@every_operator
def test_no_upstream_gradient_gives_none_or_zeros(case):
    operands, given = case.operands((3,), F32, F32), case.given((3,))
    outputs = reference.as_tuple(case.operator(**operands, **given))
    grads = torch.autograd.grad(
        sum(Cut.apply(x).sum() for x in outputs), list(operands.values()), allow_unused=True
    )  # fmt: skip
    assert all(g is None or not g.any() for g in grads)


@every_operator
def test_gaps_in_the_operands_change_nothing(case):
    operands, given = case.operands((2, 9), F32, F32), case.given((2, 9))
    spread = {}
    for name, x in operands.items():
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        if x.dim() == 2 and name.startswith("w"):
            view = torch.full(x.shape[::-1], float("nan")).T  # a transposed weight
        elif x.dim() == 1:
            view = wide[::2]
        else:
            view = wide[..., : x.shape[-1]]
        view.copy_(x.detach())
        assert not view.is_contiguous()
        spread[name] = view.requires_grad_()
    given_spread = {name: torch.stack((x, x), -1)[..., 0] for name, x in given.items()}
    got = torch.autograd.grad(total(case.operator(**spread, **given_spread)), list(spread.values()))
    for name, x, y in zip(operands, got, backward(case, operands, given)):
        assert torch.equal(x, y), name


@every_operator
def test_a_frozen_operand_has_no_gradient_and_changes_no_other(case):
    operands, given = case.operands((6,), F32, F32), case.given((6,))
    want = dict(zip(operands, backward(case, operands, given)))
    for frozen in operands:
        left = {name: x.detach().requires_grad_(name != frozen) for name, x in operands.items()}
        total(case.operator(**left, **given)).backward()
        assert left[frozen].grad is None
        for name in left:
            assert name == frozen or torch.equal(left[name].grad, want[name]), f"{name} with {frozen} frozen"


@every_operator
def test_only_activations_may_need_gradients(case):
    operands, given = case.operands((6,), F32, F32), case.given((6,))
    want = dict(zip(operands, backward(case, operands, given)))
    left = {name: x.detach().requires_grad_(name in case.activations) for name, x in operands.items()}
    total(case.operator(**left, **given)).backward()
    for name in case.activations:
        assert torch.equal(left[name].grad, want[name]), name


@every_operator
def test_without_grad_nothing_is_kept(case):
    operands, given = case.operands((6,), F32, F32), case.given((6,))
    want = reference.as_tuple(case.operator(**operands, **given))

    class Largest(TorchDispatchMode):
        kept = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function.namespace == "coda":
                named = zip((r.name for r in function._schema.returns), reference.as_tuple(out))
                self.kept += [n for n, x in named if n in ("gate_up", "d_x", "d_weight") and x.numel() > 0]
            return out

    with torch.no_grad(), Largest() as recorded:
        got = reference.as_tuple(case.operator(**operands, **given))
    assert recorded.kept == []
    for x, y in zip(got, want):
        assert not x.requires_grad and torch.equal(x, y.detach())


@every_operator
def test_autocast_computes_in_bfloat16_and_gives_gradients_in_the_parameters_types(case):
    operands, given = case.operands((2, 9), F32, F32), case.given((2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        got = reference.as_tuple(case.operator(**operands, **given))
    grads = torch.autograd.grad(sum(x.sum() for x in got), list(operands.values()))
    narrow = {
        name: x.detach().to(BF16 if name in case.activations else F32).requires_grad_() for name, x in operands.items()
    }
    want = reference.as_tuple(case.operator(**narrow, **given))
    want_grads = torch.autograd.grad(sum(x.sum() for x in want), list(narrow.values()))
    for x, y in zip(got, want):
        assert x.dtype == y.dtype and torch.equal(x, y)
    for name, x, y in zip(operands, grads, want_grads):
        assert x.dtype == operands[name].dtype, name
        assert torch.equal(x, y.to(x.dtype)), name


@every_operator
def test_checkpointing_by_operator_name(case):
    """What is saved by name is not made again, what is not saved is, and the gradients are the same bits."""
    operands, given = case.operands((6,), F32, F32), case.given((6,))
    want = backward(case, operands, given)
    forward_operator = calls_of(case)[0][0]
    for policy, forwards in ((CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)):

        def decide(context, function, *args, policy=policy, **kwargs):
            return policy if function == forward_operator else CheckpointPolicy.PREFER_RECOMPUTE

        with CodaCalls() as recorded:
            loss = checkpoint(
                lambda **operands: total(case.operator(**operands, **given)),
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, decide),
                **operands,
            )
            grads = torch.autograd.grad(loss, list(operands.values()))
        for name, x, y in zip(operands, grads, want):
            assert torch.equal(x, y), name
        assert sum(function == forward_operator for function, _ in recorded.calls) == forwards


@every_operator
def test_what_stands_in_fresh_memory_changes_nothing(case):
    operands, given = case.operands((70,), F32, F32), case.given((70,))
    want = backward(case, operands, given)
    torch.use_deterministic_algorithms(True)  # then PyTorch fills fresh memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        got = backward(case, operands, given)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x, y in zip(operands, got, want):
        assert torch.equal(x, y), name


@every_operator
def test_a_call_is_repeated_bit_for_bit(case):
    operands, given = case.operands((257,), F32, F32), case.given((257,))
    first = backward(case, operands, given)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, backward(case, operands, given)))


# Errors: the exception's type, and a line that names the operand.

case = CASES["block"]


def block_with(**changes):
    operands, given = case.operands((4,), F32, F32), case.given((4,))
    options = {"turns": TURNS, "head_dim": HEAD_DIM, **operands, **given}
    return coda_torch.block(**{**options, **changes})


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"h": torch.zeros(4, 7)}, ValueError, "wo is 68x128; it needs 7xany"),
        ({"h": torch.zeros(4, 68, dtype=torch.float16)}, TypeError,
         "h is of torch.float16; it needs float32 or bfloat16"),
        ({"h": None}, TypeError, "h is a NoneType; it needs to be a tensor"),
        ({"a": torch.zeros(4, 5)}, ValueError, "a is 4x5; it needs a last dimension of 128"),
        ({"a": torch.zeros(3, 128)}, ValueError, "a is of 3 tokens; it needs 4, as h has"),
        ({"a": None}, TypeError, "a is a NoneType; it needs to be a tensor"),
        ({"wo": torch.zeros(68, 128, 1)}, ValueError, "wo is 68x128x1; it needs 68xany"),
        ({"wo": [1.0]}, TypeError, "wo is a list; it needs to be a tensor"),
        ({"wq": None}, TypeError, "wq is a NoneType; it needs to be a tensor"),
        ({"gamma_mlp": torch.zeros(67)}, ValueError, "gamma_mlp is 67; it needs 68"),
        ({"gamma_attention": torch.zeros(68, dtype=torch.float16)}, TypeError, "gamma_attention is of torch.float16"),
        ({"w_up": torch.zeros(80, 68)}, ValueError, "w_up is 80x68; it needs 88x68"),
        ({"w_gate": torch.zeros(87, 68)}, ValueError, "w_gate's number of rows is 87; it needs a multiple of 8"),
        ({"w_down": torch.zeros(68, 88, dtype=torch.int64)}, TypeError, "w_down is of torch.int64"),
        ({"w_down": torch.zeros(68, 88, device="meta")}, ValueError, "w_down is on meta; it needs to be on cpu"),
        ({"wk": torch.zeros(33, 68)}, ValueError, "wk's number of rows is 33; it needs a multiple of head_dim, 32"),
        ({"wv": torch.zeros(32, 68)}, ValueError, "wv is 32x68; it needs 64x68"),
        ({"position": torch.zeros(4)}, TypeError, "position is of torch.float32; it needs integers"),
        ({"position": torch.zeros(5, dtype=torch.int64)}, ValueError, "position is of 5 tokens; it needs 4"),
        ({"h": torch.zeros(())}, ValueError, "h is a single value"),
        ({"bq": torch.zeros(128)}, TypeError, "bk is None beside bq; it needs to be a tensor"),
        ({"bq": torch.zeros(128), "bk": torch.zeros(64)}, TypeError, "bv is None beside bq"),
        ({"bv": torch.zeros(64)}, TypeError, "bq is None beside bv"),
        ({"bq": torch.zeros(127), "bk": torch.zeros(64), "bv": torch.zeros(64)}, ValueError, "bq is 127; it needs 128"),
        ({"bq": torch.zeros(128), "bk": torch.zeros(64), "bv": torch.zeros(64, 1)}, ValueError,
         "bv is 64x1; it needs 64"),
        ({"bq": torch.zeros(128), "bk": torch.zeros(64, dtype=torch.int64), "bv": torch.zeros(64)}, TypeError,
         "bk is of torch.int64; it needs float32 or bfloat16"),
        ({"bq": torch.zeros(128), "bk": torch.zeros(64), "bv": torch.zeros(64, device="meta")}, ValueError,
         "bv is on meta; it needs to be on cpu"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_an_operand_that_cannot_be_is_named(changes, error, message):
    with pytest.raises(error) as raised:
        block_with(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: coda_torch.linear_residual(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(2, 7)), ValueError,
         "residual is of 2 tokens; it needs 3, as x has"),
        (lambda: coda_torch.linear_residual(torch.zeros(3, 5), torch.zeros(7, 5), None), TypeError,
         "residual is a NoneType"),
        (lambda: coda_torch.linear_geglu(torch.zeros(3, 5), torch.zeros(8, 5), torch.zeros(8, 5), approximate="erf"),
         ValueError, "approximate is 'erf'; it needs to be 'none' or 'tanh'"),
        (lambda: coda_torch.linear_clamped_swiglu(torch.zeros(3, 5), torch.zeros(8, 5), torch.zeros(8, 5), limit=0.0),
         ValueError, "limit is 0.0; it needs to be more than 0, or math.inf"),
        (lambda: coda_torch.linear_clamped_swiglu(torch.zeros(3, 5), torch.zeros(8, 5), torch.zeros(8, 5), alpha=math.nan),
         ValueError, "alpha is nan; it needs to be finite"),
        (lambda: coda_torch.rotary_turns([1.0], 1, 1), TypeError, "inv_freq is a list"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3)), TypeError,
         "labels is of torch.float32; it needs integers"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(2, dtype=int)),
         ValueError, "labels is 2"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), [0, 0, 0]), TypeError,
         "labels is a list"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=int),
                                                 reduction="average"), ValueError, "reduction is 'average'"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=int),
                                                 ignore_index=2**40), ValueError, "ignore_index is 1099511627776"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=int),
                                                 label_smoothing=1.5), ValueError, "label_smoothing"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=int),
                                                 softcap=-1.0), ValueError, "softcap"),
        (lambda: coda_torch.linear_cross_entropy(torch.zeros(3, 5), torch.zeros(7, 5), torch.zeros(3, dtype=int),
                                                 token_weight=torch.zeros(2)), ValueError, "token_weight is 2"),
        (lambda: coda_torch.linear_swiglu(torch.zeros(3, 5), None, None), TypeError, "w_gate is a NoneType"),
        (lambda: coda_torch.linear_swiglu(torch.zeros(3, 5, device="meta"), torch.zeros(8, 5), torch.zeros(8, 5)),
         NotImplementedError, "x is on meta; it needs a CPU or a CUDA device"),
        (lambda: block_with(head_dim=24), ValueError, "head_dim is 24; it needs a multiple of 16"),
        (lambda: block_with(q_norm=torch.zeros(32)), TypeError,
         "k_norm is None beside q_norm; it needs to be a tensor: q and k have norms or none has"),
        (lambda: block_with(q_norm=torch.zeros(32), k_norm=torch.zeros(32)), NotImplementedError,
         "head_dim is 32 beside q_norm; it needs 64 or 128"),
        (lambda: block_with(q_norm=torch.zeros(64), k_norm=torch.zeros(32), head_dim=64), ValueError,
         "k_norm is 32; it needs 64"),
        (lambda: block_with(q_norm=torch.zeros(64, 1), k_norm=torch.zeros(64), head_dim=64), ValueError,
         "q_norm is 64x1; it needs 64"),
        (lambda: block_with(q_norm=torch.zeros(32), k_norm=torch.zeros(32), bq=torch.zeros(128), bk=torch.zeros(64),
                            bv=torch.zeros(64)), NotImplementedError, "q_norm is beside bq; coda has biases or norms"),
        (lambda: block_with(activation="relu"), ValueError,
         "activation is 'relu'; it needs to be 'silu', 'gelu' or 'gelu_tanh'"),
        (lambda: block_with(turns=INV_FREQ), ValueError, "turns is 16; it needs 2x128"),
        (lambda: block_with(turns=TURNS.bfloat16()), TypeError, "turns is of torch.bfloat16; it needs float32"),
    ],
)  # fmt: skip
def test_what_a_call_lacks_is_said(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"bq": torch.zeros(128)}, "k_proj.bias is missing; it needs 64"),
        ({"bk": torch.zeros(64)}, "q_proj.bias is missing; it needs 128"),
        ({"q_norm": torch.zeros(32), "head_dim": 64}, "q_norm.weight is 32 values; it needs 64"),
        ({"q_norm": torch.zeros(64), "head_dim": 64}, "k_norm.weight is missing; it needs 64"),
        ({"q_norm": torch.zeros(32), "k_norm": torch.zeros(32)}, "head_dim is 32 beside q_norm; it needs 64 or 128"),
        ({"bq": torch.zeros(128), "q_norm": torch.zeros(32)}, "q_norm is beside a bias; it needs to be without one"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_an_operator_called_by_its_name_refuses_them_too(changes, message):
    case = CASES["norm_linear_rope"]
    operands, given = case.operands((4,), F32, F32), case.given((4,))
    options = dict.fromkeys(("bq", "bk", "bv", "q_norm", "k_norm"))
    given = {"position": given["position"].to(torch.int32), "turns": TURNS, "head_dim": HEAD_DIM}
    with pytest.raises(RuntimeError) as raised:
        torch.ops.coda.norm_linear_rope(**{**operands, **options, **given, **changes}, eps=1e-5, keep=True)
    assert message in str(raised.value)
