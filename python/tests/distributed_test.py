"""Two processes on gloo: the losses and gradients of one."""

import copy

import coda_torch
import pytest
import reference
import torch
import torch.distributed as dist
from patch_test import distance, plain_model, with_adapters
from processes import WORLD

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def models(**options):
    torch.manual_seed(0)
    plain = plain_model(**options)
    return coda_torch.patch(copy.deepcopy(plain)), plain


def batch():
    """All of it, and this process' half."""
    ids = torch.randint(3, 101, (4, 12), generator=torch.Generator().manual_seed(1))
    return ids, ids.chunk(WORLD)[dist.get_rank()]


def step(model, ids, **more):
    loss = model(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    return loss.detach()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def mean(loss):
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / WORLD


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (WORLD,))


def assert_same_gradients(model, plain, bound=1e-5):
    for (name, p), (its_name, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == its_name
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or distance(whole(p.grad), q.grad) <= bound, f"{name}: {distance(whole(p.grad), q.grad)}"


def of_ddp():
    patched, plain = models()
    ids, mine = batch()
    ddp = torch.nn.parallel.DistributedDataParallel(patched.train())
    assert distance(mean(step(ddp, mine)), step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)
    # Two micro-batches, the first without a reduction.
    patched.zero_grad(), plain.zero_grad()
    with ddp.no_sync():
        step(ddp, mine)
    step(ddp, mine.flip(1))
    step(plain, ids), step(plain, ids.flip(1))
    assert_same_gradients(patched, plain)
    assert not any(ddp.load_state_dict(ddp.state_dict()))


def test_ddp(both):
    both(of_ddp)


def of_fsdp(options, model_options):
    patched, plain = models(**model_options)
    names = list(plain.state_dict())
    ids, mine = batch()
    assert coda_torch.shard(patched.train(), mesh(), **options) is patched
    assert list(patched.state_dict()) == names
    assert all(p.to_local().numel() < p.numel() for p in patched.parameters())
    for _ in range(3):
        for model in (patched, plain):
            model.zero_grad()
        assert distance(mean(step(patched, mine)), step(plain.train(), ids)) <= 1e-5
        assert_same_gradients(patched, plain)
        for model in (patched, plain):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    # Two micro-batches, the first without a reduction.
    patched.zero_grad(), plain.zero_grad()
    patched.set_requires_gradient_sync(False)
    step(patched, mine)
    patched.set_requires_gradient_sync(True)
    step(patched, mine.flip(1))
    step(plain, ids), step(plain, ids.flip(1))
    assert_same_gradients(patched, plain)
    with torch.no_grad():
        assert distance(patched.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits) <= 1e-5
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **more), plain.generate(ids, **more))


@pytest.mark.parametrize(
    "options, model_options",
    [
        ({}, {}),
        ({"reshard_after_forward": True}, {}),
        ({"reshard_after_forward": False}, {}),
        ({}, {"tie_word_embeddings": True}),
        ({}, {"kind": "qwen2"}),
        ({}, {"kind": "qwen3"}),
        ({}, {"kind": "gemma"}),
    ],
    ids=str,
)
def test_fsdp(both, options, model_options):
    both(of_fsdp, options, model_options)


def of_two_dimensions():
    patched, plain = models()
    ids, mine = batch()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    coda_torch.shard(patched.train(), mesh)
    assert distance(mean(step(patched, mine)), step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)


def test_fsdp_on_a_mesh_of_two_dimensions(both):
    both(of_two_dimensions)


def of_mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    patched, _ = models()
    alone = copy.deepcopy(patched).bfloat16()
    ids, mine = batch()
    coda_torch.shard(
        patched.train(), mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    loss = mean(step(patched, mine))
    halves = []
    for half in ids.chunk(WORLD):
        alone.zero_grad()
        halves.append((step(alone.train(), half), [p.grad.float() for p in alone.parameters()]))
    assert distance(loss, sum(half_loss for half_loss, _ in halves) / WORLD) <= 1e-5
    for (name, p), *grads in zip(patched.named_parameters(), *(g for _, g in halves), strict=True):
        assert p.grad.dtype == torch.float32
        assert distance(whole(p.grad), sum(grads) / WORLD) <= 1e-5, name


def test_fsdp_in_bfloat16_is_one_process_in_bfloat16(both):
    both(of_mixed_precision)


def of_checkpointing(use_reentrant):
    patched, plain = models()
    ids, mine = batch()
    patched.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    coda_torch.shard(patched.train(), mesh())
    assert distance(mean(step(patched, mine)), step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)


def test_fsdp_with_gradient_checkpointing(both):
    both(of_checkpointing, False)


def of_prefetch():
    """Every unit but the model is found by the model's own state: what lets one gather ahead of another."""
    from torch.distributed.fsdp import FSDPModule

    patched, _ = models()
    _, mine = batch()
    coda_torch.shard(patched.train(), mesh())
    units = [module for module in patched.modules() if isinstance(module, FSDPModule)]
    assert len(units) == 1 + 4 + 1 and units[0] is patched
    step(patched, mine)
    state = patched._get_fsdp_state()
    assert {id(s) for s in state._state_ctx.all_states} == {id(unit._get_fsdp_state()) for unit in units}
    sizes = [len(unit._get_fsdp_state()._fsdp_param_group.fsdp_params) for unit in units]
    assert sorted(sizes) == sorted([2, 1, 4, 9, 9, 5])  # norm and head; embedding; entry, two boundaries, tail


def test_boundaries_are_the_units_of_fsdp(both):
    both(of_prefetch)


def of_frozen():
    patched, plain = models()
    ids, mine = batch()
    for model in (patched, plain):
        model.requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
    coda_torch.shard(patched.train(), mesh())
    step(patched, mine), step(plain.train(), ids)
    assert_same_gradients(patched, plain)


def test_fsdp_with_frozen_weights(both):
    both(of_frozen)


def of_adapters(before_patch):
    torch.manual_seed(0)
    plain = plain_model()
    if before_patch:
        patched = coda_torch.patch(with_adapters(copy.deepcopy(plain)))
    else:
        patched = with_adapters(coda_torch.patch(copy.deepcopy(plain)))
    with_adapters(plain)
    ids, mine = batch()
    coda_torch.shard(patched.train(), mesh())
    assert distance(mean(step(patched, mine)), step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)


@pytest.mark.parametrize("before_patch", [True, False])
def test_fsdp_with_adapters(both, before_patch):
    both(of_adapters, before_patch)


def write_checkpoint(patched, plain, path):
    """And compares the whole, gathered without a file."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    dcp.save({"model": get_model_state_dict(patched)}, checkpoint_id=path)
    full = get_model_state_dict(patched, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert list(full) == list(plain.state_dict())
        assert all(torch.equal(full[name], x) for name, x in plain.state_dict().items())


def assert_checkpoint_loads(path, plain, **sizes):
    """In one process, into another model."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(7)
    other = plain_model(**sizes)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    other.load_state_dict(state["model"])
    assert all(torch.equal(x, y) for x, y in zip(other.state_dict().values(), plain.state_dict().values()))


def write_sharded(path):
    patched, plain = models()
    coda_torch.shard(patched, mesh())
    write_checkpoint(patched, plain, path)


def test_a_sharded_checkpoint_loads_in_one_process(both, tmp_path):
    both(write_sharded, tmp_path / "checkpoint")
    _, plain = models()
    assert_checkpoint_loads(tmp_path / "checkpoint", plain)


def of_refusals():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    weight = distribute_tensor(torch.randn(8, 4), mesh(), [Shard(0)])
    with pytest.raises(TypeError, match="weight is a DTensor.*gather it first"):
        coda_torch.linear_residual(torch.randn(3, 4), weight, torch.randn(3, 8))
    with pytest.raises(TypeError, match="weight is a plain tensor beside DTensors; distribute it, or gather them first"):
        coda_torch.linear_cross_entropy(
            distribute_tensor(torch.randn(3, 4), mesh(), [Replicate()]), torch.randn(9, 4), torch.zeros(3, dtype=int)
        )

    patched, plain = models()
    with pytest.raises(ValueError, match="not patched"):
        coda_torch.shard(plain, mesh())
    hook = patched.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="layer 1 has a hook"):
        coda_torch.shard(patched, mesh())
    hook.remove()
    coda_torch.shard(patched, mesh())
    with pytest.raises(ValueError, match="sharded already"):
        coda_torch.shard(patched, mesh())
    with pytest.raises(ValueError, match="sharded"):
        coda_torch.unpatch(patched)
    hook = patched.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="layer 1 has a hook"):
        patched(input_ids=batch()[1])


def test_what_is_sharded_otherwise_is_refused(both):
    both(of_refusals)


def of_vocabulary(activation_type, reduction):
    torch.manual_seed(0)
    x = torch.randn(3, 67, 24).to(activation_type).requires_grad_()
    head = torch.randn(101, 24) * 0.5
    label = torch.randint(0, 101, (3, 67))
    label[:, ::5] = -100
    # No equal shares: 60 rows and 41.
    first = (0, 60)[dist.get_rank()]
    weight = head[first : (60, 101)[dist.get_rank()]].clone().requires_grad_()
    loss = coda_torch.vocab_parallel_cross_entropy(x, weight, label, first, reduction=reduction)
    upstream = torch.randn_like(loss)
    d_x, d_weight = torch.autograd.grad(loss, (x, weight), upstream)

    wide = [t.detach().double().requires_grad_() for t in (x, head)]
    want, _ = reference.cross_entropy(*wide, label, reduction=reduction)
    want_x, want_head = torch.autograd.grad(want, wide, upstream.double())
    narrow = activation_type == torch.bfloat16
    reference.check("loss", loss, want, 5e-3 if narrow else 2e-6)
    reference.check("d_x", d_x, want_x, 8e-3 if narrow else 3e-6)
    reference.check("d_weight", d_weight, want_head[first : first + len(weight)], 8e-3 if narrow else 3e-6)
    both = [torch.empty_like(loss) for _ in range(WORLD)]
    dist.all_gather(both, loss.detach())
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("activation_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_loss_of_a_vocabulary_in_two_parts(both, activation_type, reduction):
    both(of_vocabulary, activation_type, reduction)


def of_vocabulary_troubles():
    rank = dist.get_rank()
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    ignored = torch.full((4,), -100)
    loss = coda_torch.vocab_parallel_cross_entropy(x, weight, ignored, 5 * rank, reduction="sum")
    assert loss.item() == 0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))
    assert coda_torch.vocab_parallel_cross_entropy(x, weight, ignored, 5 * rank).isnan()
    with pytest.raises(ValueError, match="label of row 2 is 10"):
        coda_torch.vocab_parallel_cross_entropy(x, weight, torch.tensor([0, 9, 10, 3]), 5 * rank)
    with pytest.raises(ValueError, match="weight is without rows"):
        coda_torch.vocab_parallel_cross_entropy(x, weight[:0], ignored, 0)


def test_what_a_vocabulary_in_two_parts_ignores_and_refuses(both):
    both(of_vocabulary_troubles)


def of_tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    patched, plain = models()
    ids, _ = batch()
    plan = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in patched.model.layers:
        parallelize_module(layer, mesh(), dict(plan))
    assert distance(step(patched.train(), ids), step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)


def test_tensor_parallel_layers_run_unfused(both):
    both(of_tensor_parallel)
