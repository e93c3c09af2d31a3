"""patch(model): a Hugging Face Llama that runs on coda's operators, and remains itself in everything else.

Between two attentions there is one boundary module: the output projection, the MLP and both norms of one layer's end, and the
projections of the next one's attention, as one operator. The boundaries hold the model's own submodules, whose names and
parameters stay what they are; attention is whatever the model is configured for. A boundary whose parts coda's operator cannot
stand for (a hook on a norm, an adapter in the place of a linear layer) runs as those parts, and says so once.
"""

import dataclasses
import functools
import inspect
import logging
import types
import typing

import torch
from torch import nn

from . import functional

logger = logging.getLogger("coda_torch")

_STATE = "_coda_torch"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}  # by config.hidden_act


def _hooked(module):
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )  # fmt: skip


def _why_other(name, module, kind):
    """Why a submodule does not do what a class says, or somebody looks on; None if it does and nobody does. A parametrized module
    has a class of its own."""
    if type(module) is not kind:
        return f"{name} is a {type(module).__name__}"
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own"
    if _hooked(module):
        return f"{name} has a hook"
    return None


def _why_not_plain(name, module, kind, biased=False):
    """Why a submodule's formula is not what its class and weight say; None if it is."""
    reason = _why_other(name, module, kind)
    if reason:
        return reason
    if (module._parameters.get("bias") is not None) != biased:
        return f"{name} has {'no' if biased else 'a'} bias"
    if module._parameters.get("weight") is None:
        return f"{name} has a weight that is no parameter of it"
    return None


class Attention(nn.Module):
    """A layer's attention between the projections, by the implementation that the model is configured for."""

    def __init__(self, layer, family):
        super().__init__()
        self.self_attn = layer.self_attn
        self.family = family

    def forward(self, q, k, v, mask, cache, kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention = self.self_attn
        q, k, v = (x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, self.family.eager)
        if self.family.window is not None:
            kwargs = {**kwargs, "sliding_window": self.family.window(attention)}
        dropout = attention.attention_dropout if attention.training else 0.0
        out, _ = run(attention, q, k, v, mask, dropout=dropout, scaling=attention.scaling, **kwargs)
        return out.reshape(*out.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class _Family:
    """The parts of a model that can be patched, by their classes and functions."""

    norm: type
    mlp: type
    rotate: typing.Callable
    eager: typing.Callable  # attention without a kernel
    window: typing.Callable | None = None  # of sliding attention: what its attention says of it
    slides: bool = False  # whether every layer has config.sliding_window
    activation: str = "silu"  # of its MLP, as functional's
    act: type = nn.Module  # of its MLP's activation
    eps: str = "variance_epsilon"  # its norms' name for it
    from_one: bool = False  # whether its norms' weights are distances from 1
    scaled: bool = False  # whether its embedding scales
    biased: bool = False  # whether q, k and v have biases
    normed: bool = False  # whether every head of q and k has a norm


# Parts: (name, module, class, whether it has a bias), in the order of the operator's weights. By _modules, in every step: a
# module's own lookup of a name takes several times as long.


def _mlp_parts(layer, family):
    modules = layer._modules
    mlp = modules["mlp"]._modules
    return [
        ("o_proj", modules["self_attn"]._modules["o_proj"], nn.Linear, False),
        ("post_attention_layernorm", modules["post_attention_layernorm"], family.norm, False),
        *[(name, mlp[name], nn.Linear, False) for name in ("gate_proj", "up_proj", "down_proj")],
    ]


def _qkv_parts(layer, family):
    modules = layer._modules
    attention = modules["self_attn"]._modules
    return [
        ("input_layernorm", modules["input_layernorm"], family.norm, False),
        *[(name, attention[name], nn.Linear, family.biased) for name in ("q_proj", "k_proj", "v_proj")],
        *[(name, attention[name], family.norm, False) for name in ("q_norm", "k_norm") if family.normed],
    ]


class Boundary(nn.Module):
    """From a layer's attention to the next one's: (a, h) to (h_next, q, k, v). Without a next layer, to (h_next,); without a layer
    in front, from (h,) to (h, q, k, v). The unit of sharding and of activation checkpointing."""

    def __init__(self, layer, following, index, family):
        super().__init__()
        # Its children are what the layers had when they were patched; what runs is what they have now.
        self.layer_modules, self.following_modules = nn.ModuleDict(), nn.ModuleDict()
        if layer is not None:
            self.layer_modules.update({name: module for name, module, *_ in _mlp_parts(layer, family)})
        if following is not None:
            self.following_modules.update({name: module for name, module, *_ in _qkv_parts(following, family)})
        self.head_dim = (layer or following).self_attn.head_dim
        self._layers = (layer, following)  # in a tuple: a module would be registered where it is kept
        self._index = index
        self._family = family
        self._told = False

    def _parts(self):
        """What the layers have now, and why coda's operator cannot stand for it; None if it can."""
        layer, following = self._layers
        parts = []
        if layer is not None:
            mlp = layer._modules["mlp"]
            reason = _why_other("mlp", mlp, self._family.mlp) or _why_other(
                "mlp's activation", mlp._modules["act_fn"], self._family.act
            )
            if reason:
                return parts, reason
            parts += _mlp_parts(layer, self._family)
        if following is not None:
            parts += _qkv_parts(following, self._family)
        for part in parts:
            reason = _why_not_plain(*part)
            if reason:
                return parts, reason
        if len({getattr(norm, self._family.eps) for _, norm, kind, _ in parts if kind is self._family.norm}) > 1:
            return parts, "its norms have different eps"
        return parts, None

    def forward(self, h, places, a=None):
        parts, reason = self._parts()
        if reason is None:
            return self._fused(parts, h, places, a)
        if not self._told:
            logger.warning("coda_torch: boundary %d runs unfused, since %s", self._index, reason)
            self._told = True
        return self._unfused(h, places, a)

    def _fused(self, parts, h, places, a):
        layer, following = self._layers
        family = self._family
        parameters = {name: module._parameters for name, module, *_ in parts}
        norms = {name: module for name, module, kind, _ in parts if kind is family.norm}
        options = {"eps": getattr(next(iter(norms.values())), family.eps)}
        if layer is not None:
            options["activation"] = family.activation
        if following is not None:
            options["head_dim"] = self.head_dim
            if family.biased:
                options |= {f"b{x}": parameters[f"{x}_proj"]["bias"] for x in "qkv"}
            if family.normed:
                options |= {name: parameters.pop(name)["weight"] for name in ("q_norm", "k_norm")}
        weights = [
            1 + of_part["weight"].float() if family.from_one and name in norms else of_part["weight"]
            for name, of_part in parameters.items()
        ]
        if following is None:
            return (functional.block_tail(a, h, *weights, **options),)
        if layer is None:
            return h, *functional.norm_linear_rope(h, *weights, places.position, places.turns, **options)
        return functional.block(a, h, *weights, places.position, places.turns, **options)

    def _unfused(self, h, places, a):
        layer, following = self._layers
        if layer is not None:
            h = h + layer.self_attn.o_proj(a)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        if following is None:
            return (h,)
        x = following.input_layernorm(h)
        q, k, v = (getattr(following.self_attn, name)(x) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k))
        if self._family.normed:
            q, k = following.self_attn.q_norm(q), following.self_attn.k_norm(k)
        q, k = (y.transpose(1, 2) for y in (q, k))
        q, k = self._family.rotate(q, k, *places.cos_sin(x))
        return h, q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2), v


class Places:
    """Where the tokens of a forward pass stand. No dataclass: FSDP looks into those, and would round turns to its type."""

    def __init__(self, rotary, position_ids, position, turns):
        self.rotary = rotary
        self.position_ids = position_ids  # [batch or 1, length]
        self.position = position  # [batch, length], int32
        self.turns = turns

    def cos_sin(self, x):
        return self.rotary(x, position_ids=self.position_ids)


class Boundaries(nn.ModuleList):
    """Children of the model, so that whatever walks its modules finds them. What they hold has its name elsewhere."""

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        return {} if destination is None else destination


def _forget_missing(inner, keys):
    # Whatever the model is wrapped in has its prefix in front.
    keys.missing_keys[:] = [key for key in keys.missing_keys if "coda_boundaries." not in key]


def _model_forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None,
                   use_cache=None, **kwargs):  # fmt: skip
    from transformers.cache_utils import DynamicCache
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.modeling_outputs import BaseModelOutputWithPast

    state = getattr(self, _STATE)
    cache_name = state.cache_name
    cache = kwargs.pop("past_key_values", cache)
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.pop(name, None) or getattr(self.config, name, False):
            raise NotImplementedError(f"{name}: a model that coda_torch patched does not make them; unpatch it first")
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give one of input_ids and inputs_embeds")
    h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    use_cache = self.config.use_cache if use_cache is None else use_cache
    checkpointing = self.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)
    if checkpointing or (self.training and cache is None):
        use_cache = False
    if use_cache and cache is None:
        cache = DynamicCache(config=self.config)
    # Then attention is causal without a mask to say so, which transformers finds out too, but not while it is traced.
    causal = (
        attention_mask is None and position_ids is None and cache is None
        and self.config._attn_implementation == "sdpa" and not getattr(self.config, "sliding_window", None)
    )  # fmt: skip
    if position_ids is None:
        past = cache.get_seq_length() if cache is not None else 0
        position_ids = (torch.arange(h.shape[1], device=h.device) + past).unsqueeze(0)
    mask = None
    if isinstance(attention_mask, dict):  # by the kind of layer, all of which are of one: as generate() has prepared it
        mask = attention_mask["full_attention"]
    elif not causal:
        slides = state.family.slides and self.config.sliding_window is not None
        mask = (create_sliding_window_causal_mask if slides else create_causal_mask)(
            config=self.config, inputs_embeds=h, attention_mask=attention_mask, position_ids=position_ids,
            **{cache_name: cache},
        )  # fmt: skip
    places = Places(
        self.rotary_emb,
        position_ids,
        position_ids.expand(h.shape[:2]).to(torch.int32).contiguous(),
        state.turns(h.device),
    )
    if torch.is_autocast_enabled(h.device.type):
        h = h.to(torch.get_autocast_dtype(h.device.type))

    h, qkv = _run_layers(self, state, h, places, mask, cache if use_cache else None, position_ids, checkpointing, kwargs)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(h), **{cache_name: cache if use_cache else None})


def _run_layers(model, state, h, places, mask, cache, position_ids, checkpointing, kwargs):
    if state.sharded or state.parallel:
        state.refuse_whole()
    layers = list(model.layers[: model.config.num_hidden_layers])
    boundaries, attentions = model.coda_boundaries, state.attentions
    whole = [state.why_whole(i) for i in range(len(layers))]
    qkv = None  # of the layer that comes next, where the boundary in front of it has made them
    for i, layer in enumerate(layers):
        if whole[i] is not None:
            # Somebody looks at this layer from outside: it runs as it is.
            state.tell_whole(i, whole[i])
            cached = {state.cache_name: cache}
            h = layer(h, attention_mask=mask, position_ids=position_ids, use_cache=cache is not None,
                      position_embeddings=places.cos_sin(h), **cached, **kwargs)  # fmt: skip
            qkv = None
            continue
        if qkv is None:
            # The boundary in front belongs to the layer before; only its second half is to be run.
            entry = state.entry(i)
            h, *qkv = entry(h, places)
        joined = i + 1 < len(layers) and whole[i + 1] is None
        boundary = boundaries[i + 1] if joined or i + 1 == len(layers) else state.tail(i)

        def step(h, q, k, v, attention=attentions[i], boundary=boundary):
            return boundary(h, places, attention(q, k, v, mask, cache, {**kwargs, "position_ids": position_ids}))

        if checkpointing:
            h, *qkv = layer._gradient_checkpointing_func(step, h, *qkv)
        else:
            h, *qkv = step(h, *qkv)
        if not joined:
            qkv = None
    return h, qkv


def _lm_forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, inputs_embeds=None, labels=None,
                use_cache=None, logits_to_keep=0, **kwargs):  # fmt: skip
    state = getattr(self.model, _STATE)
    of_model = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
        "inputs_embeds": inputs_embeds, "use_cache": use_cache, state.cache_name: kwargs.pop("past_key_values", cache),
    }  # fmt: skip
    if labels is None or not self.training or state.why_plain_loss(self) is not None:
        return state.lm_forward(labels=labels, logits_to_keep=logits_to_keep, **of_model, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    # What transformers' ForCausalLMLoss takes.
    items = kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    shifted = kwargs.pop("shift_labels", None)
    hidden = self.model(**of_model, **kwargs).last_hidden_state
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shifted = shifted.to(hidden.device)
    options = {"ignore_index": ignore_index}
    if items is not None:
        # A quotient of the sum would be an upstream gradient: one more rounding of the gradients that are made with it.
        items = items.to(hidden.device) if isinstance(items, torch.Tensor) else items
        share = torch.ones(shifted.shape, device=hidden.device) / items
        options |= {"reduction": "sum", "token_weight": share}
    loss = state.loss(hidden, self.lm_head.weight, shifted, **options)
    return CausalLMOutputWithPast(loss=loss, logits=None)


class _State:
    """What patch() keeps beside the model."""

    def __init__(self, model, family):
        inner = model.model
        self.family = family
        self.inner = [inner]  # in a list: a module would be registered where it is kept
        self.lm_forward = model.forward
        self.attentions = [Attention(layer, family) for layer in inner.layers]
        # Its name differs between versions of transformers.
        takes = inspect.signature(type(inner.layers[0]).forward).parameters
        self.cache_name = "cache" if "cache" in takes else "past_key_values"
        self.sharded = False
        self.parallel = None  # the processes that parallelize() has given parts of every layer
        self.loss = functional.linear_cross_entropy
        self._turns = {}
        self._halves = {}
        self._told = set()

    def turns(self, device):
        if device not in self._turns:
            inner = self.inner[0]
            config = inner.config
            processes = self.parallel.size if self.parallel else 1
            self._turns[device] = functional.rotary_turns(
                _inv_freq(inner.rotary_emb).to(device),
                config.num_attention_heads // processes,
                config.num_key_value_heads // processes,
            )
        return self._turns[device]

    def why_whole(self, i):
        layer = self.inner[0].layers[i]
        if layer.self_attn is not self.attentions[i].self_attn:
            return "has another attention than it was patched with"
        if _hooked(layer):
            return "has a hook"
        if "forward" in vars(layer):
            return "has a forward of its own"
        if _hooked(layer.self_attn) or "forward" in vars(layer.self_attn):
            return "has an attention with a hook or a forward of its own"
        return None

    def refuse_whole(self):
        """For a sharded model, where a layer's weights are in two units, and for a parallel one, where they are in parts."""
        for i in range(len(self.inner[0].layers)):
            reason = self.why_whole(i)
            if reason is not None:
                kind = "parallel" if self.parallel else "sharded"
                raise NotImplementedError(f"layer {i} {reason}; coda_torch cannot run it as a whole in a {kind} model")

    def tell_whole(self, i, reason):
        if i not in self._told:
            self._told.add(i)
            logger.warning("coda_torch: layer %d runs unfused, since it %s", i, reason)

    def entry(self, i):
        """The second half of the boundary in front of layer i."""
        layers = self.inner[0].layers
        if i == 0:
            return self.inner[0].coda_boundaries[0]
        return self._halves.setdefault(("entry", i), Boundary(None, layers[i], i, self.family))

    def tail(self, i):
        """The first half of the boundary behind layer i."""
        layers = self.inner[0].layers
        return self._halves.setdefault(("tail", i), Boundary(layers[i], None, i + 1, self.family))

    def why_plain_loss(self, model):
        from transformers.loss.loss_utils import ForCausalLMLoss

        if getattr(model.loss_function, "__func__", model.loss_function) is not ForCausalLMLoss:
            return "the model has a loss of its own"
        if self.parallel:
            return "lm_head has a hook" if _hooked(model.lm_head) else None
        return _why_not_plain("lm_head", model.lm_head, nn.Linear)


def state_of(model):
    """What patch() has kept of the model; None if it is not patched."""
    return getattr(getattr(model, "model", None), _STATE, None)


def _inv_freq(rotary):
    """Radians per position in float32: the model's own, or, where a cast of the model has rounded those, from its configuration."""
    if rotary.inv_freq.dtype == torch.float32 and not rotary.inv_freq.is_meta:
        return rotary.inv_freq.detach()
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rotary.rope_type == "default":
        return rotary.compute_default_rope_parameters(rotary.config)[0]
    return ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config)[0]


def _families():
    """The model classes that can be patched."""
    import importlib

    families = {}
    of_kinds = {
        "Llama": {},
        "Mistral": {"window": lambda attention: attention.config.sliding_window, "slides": True},
        "Qwen2": {"window": lambda attention: attention.sliding_window, "biased": True},
        "Qwen3": {"window": lambda attention: attention.sliding_window, "normed": True},
        "Gemma": {"eps": "eps", "from_one": True, "scaled": True},
    }
    for name, of_kind in of_kinds.items():
        module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
        families[getattr(module, f"{name}ForCausalLM")] = _Family(
            norm=getattr(module, f"{name}RMSNorm"),
            mlp=getattr(module, f"{name}MLP"),
            rotate=module.apply_rotary_pos_emb,
            eager=module.eager_attention_forward,
            **of_kind,
        )
    return families


def _check(model, families):
    if type(model) not in families:
        missing = {
            "Gemma2ForCausalLM": "norms behind attention and MLP, and a cap of attention's scores",
        }
        name = type(model).__name__
        why = f"; for it coda_torch lacks {missing[name]}" if name in missing else ""
        known = ", ".join(sorted(c.__name__ for c in families))
        raise NotImplementedError(f"the model is a {name}; patch needs one of {known}{why}")
    if hasattr(model.model, _STATE):
        raise ValueError("the model is patched already")
    config = model.config
    family = families[type(model)]
    head_dim = model.model.layers[0].self_attn.head_dim
    wants = [
        ("hidden_act", config.hidden_act, config.hidden_act in _ACTIVATIONS, f"one of {list(_ACTIVATIONS)}"),
        ("use_bidirectional_attention", True, not getattr(config, "use_bidirectional_attention", None), "None or False"),
        ("head_dim", head_dim, head_dim in functional.NORMED_HEADS if family.normed else head_dim % 16 == 0,
         "64 or 128 under norms over heads" if family.normed else "a multiple of 16"),
        ("intermediate_size", config.intermediate_size, config.intermediate_size % 8 == 0, "a multiple of 8"),
        ("attention_bias", getattr(config, "attention_bias", False), not getattr(config, "attention_bias", False), "False"),
        ("mlp_bias", getattr(config, "mlp_bias", False), not getattr(config, "mlp_bias", False), "False"),
        ("the scaling of attention by its rotary embedding", model.model.rotary_emb.attention_scaling,
         model.model.rotary_emb.attention_scaling == 1, "1"),
        # In earlier transformers it was Gemma's model that scaled what it took from its embedding.
        ("embed_tokens", type(model.model.embed_tokens).__name__,
         not family.scaled or hasattr(model.model.embed_tokens, "embed_scale"), "an embedding that scales by itself"),
    ]  # fmt: skip
    others = [t for t in getattr(config, "layer_types", None) or [] if t != "full_attention"]
    if not family.slides:
        wants.append(("one of layer_types", others and others[0], not others, "'full_attention' in all of them"))
    rope_type = getattr(model.model.rotary_emb, "rope_type", "default")
    wants.append(("rope_type", rope_type, rope_type in ("default", "linear", "llama3"), "'default', 'linear' or 'llama3'"))
    for name, got, ok, needs in wants:
        if not ok:
            raise NotImplementedError(f"{name} is {got!r}; coda_torch needs {needs}")


def patch(model):
    """Makes a Llama, Mistral, Qwen2, Qwen3 or GemmaForCausalLM run on coda's operators, in place, and returns it.

    What stays: parameters, buffers, their names and state_dict() both ways, generate(), the attention implementation,
    requires_grad=False, gradient checkpointing (its unit is a layer's attention and the boundary behind it). What
    changes: in training with labels the loss comes out without logits (output.logits is None), and no cache is made,
    so that position_ids of packed documents keep them apart as they do under use_cache=False; keys in a cache are in
    packed order, so a cache belongs to the patched model; under autocast the residual stream has autocast's type.
    Raises NotImplementedError that names what coda lacks for another model.
    """
    from transformers.activations import ACT2FN

    families = _families()
    _check(model, families)
    inner = model.model
    act = inner.config.hidden_act
    family = dataclasses.replace(families[type(model)], activation=_ACTIVATIONS[act], act=type(ACT2FN[act]))
    state = _State(model, family)
    layers = list(inner.layers)
    boundaries = Boundaries(
        Boundary(before, behind, i, family)
        for i, (before, behind) in enumerate(zip([None, *layers], [*layers, None]))
    )
    setattr(inner, _STATE, state)
    inner.coda_boundaries = boundaries
    state.hook = inner.register_load_state_dict_post_hook(_forget_missing)
    state.had_forward = [vars(m).get("forward") for m in (model, inner)]
    inner.forward = _stands_for(_model_forward, inner)
    model.forward = _stands_for(_lm_forward, model)
    return model


def _stands_for(function, module):
    """function as module's forward, with the signature of its class's: generate() asks for it."""
    from transformers.utils import can_return_tuple

    @can_return_tuple
    @functools.wraps(type(module).forward)
    def forward(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return types.MethodType(forward, module)


def unpatch(model):
    """Undoes patch(), in place, and returns the model. ValueError if it is not patched, or sharded or parallelized since."""
    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched")
    if state.sharded:
        raise ValueError("the model is sharded; its units are the boundaries that unpatch would take away")
    if state.parallel:
        raise ValueError("the model is parallel; its layers run in parts that only its boundaries put together")
    state.hook.remove()
    for module, before in zip((model, model.model), state.had_forward):
        if before is None:
            del module.forward
        else:
            module.forward = before
    del model.model.coda_boundaries
    delattr(model.model, _STATE)
    return model
