"""patch(): a Hugging Face model computes what it did, and remains itself in everything else."""

import copy
import logging

import coda_torch
import pytest
import torch
import torch.nn.utils.prune
import transformers
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

VOCAB = 101
SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=136, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5, attn_implementation="sdpa",
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}
DEFAULTS = {"qwen3": {"head_dim": 64}, "gemma": {"head_dim": 32}}
# What a test of the model's own parts goes through: a kind for each way that these are put together.
each_kind = pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma"])


def plain_model(kind="llama", **options):
    """Random, its norms' weights around 1 (Gemma's, distances from it, around 0) and its biases around 0."""
    config = getattr(transformers, f"{KINDS[kind]}Config")(**{**SIZES, **DEFAULTS.get(kind, {}), **options})
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            around = 0 if name.endswith("bias") or kind == "gemma" else 1
            p.normal_(around, 0.3) if p.dim() == 1 else p.mul_(3)
    return model


def pair(kind="llama", **options):
    """A model that is patched, and one that is the same otherwise."""
    plain = plain_model(kind, **options)
    return coda_torch.patch(copy.deepcopy(plain)), plain


def tokens(*shape):
    return torch.randint(3, VOCAB, shape)


def distance(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def train_step(model, **inputs):
    model.train()
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


def assert_agree(patched, plain, bound=1e-5, **inputs):
    """Logits without and with labels, the loss, and every gradient."""
    inputs.setdefault("labels", inputs.get("input_ids"))
    with torch.no_grad():
        got, want = patched.eval()(**inputs), plain.eval()(**inputs)
    assert distance(got.logits, want.logits) <= bound
    assert distance(got.loss, want.loss) <= bound
    assert distance(train_step(patched, **inputs), train_step(plain, **inputs)) <= bound
    assert_same_gradients(patched, plain, bound)


def assert_same_gradients(patched, plain, bound=1e-5):
    for (name, p), (its_name, q) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        assert name == its_name
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or distance(p.grad, q.grad) <= bound, f"{name}: {distance(p.grad, q.grad):.1e}"


LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip


@pytest.mark.parametrize(
    "kind, options",
    [
        ("llama", {}),
        ("llama", {"attn_implementation": "eager"}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 32}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"num_hidden_layers": 1}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": 7, "attn_implementation": "eager"}),
        ("qwen2", {}),
        ("qwen2", {"attn_implementation": "eager", "tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),  # none of the layers
        ("qwen3", {}),
        ("qwen3", {"attn_implementation": "eager", "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("gemma", {}),
        ("gemma", {"attn_implementation": "eager", "num_key_value_heads": 1, "hidden_act": "gelu"}),
        ("gemma", {"tie_word_embeddings": False, "head_dim": 16, "hidden_act": "silu"}),
        ("llama", {"hidden_act": "gelu"}),
    ],
    ids=str,
)
def test_logits_and_gradients(kind, options):
    assert_agree(*pair(kind, **options), input_ids=tokens(2, 20))


def padded(side):
    mask = torch.ones(2, 20, dtype=int)
    mask[0, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    ids = tokens(2, 20)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def of_ids(**more):
    ids = tokens(2, 20)
    return {"input_ids": ids, "labels": ids, **more}


@pytest.mark.parametrize(
    "inputs",
    [
        lambda: of_ids(position_ids=torch.arange(20)[None] + 17),
        lambda: of_ids(position_ids=torch.stack((torch.arange(20), torch.arange(20) * 3)), use_cache=False),
        lambda: of_ids(
            position_ids=torch.cat((torch.arange(8), torch.arange(5), torch.arange(7))).expand(2, 20), use_cache=False
        ),
        lambda: padded("left"),
        lambda: padded("right"),
        lambda: of_ids(num_items_in_batch=57),
        lambda: of_ids(num_items_in_batch=torch.tensor(57)),
        lambda: of_ids(shift_labels=tokens(2, 20)),
        lambda: {"inputs_embeds": torch.randn(2, 20, 64), "labels": tokens(2, 20)},
        lambda: {"input_ids": tokens(1, 2), "labels": tokens(1, 2)},
    ],
    ids=["positions", "positions of each row", "packed documents", "padding left", "padding right", "items",
         "items in a tensor", "shifted labels", "embeddings", "two tokens"],
)  # fmt: skip
def test_inputs(inputs):
    assert_agree(*pair(), **inputs())


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_count_of_items_rounds_no_gradient_once_more(kind):
    patched = coda_torch.patch(plain_model()).train()
    ids = tokens(2, 20)
    gradients = []
    for items in (None, 2 * 38):
        patched.zero_grad()
        more = {} if items is None else {"num_items_in_batch": torch.tensor(items) if kind == "tensor" else items}
        with torch.autocast("cpu", torch.bfloat16):
            patched(input_ids=ids, labels=ids, **more).loss.backward()
        gradients.append([p.grad.clone() for p in patched.parameters()])
    # Half of the mean's; 1/38 rounded to bfloat16 is 2e-3 off, and a second rounding adds as much.
    assert all(distance(2 * half, mean) < 5e-4 for mean, half in zip(*gradients, strict=True))


def test_packed_documents_do_not_see_each_other():
    patched, _ = pair()
    patched.eval()
    first, second = tokens(1, 8), tokens(1, 12)
    position = torch.cat((torch.arange(8), torch.arange(12)))[None]
    with torch.no_grad():
        both = patched(input_ids=torch.cat((first, second), 1), position_ids=position, use_cache=False).logits
        assert distance(both[:, :8], patched(input_ids=first).logits) < 1e-5
        assert distance(both[:, 8:], patched(input_ids=second).logits) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_called_as_the_model_calls_it(kind):
    seen = []

    def recording(module, q, k, v, mask, **kwargs):
        seen.append({"mask": mask, "v": v, "training": module.training, "layer": module.layer_idx, **kwargs})
        return torch.nn.functional.scaled_dot_product_attention(
            q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), is_causal=True
        ).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    patched, plain = pair(kind, attn_implementation="recording", attention_dropout=0.25)
    inputs = {"input_ids": tokens(2, 6), "use_cache": False}
    patched.train()(**inputs), plain.train()(**inputs)
    assert len(seen) == 6
    for got, want in zip(seen[:3], seen[3:]):
        assert set(want) <= set(got) | {"use_cache"}
        for name in set(want) - {"use_cache"}:
            if name == "v":
                assert distance(got["v"], want["v"]) < 1e-5
            elif isinstance(want[name], torch.Tensor):
                assert torch.equal(got[name], want[name]), name
            else:
                assert got[name] == want[name], name


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_training_steps_have_the_same_losses(kind):
    models = pair(kind)
    batches = [tokens(2, 16) for _ in range(4)] * 5
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        of_model = []
        for batch in batches:
            of_model.append(train_step(model, input_ids=batch, labels=batch).item())
            optimizer.step()
        losses.append(of_model)
    assert losses[1][-1] < losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "kind, trained",
    [
        ("llama", ["layers.1.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"]),
        ("qwen2", ["layers.1.self_attn.k_proj.bias"]),
        ("qwen2", ["layers.0.self_attn.q_proj.bias", "layers.1.self_attn.v_proj.weight"]),
        ("qwen3", ["layers.0.self_attn.q_norm.weight"]),
        ("qwen3", ["layers.1.self_attn.k_norm.weight", "layers.2.self_attn.q_proj.weight"]),
        ("gemma", ["layers.1.input_layernorm.weight"]),
        ("gemma", ["layers.1.post_attention_layernorm.weight", "embed_tokens.weight"]),
    ],
    ids=str,
)
def test_a_frozen_model_with_a_few_trained_parts(kind, trained):
    patched, plain = pair(kind)
    for model in (patched, plain):
        model.requires_grad_(False)
        for name in trained:
            model.model.get_parameter(name).requires_grad_()
    ids = tokens(2, 12)
    train_step(patched, input_ids=ids, labels=ids), train_step(plain, input_ids=ids, labels=ids)
    assert sum(p.grad is not None for p in patched.parameters()) == len(trained)
    assert_same_gradients(patched, plain)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapters(model, seed=0):
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("when", ["before patch", "after patch"])
def test_adapters_in_the_place_of_linear_layers(when, caplog):
    plain = plain_model()
    if when == "before patch":
        patched = coda_torch.patch(with_adapters(copy.deepcopy(plain)))
    else:
        patched = with_adapters(coda_torch.patch(copy.deepcopy(plain)))
    with caplog.at_level(logging.WARNING, "coda_torch"):
        assert_agree(patched, with_adapters(plain), input_ids=tokens(2, 12))
    assert "boundary 0 runs unfused, since q_proj is a Lora" in caplog.text
    assert caplog.text.count("boundary 1 ") == 1


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_a_part_that_is_replaced_after_patch_is_what_runs(part):
    patched, plain = pair()
    for model in (patched, plain):
        torch.manual_seed(5)
        other = copy.deepcopy(getattr(model.model.layers[1], part))
        for p in other.parameters():
            nn.init.normal_(p, 0, 0.2)
        setattr(model.model.layers[1], part, other)
    ids = tokens(2, 12)
    train_step(patched, input_ids=ids, labels=ids), train_step(plain, input_ids=ids, labels=ids)
    for name, p in plain.named_parameters():
        assert distance(patched.get_parameter(name).grad, p.grad) < 1e-5, name


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    "kind, name",
    [("llama", "self_attn.q_proj"), ("llama", "mlp.down_proj"), ("llama", "post_attention_layernorm"),
     ("qwen2", "self_attn.k_proj"), ("qwen3", "self_attn.k_norm"),
     ("gemma", "post_attention_layernorm")],
)  # fmt: skip
def test_a_parametrized_weight(kind, name):
    patched, plain = pair(kind)
    for model in (patched, plain):
        nn.utils.parametrize.register_parametrization(model.model.layers[1].get_submodule(name), "weight", Doubled())
    assert_agree(patched, plain, input_ids=tokens(2, 12))


def test_another_activation(caplog):
    patched, plain = pair()
    for model in (patched, plain):
        model.model.layers[1].mlp.act_fn = nn.Tanh()
    with caplog.at_level(logging.WARNING, "coda_torch"):
        assert_agree(patched, plain, input_ids=tokens(2, 12))
    assert "mlp's activation is a Tanh" in caplog.text


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_a_pruned_weight(name):
    patched, plain = pair()
    for model in (patched, plain):
        nn.utils.prune.l1_unstructured(model.model.layers[1].get_submodule(name), "weight", 0.5)
    assert_agree(patched, plain, input_ids=tokens(2, 12))


@pytest.mark.parametrize(
    "kind, at",
    [
        *[("llama", at) for at in (
            "layers.1.post_attention_layernorm", "layers.0.input_layernorm", "layers.2.mlp", "layers.1.mlp.act_fn", "layers.1.self_attn.o_proj",
            "layers.0", "layers.1", "layers.2", "layers.1.self_attn", "norm")],
        ("qwen2", "layers.0.self_attn.q_proj"),
        ("qwen2", "layers.1"),
        ("qwen3", "layers.1.self_attn.q_norm"),
        ("qwen3", "layers.0.self_attn.k_norm"),
        ("qwen3", "layers.1"),
        ("gemma", "layers.1.post_attention_layernorm"),
        ("gemma", "layers.1"),
    ],
)  # fmt: skip
def test_a_hook_sees_what_it_did_and_is_warned_of_once(kind, at, caplog):
    patched, plain = pair(kind)
    seen = {}
    for name, model in (("patched", patched), ("plain", plain)):

        def look(module, args, output, name=name):
            seen.setdefault(name, output[0] if isinstance(output, tuple) else output)

        model.model.get_submodule(at).register_forward_hook(look)
    with caplog.at_level(logging.WARNING, "coda_torch"):
        assert_agree(patched, plain, input_ids=tokens(2, 12))
    assert distance(seen["patched"], seen["plain"]) < 1e-5
    assert caplog.text.count("runs unfused") == (0 if at == "norm" else 1)


def test_a_bias_that_is_taken_away_or_added():
    for kind, weight_only in (("qwen2", False), ("llama", True)):
        patched, plain = pair(kind)
        for model in (patched, plain):
            projection = model.model.layers[1].self_attn.k_proj
            projection.bias = nn.Parameter(torch.linspace(-1, 1, projection.out_features)) if weight_only else None
        assert_agree(patched, plain, input_ids=tokens(2, 12))


@pytest.mark.parametrize(
    "kind, at",
    [("qwen3", "layers.1.self_attn.k_norm"), ("qwen3", "layers.1.post_attention_layernorm"),
     ("gemma", "layers.2.input_layernorm")],
)  # fmt: skip
def test_a_norm_with_an_eps_of_its_own(kind, at, caplog):
    patched, plain = pair(kind)
    for model in (patched, plain):
        norm = model.model.get_submodule(at)
        setattr(norm, "eps" if kind == "gemma" else "variance_epsilon", 0.5)
    with caplog.at_level(logging.WARNING, "coda_torch"):
        assert_agree(patched, plain, input_ids=tokens(2, 12))
    assert "runs unfused, since its norms have different eps" in caplog.text


def test_two_layers_with_hooks_beside_each_other():
    patched, plain = pair(num_hidden_layers=4)
    for i in (1, 2):
        patched.model.layers[i].register_forward_hook(lambda *_: None)
    assert_agree(patched, plain, input_ids=tokens(2, 12))


@each_kind
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(kind, use_reentrant):
    patched, plain = pair(kind)
    ids = tokens(2, 12)
    for model in (patched, plain):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    runs = []
    for boundary in patched.model.coda_boundaries:
        boundary.register_forward_pre_hook(lambda *_: runs.append(1))
    assert distance(train_step(patched, input_ids=ids, labels=ids), train_step(plain, input_ids=ids, labels=ids)) < 1e-5
    assert_same_gradients(patched, plain)
    assert len(runs) == 1 + 2 * 3  # those behind an attention run again in the backward pass


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind, use_cache):
    patched, plain = pair(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
    mask = torch.ones(2, 6, dtype=int)
    mask[0, :2] = 0
    options = dict(attention_mask=mask, max_new_tokens=8, min_new_tokens=8, use_cache=use_cache)
    ids = tokens(2, 6)
    for more in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        got, want = (model.eval().generate(ids, **options, **more) for model in (patched, plain))
        assert torch.equal(got, want), more


@each_kind
def test_a_static_cache(kind):
    patched, plain = pair(kind)
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static")
    ids = tokens(2, 6)
    got, want = (model.eval().generate(ids, **options, disable_compile=True) for model in (patched, plain))
    assert torch.equal(got, want)


def test_a_cache_continues_where_it_ended():
    patched, plain = pair()
    ids = tokens(2, 12)
    with torch.no_grad():
        first = patched.eval()(input_ids=ids[:, :7], use_cache=True)
        second = patched(input_ids=ids[:, 7:], past_key_values=first.past_key_values, use_cache=True)
        assert distance(second.logits, plain.eval()(input_ids=ids).logits[:, 7:]) < 1e-5


def test_the_model_without_its_head():
    patched, plain = pair()
    ids = tokens(2, 9)
    got, want = patched.model(input_ids=ids).last_hidden_state, plain.model(input_ids=ids).last_hidden_state
    assert distance(got, want) < 1e-5


def test_a_tuple_where_one_is_asked_for():
    patched, _ = pair()
    ids = tokens(2, 9)
    for model in (patched.eval(), patched.train()):
        output = model(input_ids=ids, labels=ids, return_dict=False)
        assert isinstance(output, tuple)
        loss = output[0]
        assert torch.equal(loss, model(input_ids=ids, labels=ids).loss)


@each_kind
def test_state_dict_is_hugging_faces_in_both_directions(kind):
    patched, plain = pair(kind)
    of_patched, of_plain = patched.state_dict(), plain.state_dict()
    assert list(of_patched) == list(of_plain)
    assert all(torch.equal(of_patched[name], of_plain[name]) for name in of_plain)
    assert [n for n, _ in patched.named_parameters()] == [n for n, _ in plain.named_parameters()]
    other = plain_model(kind)
    matched = "<All keys matched successfully>"
    assert str(patched.load_state_dict(other.state_dict(), strict=True)) == matched
    assert all(torch.equal(x, y) for x, y in zip(patched.state_dict().values(), other.state_dict().values()))
    assert str(plain.load_state_dict(patched.state_dict(), strict=True)) == matched
    assert str(patched.model.load_state_dict(other.model.state_dict(), strict=True)) == matched
    ids = tokens(2, 9)
    assert distance(patched.eval()(input_ids=ids).logits, other.eval()(input_ids=ids).logits) < 1e-5
    missing = other.state_dict()
    del missing["model.norm.weight"]
    with pytest.raises(RuntimeError, match="model.norm.weight"):
        patched.load_state_dict(missing)


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained_and_from_pretrained(tmp_path, tied):
    patched, plain = pair(tie_word_embeddings=tied)
    patched.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    files = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "patched").iterdir()} == files
    for name in files:
        if not name.startswith("generation"):
            assert (tmp_path / "patched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "patched")
    ids = tokens(2, 9)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    assert_agree(coda_torch.patch(loaded), plain, input_ids=ids)


@each_kind
def test_unpatch_restores_bit_for_bit(kind):
    patched, plain = pair(kind)
    assert coda_torch.unpatch(patched) is patched
    ids = tokens(2, 9)
    loss, want = train_step(patched, input_ids=ids, labels=ids), train_step(plain, input_ids=ids, labels=ids)
    assert torch.equal(loss, want)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(patched.parameters(), plain.parameters()))
    assert vars(patched).keys() == vars(plain).keys() and vars(patched.model).keys() == vars(plain.model).keys()
    assert [n for n, _ in patched.named_modules()] == [n for n, _ in plain.named_modules()]
    assert not patched._load_state_dict_post_hooks and not patched.model._load_state_dict_post_hooks
    assert_agree(coda_torch.patch(patched), plain, input_ids=ids)


def test_a_copy_of_a_patched_model_is_a_patched_model_of_its_own():
    patched, plain = pair()
    kept = copy.deepcopy(patched)
    with torch.no_grad():
        for p in patched.parameters():
            p.zero_()
    ids = tokens(2, 9)
    assert_agree(kept, plain, input_ids=ids)
    assert str(kept.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    coda_torch.unpatch(kept)
    assert torch.equal(kept.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    assert hasattr(patched.model, "coda_boundaries")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma"])
def test_one_graph_under_compile(kind):
    patched, plain = pair(kind, num_hidden_layers=1)
    ids = tokens(2, 9)
    torch.compile(patched.train(), fullgraph=True, backend="eager")(input_ids=ids, labels=ids).loss.backward()
    train_step(plain, input_ids=ids, labels=ids)
    assert_same_gradients(patched, plain)


def test_one_graph_under_compile_for_any_length():
    patched, plain = pair(num_hidden_layers=2)
    compiled = torch.compile(patched.train(), fullgraph=True, backend="aot_eager")
    for length in (12, 9):
        ids = tokens(2, length)
        patched.zero_grad()
        compiled(input_ids=ids, labels=ids).loss.backward()
        train_step(plain, input_ids=ids, labels=ids)
        assert_same_gradients(patched, plain)


@each_kind
def test_bfloat16_and_autocast_stay_near_to_float32(kind):
    patched, plain = pair(kind)
    ids = tokens(2, 20)
    right = train_step(plain, input_ids=ids, labels=ids)
    gradients = [p.grad for p in plain.parameters()]
    errors = {}
    for name, model in (("patched", patched), ("plain", plain)):
        model.train()
        for p in model.parameters():
            p.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(right.item(), rel=1e-2)
        errors[name] = [
            ((p.grad - g).norm() / g.norm()).item() for p, g in zip(model.parameters(), gradients, strict=True)
        ]
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert sum(errors["patched"]) <= 1.1 * sum(errors["plain"])
    patched.bfloat16()  # rounds the model's own rotary frequencies, too
    loss = train_step(patched, input_ids=ids, labels=ids)
    assert loss.item() == pytest.approx(right.item(), rel=1e-2)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
         "one of layer_types is 'sliding_attention'; coda_torch needs 'full_attention' in all of them"),
        ("Qwen2", {"head_dim": 24}, "head_dim is 24; coda_torch needs a multiple of 16"),
        ("Qwen3", {}, "head_dim is 16; coda_torch needs 64 or 128 under norms over heads"),
        ("Qwen3", {"head_dim": 128, "attention_bias": True}, "attention_bias is True; coda_torch needs False"),
        ("Qwen3", {"head_dim": 64, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
         "one of layer_types is 'sliding_attention'"),
        ("Gemma", {"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ("Gemma", {"attention_bias": True}, "attention_bias is True"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma2", {"attn_implementation": "eager"}, "norms behind attention and MLP"),
        ("Llama", {"hidden_act": "relu"},
         r"hidden_act is 'relu'; coda_torch needs one of \['silu', 'swish', 'gelu', 'gelu_pytorch_tanh'\]"),
        ("Llama", {"attention_bias": True}, "attention_bias is True"),
        ("Llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("Llama", {"head_dim": 24}, "head_dim is 24; coda_torch needs a multiple of 16"),
        ("Llama", {"intermediate_size": 132}, "intermediate_size is 132; coda_torch needs a multiple of 8"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "rope_type is 'dynamic'"),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "coda_torch needs"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_patched_is_refused_by_what_is_missing(kind, options, message):
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    before = vars(model).keys()
    with pytest.raises(NotImplementedError, match=message):
        coda_torch.patch(model)
    assert vars(model).keys() == before and not hasattr(model.model, "coda_boundaries")


def test_a_gemma_whose_embedding_does_not_scale_is_refused():
    model = plain_model("gemma")
    model.model.embed_tokens = nn.Embedding(VOCAB, 64)
    with pytest.raises(NotImplementedError, match="embed_tokens is 'Embedding'; coda_torch needs an embedding that scales"):
        coda_torch.patch(model)


def test_patching_twice_and_unpatching_what_is_not():
    model = coda_torch.patch(plain_model())
    with pytest.raises(ValueError, match="patched already"):
        coda_torch.patch(model)
    coda_torch.unpatch(model)
    with pytest.raises(ValueError, match="not patched"):
        coda_torch.unpatch(model)
    with pytest.raises(NotImplementedError, match="the model is a Linear"):
        coda_torch.patch(nn.Linear(3, 3))
    with pytest.raises(NotImplementedError, match="the model is a LlamaModel"):
        coda_torch.patch(plain_model().model)


def test_hidden_states_are_refused_rather_than_left_out():
    patched, _ = pair()
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(NotImplementedError, match=name):
            patched(input_ids=tokens(1, 4), **{name: True})
