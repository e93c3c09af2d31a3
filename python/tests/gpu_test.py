"""What only a GPU shows: bfloat16 beside PyTorch's, streams, devices, graphs. Skipped without one."""

import copy

import coda_torch
import operators_test
import pytest
import torch
import transformers
from cases import CASES
from patch_test import KINDS, plain_model
from reference import as_tuple, frobenius

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

# Sizes that TMA takes, and an MLP that no tile divides.
SIZES = dict(
    vocab_size=1000, hidden_size=512, intermediate_size=1416, num_attention_heads=8, num_key_value_heads=4, head_dim=64
)
BLOCK = dict(tokens=300, width=256, ffn=424, heads=4, kv_heads=2, head_dim=64)


def gradients(model, tokens):
    model.train()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("kind", KINDS)
def test_patched_model_is_as_near_to_float32_as_it_was(kind):
    plain = plain_model(kind, **SIZES)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(p.bfloat16())
    tokens = torch.randint(3, 1000, (2, 259), device="cuda")
    right = gradients(copy.deepcopy(plain).cuda(), tokens)
    theirs = gradients(copy.deepcopy(plain).bfloat16().cuda(), tokens)
    ours = gradients(coda_torch.patch(plain.bfloat16().cuda()), tokens)
    for name, want in right.items():
        if name == "loss":
            assert abs(ours[name] - want) <= 2**-8 * abs(want)
            continue
        got, its = frobenius(ours[name], want), frobenius(theirs[name], want)
        assert got <= 1.25 * its, f"{name}: {got:.2e} from float32, PyTorch's {its:.2e}"


@operators_test.every_operator
@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [(509,), (2, 257)], ids=str)
def test_operators_are_no_worse_than_pytorchs(case, weight_type, tokens):
    with torch.device("cuda"):
        operators_test.test_bfloat16_is_no_worse_than_pytorchs(case, weight_type, tokens)


@pytest.mark.parametrize("name", ["block", "block_tail"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_block_is_the_same_without_gradients(name, activation):
    case = CASES[name]
    with torch.device("cuda"):
        operands, given = case.operands((300,), torch.bfloat16, torch.float32), case.given((300,))
        outputs = as_tuple(case.operator(**operands, **given, activation=activation))
        with torch.no_grad():
            without = as_tuple(case.operator(**operands, **given, activation=activation))
    assert_same_bits(without, outputs)


def block_operands(device):
    o, g = BLOCK, torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=g) * scale).bfloat16().to(device).requires_grad_()

    t, d, f, q, kv = o["tokens"], o["width"], o["ffn"], o["heads"] * o["head_dim"], o["kv_heads"] * o["head_dim"]
    small = d**-0.5
    operands = [
        random(t, q), random(t, d), random(d, q, scale=small), random(d), random(f, d, scale=small), random(f, d, scale=small),
        random(d, f, scale=small), random(d), random(q, d, scale=small), random(kv, d, scale=small), random(kv, d, scale=small),
    ]  # fmt: skip
    position = torch.arange(t, dtype=torch.int32, device=device)
    inv_freq = 1e4 ** (-torch.arange(o["head_dim"] // 2, device=device) / (o["head_dim"] // 2))
    return operands, (position, coda_torch.rotary_turns(inv_freq, o["heads"], o["kv_heads"]))


def run_block(operands, rotary):
    out = coda_torch.block(*operands, *rotary, head_dim=BLOCK["head_dim"], eps=1e-5)
    grads = torch.autograd.grad([x.float().square().sum() for x in out], operands)
    return [*out, *grads]


def assert_same_bits(got, want):
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(x.cpu(), y.cpu()), f"tensor {i}"


def test_runs_on_the_current_stream():
    operands, rotary = block_operands("cuda")
    want = run_block(operands, rotary)
    side = torch.cuda.Stream()
    # The operands come late on that stream: work on another one would read what is there before.
    late = [torch.full_like(x, float("nan")).requires_grad_() for x in operands]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for x, y in zip(late, operands):
                x.copy_(y)
        got = run_block(late, rotary)
        assert not side.query(), "the host waited for the GPU"
    torch.cuda.synchronize()
    assert_same_bits(got, want)


def test_replay_of_a_graph_takes_new_numbers():
    operands, rotary = block_operands("cuda")
    want = run_block(operands, rotary)
    static = [torch.zeros_like(x).requires_grad_() for x in operands]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_block(static, rotary)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run_block(static, rotary)
    with torch.no_grad():
        for x, y in zip(static, operands):
            x.copy_(y)
    graph.replay()
    assert_same_bits(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_where_its_operands_are():
    want = run_block(*block_operands("cuda:0"))
    assert torch.cuda.current_device() == 0
    operands, rotary = block_operands("cuda:1")
    got = run_block(operands, rotary)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda", 1) for x in got)
    assert_same_bits(got, want)
    operands[2] = operands[2].detach().to("cuda:0").requires_grad_()
    with pytest.raises(ValueError, match="wo"):
        run_block(operands, rotary)


def test_compiled_model_takes_the_same_steps():
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, attn_implementation="sdpa", use_cache=False)
    torch.manual_seed(0)
    eager = coda_torch.patch(transformers.LlamaForCausalLM(config).bfloat16().cuda().train())
    compiled = copy.deepcopy(eager)
    tokens = torch.randint(3, 1000, (2, 256), device="cuda")
    want = gradients(eager, tokens)
    loss = torch.compile(compiled, fullgraph=True)(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert abs(loss - want["loss"]) <= 2**-8 * want["loss"]
    for name, p in compiled.named_parameters():
        assert frobenius(p.grad, want[name]) <= 2e-2, name
