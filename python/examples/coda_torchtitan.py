"""A model converter for torchtitan 0.2.2: the MLP half of its Llama 3's blocks on coda's operators.

    PYTHONPATH=python/examples torchrun ... -m torchtitan.train --job.config_file .../llama3_8b.toml \\
      --experimental.custom_import coda_torchtitan --model.converters coda

torchtitan has a Llama of its own, which coda_torch.patch does not take: the converter gives each block a forward whose norm, gate, up and
SwiGLU are one product, and whose down projection adds the residual. Attention, whose rotary embedding turns adjacent dimensions,
and the loss stay torchtitan's. Parameters and their names stay, and FSDP, DDP, activation checkpointing and torch.compile
(fullgraph, by block) work as before. Not under tensor parallel, whose hooks on the MLP's parts this forward passes by: that is
refused.
"""

import types

import coda_torch
from torchtitan.protocols.model_converter import register_model_converter


def forward(self, x, freqs_cis, attention_masks, positions=None):
    h = x + self.attention(self.attention_norm(x), freqs_cis, attention_masks, positions)
    mlp, norm = self.feed_forward, self.ffn_norm
    y = coda_torch.norm_linear_swiglu(h, norm.weight, mlp.w1.weight, mlp.w3.weight, eps=norm.eps)
    return coda_torch.linear_residual(y, mlp.w2.weight, h)


class Coda:
    def __init__(self, job_config, parallel_dims):
        if parallel_dims.tp_enabled:
            raise NotImplementedError("parallelism.tensor_parallel_degree is above 1; the coda converter needs it to be 1")

    def convert(self, model):
        for block in model.layers.values():
            block.forward = types.MethodType(forward, block)

    def post_optimizer_hook(self, model):
        pass


register_model_converter(Coda, "coda")
