"""Tensor and sequence parallel on two processes: the losses and gradients of one."""

import coda_torch
import pytest
import reference
import torch
import torch.distributed as dist
from distributed_test import (
    assert_checkpoint_loads,
    assert_same_gradients,
    batch,
    mesh,
    models,
    step,
    whole,
    write_checkpoint,
)
from patch_test import distance, plain_model
from processes import WORLD
from torch.library import opcheck

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def parallel_models(**options):
    return models(**{"intermediate_size": 144, **options})


def of_steps(model_options, rows):
    """rows: of the batch; an odd number does not divide."""
    patched, plain = parallel_models(**model_options)
    names = list(plain.state_dict())
    assert coda_torch.parallelize(patched.train(), mesh()) is patched
    assert list(patched.state_dict()) == names
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (patched, plain.train())]
    for i in range(5):
        ids = batch()[0].roll(i)[:3, :rows]
        losses = [step(model, ids) for model in (patched, plain)]
        assert distance(*losses) <= 1e-5
        if i == 0:
            assert_same_gradients(patched, plain)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (patched, plain)]
        assert distance(whole(norms[0]), norms[1]) <= 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both = [torch.empty_like(losses[0]) for _ in range(WORLD)]
    dist.all_gather(both, losses[0])
    assert torch.equal(both[0], both[1])
    ids = batch()[0][:3, :rows]
    with torch.no_grad():
        got, want = (model.eval()(input_ids=ids, labels=ids) for model in (patched, plain))
    assert distance(got.logits, want.logits) <= 1e-4 and distance(got.loss, want.loss) <= 1e-4


@pytest.mark.parametrize(
    "model_options, rows",
    [({}, 12), ({"tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 1}, 11)],
    ids=str,
)
def test_five_steps_are_one_process_steps(both, model_options, rows):
    both(of_steps, model_options, rows)


def of_frozen_and_checkpointed():
    ids = batch()[0]
    patched, plain = parallel_models(num_hidden_layers=2, pad_token_id=int(ids[0, 3]))  # a padding id that occurs: without a gradient
    for model in (patched, plain):
        model.model.layers[1].requires_grad_(False)
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
    patched.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    coda_torch.parallelize(patched.train(), mesh())
    labels = ids.masked_fill(ids % 7 == 0, -100)
    for items in (None, 17):
        losses = []
        for model in (patched, plain.train()):
            model.zero_grad()
            losses.append(model(input_ids=ids, labels=labels, num_items_in_batch=items).loss)
            losses[-1].backward()
        assert distance(*(loss.detach() for loss in losses)) <= 1e-5
        assert_same_gradients(patched, plain)
    # One token a step, whose row only one process has.
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids[:1])}
    assert torch.equal(patched.eval().generate(ids[:1], **more), plain.eval().generate(ids[:1], **more))


def test_frozen_weights_gradient_checkpointing_and_generate(both):
    both(of_frozen_and_checkpointed)


def of_two_dimensions(sizes):
    patched, plain = parallel_models()
    both = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    coda_torch.shard(coda_torch.parallelize(patched.train(), both["tp"]), both["dp"])
    ids = batch()[0]
    mine = ids.chunk(sizes[0])[both["dp"].get_local_rank()]
    loss = step(patched, mine).clone()
    dist.all_reduce(loss)
    assert distance(loss / WORLD, step(plain.train(), ids)) <= 1e-5
    assert_same_gradients(patched, plain)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
def test_beside_fsdp(both, sizes):
    both(of_two_dimensions, sizes)


def write_parallel(path):
    patched, plain = parallel_models()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for p in patched.parameters():
                p.zero_()  # rank 0's values count
    coda_torch.parallelize(patched, mesh())
    local = {name: tuple(p.to_local().shape) for name, p in patched.named_parameters()}
    layer = "model.layers.1."
    assert local[layer + "self_attn.k_proj.weight"] == (16, 64) and local[layer + "self_attn.o_proj.weight"] == (64, 32)
    assert local[layer + "mlp.up_proj.weight"] == (72, 64) and local[layer + "mlp.down_proj.weight"] == (64, 72)
    assert local["lm_head.weight"] == ((51, 50)[dist.get_rank()], 64)
    write_checkpoint(patched, plain, path)


def test_a_parallel_checkpoint_loads_in_one_process(both, tmp_path):
    both(write_parallel, tmp_path / "checkpoint")
    _, plain = parallel_models()
    assert_checkpoint_loads(tmp_path / "checkpoint", plain, intermediate_size=144)


def of_refusals():
    def refused(error, match, to=None, change=None, **options):
        patched, plain = parallel_models(**options)
        if change is not None:
            change(patched)
        before = {name: p for name, p in patched.named_parameters()}
        with pytest.raises(error, match=match):
            coda_torch.parallelize(patched, to or mesh())
        assert all(p is before[name] for name, p in patched.named_parameters())
        assert distance(patched.train()(input_ids=ids, labels=ids).loss, plain.train()(input_ids=ids, labels=ids).loss) < 1

    ids = batch()[0]
    of_two = dist.device_mesh.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    refused(TypeError, "mesh is a str", "tp")
    refused(ValueError, r"mesh has 2 dimensions; it needs one, as mesh\['tp'\]", of_two)
    refused(ValueError, "num_key_value_heads is 1; it needs to be a multiple of 2", num_key_value_heads=1)
    refused(ValueError, "num_attention_heads is 3; it needs to be a multiple of 2", num_attention_heads=3,
            num_key_value_heads=3, hidden_size=48)  # fmt: skip
    refused(ValueError, "intermediate_size is 136; it needs to be a multiple of 16", intermediate_size=136)
    refused(NotImplementedError, "layer 1 has a hook",
            change=lambda model: model.model.layers[1].register_forward_hook(lambda *_: None))  # fmt: skip
    refused(NotImplementedError, "post_attention_layernorm has a hook",
            change=lambda model: model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: None))  # fmt: skip
    refused(NotImplementedError, "lm_head has a forward of its own",
            change=lambda model: setattr(model.lm_head, "forward", model.lm_head.forward))  # fmt: skip
    with pytest.raises(ValueError, match="not patched"):
        coda_torch.parallelize(plain_model(), mesh())

    patched, _ = parallel_models()
    coda_torch.parallelize(patched, mesh())
    with pytest.raises(ValueError, match="parallel already"):
        coda_torch.parallelize(patched, mesh())
    with pytest.raises(ValueError, match="the model is parallel"):
        coda_torch.unpatch(patched)
    with pytest.raises(IndexError, match="input_ids has 101"):
        patched(input_ids=torch.full((1, 4), 101))
    patched.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="up_proj has a hook"):
        patched(input_ids=ids)
    sharded, _ = parallel_models()
    coda_torch.shard(sharded, mesh())
    with pytest.raises(ValueError, match="parallelize comes before shard"):
        coda_torch.parallelize(sharded, mesh())


def test_what_does_not_fit_is_refused_before_anything_changes(both):
    both(of_refusals)


# The operators that a boundary is put together of, on one process.

HEAD, EPS = 16, 1e-5


def boundary_in_parts(a, h, wo, gamma_mlp, w_gate, w_up, w_down, gamma_attention, wq, wk, wv, position, turns):
    coda = torch.ops.coda
    h, inv_rms = coda.add_inv_rms(coda.linear(a, wo), h, EPS)
    out, _ = coda.stream_mlp(h, inv_rms, gamma_mlp, w_gate, w_up, w_down, True)
    h, inv_rms = coda.add_inv_rms(out, h, EPS)
    return h, coda.stream_qkv(h, inv_rms, gamma_attention, wq, wk, wv, position, turns, HEAD)


def boundary_formula(a, h, wo, gamma_mlp, w_gate, w_up, w_down, gamma_attention, wq, wk, wv, position, inv_freq):
    h = reference.block_tail(a, h, wo, gamma_mlp, w_gate, w_up, w_down, EPS)
    q, k, v = reference.qkv(h, gamma_attention, wq, wk, wv, position, inv_freq, HEAD, EPS)
    return h, torch.cat((*(packed(x) for x in (q, k)), v), -1)


def packed(x):
    return x.unflatten(-1, (-1, 2, HEAD // 16, 8)).transpose(-2, -3).flatten(-4)


def boundary_operands(activation_type, weight_type):
    d, f, heads, kv = 48, 72, 4, 2
    shapes = [(d, heads * HEAD), (d,), (f, d), (f, d), (d, f), (d,), (heads * HEAD, d), (kv * HEAD, d), (kv * HEAD, d)]
    weights = [torch.randn(s) * s[-1] ** -0.5 if len(s) == 2 else 1 + 0.3 * torch.randn(s) for s in shapes]
    rows = [torch.randn(37, heads * HEAD), torch.randn(37, d)]
    operands = [x.to(activation_type) for x in rows] + [w.to(weight_type) for w in weights]
    inv_freq = 1e4 ** -(torch.arange(HEAD // 2) / (HEAD // 2))
    position = torch.arange(37, dtype=torch.int32)
    return operands, position, inv_freq, coda_torch.rotary_turns(inv_freq, heads, kv)


@pytest.mark.parametrize("activation_type, weight_type, bound", [
    (torch.float32, torch.float32, 3e-6), (torch.bfloat16, torch.float32, 2e-2), (torch.bfloat16, torch.bfloat16, 2e-2),
], ids=str)  # fmt: skip
def test_a_boundary_in_parts_is_its_formula(activation_type, weight_type, bound):
    operands, position, inv_freq, turns = boundary_operands(activation_type, weight_type)
    narrow = [x.clone().requires_grad_() for x in operands]
    wide = [x.double().requires_grad_() for x in operands]
    got, want = boundary_in_parts(*narrow, position, turns), boundary_formula(*wide, position, inv_freq)
    upstream = [torch.randn_like(x) for x in want]
    got_grads = torch.autograd.grad(got, narrow, [u.to(x.dtype) for u, x in zip(upstream, got)])
    want_grads = torch.autograd.grad(want, wide, upstream)
    for i, (x, y) in enumerate(zip((*got, *got_grads), (*want, *want_grads), strict=True)):
        reference.check(f"output or gradient {i}", x, y, bound)
    assert all(g.dtype == x.dtype for g, x in zip(got_grads, narrow))


def test_the_parts_of_a_boundary_are_operators_as_the_others():
    coda = torch.ops.coda
    operands, position, _, turns = boundary_operands(torch.float32, torch.float32)
    a, h, wo, gamma_mlp, *mlp, gamma_attention, wq, wk, wv = (x.requires_grad_() for x in operands)
    inv_rms = torch.rand(37)
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(coda.linear, (a, wo), test_utils=quick)
    opcheck(coda.add_inv_rms, (torch.randn_like(h), h, EPS), test_utils=quick)
    of_mlp = (h, inv_rms, gamma_mlp, *mlp)
    opcheck(coda.stream_mlp, (*of_mlp, True))
    out, gate_up = (x.detach() for x in coda.stream_mlp(*of_mlp, True))
    h_only, inv_rms_only, *weights = (x.detach() for x in of_mlp)
    opcheck(coda.stream_mlp_backward, (out, h_only, inv_rms_only, gate_up, *weights, 0b1011), test_utils=quick)
    opcheck(coda.stream_qkv, (h, inv_rms, gamma_attention, wq, wk, wv, position, turns, HEAD), test_utils=quick)
    # Nothing is made for what is frozen.
    frozen = [h, gamma_mlp.detach(), mlp[0], *(w.detach() for w in mlp[1:])]
    out, _ = coda.stream_mlp(frozen[0], inv_rms, *frozen[1:], True)
    out.sum().backward()
    assert mlp[0].grad is not None and mlp[1].grad is None and gamma_mlp.grad is None
