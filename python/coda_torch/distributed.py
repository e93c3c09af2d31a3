"""shard(model, mesh): a patched model's parameters, gradients and optimizer state spread over processes, by FSDP2.

DistributedDataParallel needs nothing of this: it takes a patched model as it takes any other.
"""

from .huggingface import state_of


def shard(model, mesh, **options):
    """torch.distributed.fsdp.fully_shard on the units that a patched model runs in, in place; returns the model.

    The units: each boundary, the embedding, and at last the model itself with what is left, the last norm and the
    head. What is gathered ahead of its use, and freed after it, is therefore what one operator needs. An embedding
    that is the head, too, stays with it.

    mesh: a DeviceMesh of one dimension, or of two (replicate, shard). options: fully_shard's (mp_policy,
    reshard_after_forward, offload_policy, ...). What replaces a layer's parts (adapters) comes before, and so does
    patch(). state_dict() keeps Hugging Face's names; its values are DTensors.

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
