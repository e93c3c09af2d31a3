"""What coda's operators do with DTensors: the placements that they have, and what is to be gathered for any other.

Imported where an operator first sees a DTensor: importing torch.distributed.tensor takes longer than all of coda_torch.
"""

import functools

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .operators import coda

_PLACEMENTS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "P": Partial()}

# Each rule in two words, of the tensors that go in and of those that come out, in the schema's order: R replicated, 0 and 1 sharded in
# that dimension, P a part of a sum. That everything may be replicated is understood. Two kinds there are: rows of the activations
# are sharded and weights replicated, and where an output's columns have no order across the weights' rows (which q, k and v
# have, side by side), those may be sharded.
_RULES = {
    "block": ["00RRRRRRRRRRRRRR0R 0000000"],
    "block_backward": ["0000000000RRRRRRRRRRRRRR0R 00PPPPPPPPPPPPPP"],
    "block_tail": ["00RRRRR 0000"],
    "block_tail_backward": ["00000RRRRR 00PPPPP"],
    "norm_linear_rope": ["0RRRRRRRRR0R 000"],
    "norm_linear_rope_backward": ["00000RRRRRRRRR0R 0PPPPPPPPP"],
    "norm_linear_glu": ["0RRR 000", "RR00 11R"],
    "norm_linear_glu_backward": ["0000RRR 0PPP", "1R1RR00 PP00"],
    "linear_residual": ["0R0 0", "R01 1"],
    "linear_residual_backward": ["00R 0P", "1R0 P0"],
    "linear_cross_entropy": ["0R00 00000"],  # without a reduction
    "linear_cross_entropy_backward": ["00R000 0P"],
    "scaled_to_bf16": ["0R 0", "PR P"],
}
_SUMMED = ["0R00 PP00P"]  # linear_cross_entropy's losses of a sum, or divided by what the caller knows


def _columns(w_gate, mesh):
    """Gate and up stand beside each other in blocks of 8: a process needs whole ones."""
    return w_gate.shape[0] % (8 * mesh.size()) == 0


def _rules(operator, arguments):
    rules = _RULES[operator]
    if operator == "linear_cross_entropy" and arguments["reduction"] != 0:
        return _SUMMED if arguments["reduction"] == 1 or arguments["divisor"] is not None else []
    if operator.startswith("norm_linear_glu") and not _columns(arguments["w_gate"], arguments["w_gate"].mesh):
        return rules[:1]
    return rules


def _acceptable(operator, schema, *given):
    names = [argument.name for argument in schema.arguments]
    arguments = dict(zip(names, given))
    tensors = [name for name, argument in zip(names, schema.arguments) if "Tensor" in str(argument.type)]
    words = [rule.split() for rule in _rules(operator, arguments)]
    words.append(["R" * len(tensors), "R" * len(schema.returns)])
    specs = [(name, arguments[name]) for name in tensors]
    for dimension in range(next(spec.mesh.ndim for _, spec in specs if spec is not None)):
        _refuse_others(operator, specs, dimension, [inputs for inputs, _ in words])
    strategies = []
    for inputs, outputs in words:
        places = {name: _PLACEMENTS[letter] for name, letter in zip(tensors, inputs) if arguments[name] is not None}
        strategies.append(([_PLACEMENTS[letter] for letter in outputs], [places.get(name) for name in names]))
    return strategies


def _refuse_others(operator, specs, dimension, rules):
    """DTensor would redistribute what no rule takes, in silence."""
    closest = None
    for rule in rules:
        wrong = [
            (name, spec.placements[dimension], _PLACEMENTS[letter])
            for (name, spec), letter in zip(specs, rule)
            if spec is not None and spec.placements[dimension] != _PLACEMENTS[letter]
        ]
        if not wrong:
            return
        if closest is None or len(wrong) < len(closest):
            closest = wrong
    what = ", ".join(f"{name} is {got}" for name, got, _ in closest)
    gather = ", ".join(f"{name} to {needed}" for name, _, needed in closest)
    raise NotImplementedError(f"coda::{operator}: {what}; redistribute {gather} first (gather it, if it is sharded)")


for _name in _RULES:
    _overload = getattr(coda, _name).default
    register_sharding(_overload)(functools.partial(_acceptable, _name, _overload._schema))
