"""coda inside PyTorch: Llama blocks whose small operators run in the epilogues of their matrix products.

    import coda_torch
    coda_torch.patch(model)          # a Hugging Face Llama, Mistral, Qwen2, Qwen3 or Gemma; the rest of the script stays

or, in a model of one's own, the operators: norm_linear_rope, norm_linear_swiglu, linear_swiglu, linear_geglu,
linear_clamped_swiglu, linear_residual, linear_cross_entropy, and block, a whole layer but attention. They run on CPUs (float32, bfloat16) and on
Hopper GPUs (bfloat16, compute capability 9.0), under torch.compile, autocast and CUDA graphs.
"""

from .distributed import shard, vocab_parallel_cross_entropy
from .functional import (
    accumulate_weight_gradient_,
    block,
    block_tail,
    linear_clamped_swiglu,
    linear_cross_entropy,
    linear_geglu,
    linear_residual,
    linear_swiglu,
    norm_linear_rope,
    norm_linear_swiglu,
    rotary_turns,
)
from .huggingface import patch, unpatch
from .parallel import parallelize

__all__ = [
    "accumulate_weight_gradient_",
    "block",
    "block_tail",
    "linear_clamped_swiglu",
    "linear_cross_entropy",
    "linear_geglu",
    "linear_residual",
    "linear_swiglu",
    "norm_linear_rope",
    "norm_linear_swiglu",
    "parallelize",
    "patch",
    "rotary_turns",
    "shard",
    "unpatch",
    "vocab_parallel_cross_entropy",
]
