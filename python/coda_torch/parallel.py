"""Tensor parallel with sequence parallel: a patched model whose layers run in parts on the processes of a mesh.

Each process has some heads, a part of the MLP's width, and some of the vocabulary; of the residual stream, between the
products, it has some rows. With P processes a boundary is, of coda's operators and what is exchanged:

    linear                 a woᵀ, of the heads that are here: a part of the sum
    reduce-scatter         the sum, of the rows that are here
    add_inv_rms            the stream and the sum of squares of its norm: one pass over M / P rows
    all-gather             the stream, and 1/rms beside it
    stream_mlp             norm and SwiGLU in the product's epilogue; then w_down's part of the sum
    reduce-scatter, add_inv_rms, all-gather
    stream_qkv             norm and rotation in the product's epilogue

and in its backward pass the transposed exchanges. What does not survive is the residual sum in an epilogue, which is the
pass on the shard, and in the backward pass the stream's gradient, which is added to the norm's on the shard.
"""

import functools
import types

import torch
import torch.distributed as dist
from torch import nn

from . import functional
from .distributed import vocab_parallel_cross_entropy
from .huggingface import Boundaries, Boundary, state_of
from .operators import coda

_MODELS = ("LlamaForCausalLM", "MistralForCausalLM")


class _Exchange(torch.autograd.Function):
    """there(x); the gradient goes back by the transposed exchange."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def _share(rows, size):
    """How many of so many rows a process of size has, but for the last ones: DTensor's own way to divide."""
    return -(-rows // size)


class Processes:
    """Those of a mesh of one dimension, and what they exchange. Rows that do not divide are padded with rows of zeros."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()

    def first(self, rows):
        """Of so many rows, the first that is here."""
        return self.rank * _share(rows, self.size)

    def _own(self, x):
        rows = _share(len(x), self.size)
        mine = x[self.first(len(x)) :][:rows]
        return self._padded(mine, rows) if len(mine) < rows else mine.clone()

    @staticmethod
    def _padded(x, rows):
        return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))

    def _gather(self, x, rows):
        out = x.new_empty(len(x) * self.size, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out[:rows]

    def _sum_scatter(self, x):
        rows = _share(len(x), self.size)
        if rows * self.size != len(x):
            x = self._padded(x, rows * self.size)
        out = x.new_empty(rows, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self.group)
        return out

    def _sum(self, x):
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x

    # By what each process has before and after, where "whole" is the same on all of them, and a "part" is of a sum.

    def whole_to_rows(self, x):
        return _Exchange.apply(x, self._own, functools.partial(self._gather, rows=len(x)))

    def rows_to_whole(self, x, rows):
        return _Exchange.apply(x, functools.partial(self._gather, rows=rows), self._own)

    def rows_to_parts(self, x, rows):
        """As rows_to_whole, for what makes parts of sums of it: the gradients are added."""
        return _Exchange.apply(x, functools.partial(self._gather, rows=rows), self._sum_scatter)

    def parts_to_rows(self, x):
        return _Exchange.apply(x, self._sum_scatter, functools.partial(self._gather, rows=len(x)))

    def parts_to_whole(self, x):
        return _Exchange.apply(x, self._sum, lambda gradient: gradient)

    def whole_to_parts(self, x):
        return _Exchange.apply(x, lambda whole: whole.view_as(whole), self._sum)


class ParallelBoundary(Boundary):
    """A boundary on some heads and a part of the MLP's width: h is the rows of the stream that are here, in front of the first
    and behind the last layer the whole of it; q, k, v and a are whole rows of the heads that are here."""

    def __init__(self, layer, following, index, family, processes):
        super().__init__(layer, following, index, family)
        self._processes = processes

    def forward(self, h, places, a=None):
        parts, reason = self._parts()
        if reason is not None:
            raise NotImplementedError(
                f"boundary {self._index} of a parallel model: {reason}; it runs on coda's operators only"
            )
        return self._fused(parts, h, places, a)

    def _fused(self, parts, h, places, a):
        layer, following = self._layers
        processes = self._processes
        lead = places.position.shape
        rows = lead.numel()
        weights = []
        for _, module, kind, _ in parts:
            weight = module._parameters["weight"].to_local()
            # A norm's weight is on all processes, and each has the gradient of its own outputs.
            weights.append(weight if kind is nn.Linear else processes.whole_to_parts(weight))
        if layer is None:
            h = processes.whole_to_rows(h.flatten(0, 1))
            stream = processes.rows_to_parts(h, rows).view(*lead, -1)
            qkv = functional.norm_linear_rope(
                stream, *weights, places.position, places.turns, head_dim=self.head_dim, eps=parts[0][1].variance_epsilon
            )  # fmt: skip
            return h, *qkv

        def join(product, h, norm):
            h, inv_rms = coda.add_inv_rms(product, h, norm.variance_epsilon)
            return h, processes.rows_to_parts(h, rows), processes._gather(inv_rms, rows)

        wo, *of_mlp = weights[:5]
        keep = functional._keeps(a, h, *weights)
        product = coda.linear(a.to(h.dtype).reshape(rows, -1).contiguous(), wo)
        h, stream, inv_rms = join(processes.parts_to_rows(product), h, parts[1][1])
        product, _ = coda.stream_mlp(stream, inv_rms, *of_mlp, keep)
        product = processes.parts_to_rows(product)
        if following is None:
            return (processes.rows_to_whole(h + product, rows).view(*lead, -1),)
        h, stream, inv_rms = join(product, h, parts[5][1])
        position = places.position.reshape(-1)
        qkv = coda.stream_qkv(stream, inv_rms, *weights[5:], position, places.turns, self.head_dim)
        return h, *functional._split_heads(qkv, lead, *weights[6:])


def _embed(module, ids, processes):
    """nn.Embedding's forward on some rows of its weight; the result is whole."""
    outside = (ids < 0) | (ids >= module.weight.shape[0])
    if ids.device.type == "cpu" and outside.any():
        raise IndexError(f"input_ids has {ids[outside][0]}; it needs ids from 0 to {module.weight.shape[0] - 1}")
    weight = module.weight.to_local()
    first = processes.first(module.weight.shape[0])
    row = ids - first
    mine = (row >= 0) & (row < len(weight))
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + len(weight) else None
    h = nn.functional.embedding(row.where(mine, 0), weight, padding)
    h = h.masked_fill(~mine[..., None], 0).masked_fill(outside[..., None], float("nan"))
    return processes.parts_to_whole(h)


def _normalize(module, h, processes):
    from torch.distributed.tensor import DTensor, Replicate

    return type(module).forward(module, DTensor.from_local(h, processes.mesh, [Replicate()], run_check=False)).to_local()


def _head(module, h, processes):
    """Whole logits, for who asks for them; the loss in training makes none."""
    from torch.distributed.tensor import DTensor, Replicate

    return nn.functional.linear(
        DTensor.from_local(h, processes.mesh, [Replicate()], run_check=False), module.weight
    ).full_tensor()


def _loss(hidden, weight, labels, *, processes, reduction="mean", ignore_index=-100, token_weight=None):
    first = processes.first(weight.shape[0])
    losses = functools.partial(
        vocab_parallel_cross_entropy, hidden, weight.to_local(), labels, first, group=processes.group,
        ignore_index=ignore_index,
    )  # fmt: skip
    if token_weight is None:
        return losses(reduction=reduction)
    return (losses(reduction="none") * token_weight).sum()


def _check(model, mesh):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched; parallelize needs coda_torch.patch(model) before it")
    if state.parallel:
        raise ValueError("the model is parallel already")
    if state.sharded:
        raise ValueError("the model is sharded already; parallelize comes before shard")
    if type(model).__name__ not in _MODELS:
        raise NotImplementedError(f"the model is a {type(model).__name__}; parallelize needs one of {', '.join(_MODELS)}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it needs to be a DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; it needs one, as mesh['tp']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh is of other processes than {dist.get_rank()}, which calls parallelize")
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise ValueError(f"{name} is a DTensor already; parallelize needs the whole of it")
        if p.device.type != mesh.device_type:
            raise ValueError(f"{name} is on {p.device}; it needs to be on a {mesh.device_type} device, as mesh is")
    config, inner = model.config, model.model
    for name, of in (
        ("num_attention_heads", 1), ("num_key_value_heads", 1), ("intermediate_size", 8),
    ):  # fmt: skip
        size = getattr(config, name)
        if size % (of * mesh.size()) != 0:
            each = f", {of} for each of its {mesh.size()} processes" if of > 1 else ", the mesh's processes"
            raise ValueError(f"{name} is {size}; it needs to be a multiple of {of * mesh.size()}{each}")
    if _share(config.vocab_size, mesh.size()) * (mesh.size() - 1) >= config.vocab_size:
        raise ValueError(f"vocab_size is {config.vocab_size}; it needs rows for each of {mesh.size()} processes")
    for boundary in inner.coda_boundaries:
        _, reason = boundary._parts()
        if reason is not None:
            raise NotImplementedError(f"{reason}; a parallel model runs on coda's operators only")
    for i in range(len(inner.layers)):
        reason = state.why_whole(i)
        if reason is not None:
            raise NotImplementedError(f"layer {i} {reason}; coda_torch cannot run it as a whole in a parallel model")
    embedding = inner.embed_tokens
    for name, module, kind in (
        ("embed_tokens", embedding, nn.Embedding), ("norm", inner.norm, state.family.norm), ("lm_head", model.lm_head, nn.Linear),
    ):  # fmt: skip
        if type(module) is not kind:
            raise NotImplementedError(f"{name} is a {type(module).__name__}; a parallel model needs a {kind.__name__}")
        if "forward" in vars(module) or module._parameters.get("weight") is None:
            raise NotImplementedError(f"{name} has a forward of its own, or a weight that is no parameter of it")
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise NotImplementedError("embed_tokens has max_norm, scale_grad_by_freq or sparse; a parallel model has none")
    if model.lm_head.bias is not None:
        raise NotImplementedError("lm_head has a bias; a parallel model has none")


def parallelize(model, mesh):
    """Spreads a patched model over the processes of a mesh, in place, and returns it: tensor and sequence parallel.

    mesh: a DeviceMesh of one dimension; of more, mesh["tp"], and then shard(model, mesh["dp"]) for the others. Heads, those
    of keys and values too, have to divide by its size, and intermediate_size by 8 times that. After patch(), before
    shard() and the optimizer. All processes give the model the same tokens, and have the same loss.

    Parameters become DTensors, of rank 0's values, under Hugging Face's names: rows of q, k, v, gate, up, the embedding and
    the head, columns of o and down, norms replicated. So optimizers, clipping and torch.distributed.checkpoint take them as
    they are, and full_tensor(), or get_model_state_dict with full_state_dict, gathers them. requires_grad=False, gradient
    checkpointing and generate() work; hooks, adapters and unpatch() do not.

    Raises, before anything changes, ValueError for a mesh or sizes that do not fit, or a model that is not patched, and
    NotImplementedError for a model that does not run on coda's operators throughout.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _check(model, mesh)
    state, inner = state_of(model), model.model
    processes = Processes(mesh)
    spread = {}  # a parameter that has two names stays one

    def place(module, placement):
        p = module.weight
        if p not in spread:
            spread[p] = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]), requires_grad=p.requires_grad)
        module.weight = spread[p]

    for boundary in inner.coda_boundaries:
        for name, module, kind, _ in boundary._parts()[0]:
            if kind is nn.Linear:
                place(module, Shard(1) if name in ("o_proj", "down_proj") else Shard(0))
            else:
                place(module, Replicate())
    place(inner.embed_tokens, Shard(0))
    place(inner.norm, Replicate())
    place(model.lm_head, Shard(0))
    for module, function in ((inner.embed_tokens, _embed), (inner.norm, _normalize), (model.lm_head, _head)):
        module.forward = types.MethodType(functools.partial(function, processes=processes), module)
    layers = list(inner.layers)
    inner.coda_boundaries = Boundaries(
        ParallelBoundary(before, behind, i, state.family, processes)
        for i, (before, behind) in enumerate(zip([None, *layers], [*layers, None]))
    )
    state.parallel = processes
    state.loss = functools.partial(_loss, processes=processes)
    state._turns.clear()
    return model
