"""Loads the operators' library into PyTorch."""

import pathlib

import torch

NEEDED_TORCH = (2, 11)


def _torch_version():
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def load():
    if _torch_version() < NEEDED_TORCH:
        raise ImportError(
            f"coda_torch needs PyTorch {NEEDED_TORCH[0]}.{NEEDED_TORCH[1]} or newer; {torch.__version__} was found"
        )
    torch.ops.load_library(pathlib.Path(__file__).with_name("_coda.so"))


load()
