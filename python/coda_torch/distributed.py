"""More than one process: FSDP2 on a patched model's boundaries, and the loss of a vocabulary that is spread out.

DistributedDataParallel needs nothing of this: it takes a patched model as it takes any other.
"""

import torch
import torch.distributed as dist

from .functional import _activations, _is_spread, _labels, _parameter, _refuse
from .huggingface import state_of
from .operators import coda


def shard(model, mesh, **options):
    """torch.distributed.fsdp.fully_shard on the units that a patched model runs in, in place; returns the model.

    The units: each boundary, the embedding, and at last the model itself with what is left, the last norm and the
    head. What is gathered ahead of its use, and freed after it, is therefore what one operator needs. An embedding
    that is the head, too, stays with it.

    mesh: a DeviceMesh of one dimension, or of two (replicate, shard); after parallelize(model, mesh["tp"]), mesh["dp"].
    options: fully_shard's (mp_policy, reshard_after_forward, offload_policy, ...). What replaces a layer's parts
    (adapters) comes before, and so does patch(). state_dict() keeps Hugging Face's names; its values are DTensors.

    Raises ValueError for a model that is not patched or is sharded already, and NotImplementedError for one with a
    layer that runs as a whole (a hook on it): its weights are in two units.
    """
    from torch.distributed.fsdp import fully_shard

    state = state_of(model)
    if state is None:
        raise ValueError("the model is not patched; shard needs coda_torch.patch(model) before it")
    if state.sharded:
        raise ValueError("the model is sharded already")
    state.refuse_whole()
    state.sharded = True
    ignored = options.pop("ignored_params", None) or set()

    inner = model.model
    units = list(inner.coda_boundaries)
    if model.lm_head.weight is not inner.embed_tokens.weight:
        units.append(inner.embed_tokens)
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=ignored, **options)
    # The layers' own modules hold the boundaries' parameters, too: they are not the model's once more.
    sharded = {p for unit in units for p in unit.parameters()}
    fully_shard(model, mesh=mesh, ignored_params=ignored | sharded, **options)
    return model


def vocab_parallel_cross_entropy(x, weight, labels, first, *, group=None, reduction="mean", ignore_index=-100):
    """linear_cross_entropy where each process of a group has some rows of the head; the same loss on each of them.

    x [..., d] and labels [...] (ids of the whole vocabulary) are the same on every process; weight [rows, d] has the
    rows from id `first` on. Three numbers a token go between the processes, and in the backward pass the gradient of x,
    which is the whole one on every process; weight's is that of its own rows. Logits never exist whole: four products.
    reduction, ignore_index, losses in float32, and labels outside of the vocabulary are linear_cross_entropy's.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r}; it needs to be 'none', 'sum' or 'mean'")
    for operand, name in ((x, "x"), (weight, "weight"), (labels, "labels")):
        if _is_spread(operand):
            raise TypeError(f"{name} is a DTensor; give what this process has of it, with to_local()")
    x, lead = _activations(x, "x")
    weight = _parameter(weight, "weight", x, (None, x.shape[1]))
    if weight.shape[0] == 0:
        _refuse("weight", "without rows", "at least one on every process")
    label = _labels(labels, ignore_index, lead)
    loss = _VocabParallel.apply(x, weight, label, first, group, ignore_index)
    if reduction == "none":
        return loss.view(lead)
    return loss.sum() if reduction == "sum" else loss.sum() / (label != ignore_index).sum()


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, label, first, group, ignore_index):
        counted = label != ignore_index
        row = label - first
        mine = counted & (row >= 0) & (row < weight.shape[0])
        # The label's logit is what this process' loss lacks of its log-sum-exp; 0 stands for labels of other processes.
        options = (None, 0, None, -1, 0.0, 0.0, None)  # of tokens, none of them ignored
        loss, _, log_sum_exp, *_ = coda.linear_cross_entropy(x, weight, row.where(mine, 0), *options, 0)
        highest = log_sum_exp.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        sums = torch.stack(((log_sum_exp - highest).exp(), (log_sum_exp - loss).where(mine, 0.0), mine.float()))
        dist.all_reduce(sums, group=group)
        lost = counted & (sums[2] == 0)  # a label that no process has
        if x.device.type == "cpu" and lost.any():
            at = int(lost.nonzero()[0])
            raise ValueError(f"label of row {at} is {label[at]}; it needs an id of the vocabulary, or {ignore_index}")
        log_sum_exp = highest + sums[0].log()
        ctx.save_for_backward(x, weight, row.where(mine, weight.shape[0]).where(counted, -1), log_sum_exp)
        ctx.group, ctx.options = group, options
        return (log_sum_exp - sums[1]).where(counted, 0.0).where(~lost, float("nan"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss):
        x, weight, row, log_sum_exp = ctx.saved_tensors
        # A row of zeros behind the others is the label of what other processes have: it adds nothing to x's gradient.
        padded = torch.cat((weight, weight.new_zeros(1, weight.shape[1])))
        token_weight, *options = ctx.options
        d_x, d_weight = coda.linear_cross_entropy_backward(
            d_loss.float().contiguous(), x, padded, row, token_weight, log_sum_exp, *options
        )
        if ctx.needs_input_grad[0]:
            dist.all_reduce(d_x, group=ctx.group)
        return d_x, d_weight[:-1], None, None, None, None
