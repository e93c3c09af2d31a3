"""The example for several processes: every way to be parallel has the same losses, and a process that dies ends the run, which then goes on."""

import importlib.util
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import sys

import pytest
import torch

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "train_distributed.py"
SMALL = ["--length", "16", "--hidden", "128", "--layers", "1", "--save-every", "2", "--timeout", "20"]
WORLD = 2


def as_torchrun_does(rank, world, port, arguments, out, trouble):
    """One process of a run; trouble is a signal that it gives itself in the middle of its fifth step."""
    sys.stdout = sys.stderr = open(out, "w")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost",
                      MASTER_PORT=str(port))  # fmt: skip
    torch.set_num_threads(1)
    if trouble is not None:
        backward, steps = torch.Tensor.backward, []

        def die(self, *args, **kwargs):
            steps.append(None)
            if len(steps) == 5:
                os.kill(os.getpid(), trouble)
            backward(self, *args, **kwargs)

        torch.Tensor.backward = die
    spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(arguments)


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "coda_torch", "transformers",
         "transformers.models.llama.modeling_llama", __name__]
    )  # fmt: skip
    return context


@pytest.fixture
def start(context, tmp_path):
    """Runs the example; gives the losses by step, and how each process ended."""

    def run(*arguments, world=WORLD, trouble=None):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        out = tmp_path / "out"
        processes = [
            context.Process(
                target=as_torchrun_does,
                args=(rank, world, port, [*SMALL, *arguments], out if rank == 0 else os.devnull, trouble if rank else None),
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes if trouble is None else processes[:1]:
            process.join(240)
        ended = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", out.read_text())}
        return losses, ended, out.read_text()

    return run


def assert_same(got, want):
    assert got and all(got[step] == pytest.approx(want[step], rel=1e-5) for step in got), (got, want)


def test_a_run_that_lost_a_process_goes_on_where_it_was(start, tmp_path):
    whole, ended, text = start("--parallel", "ddp", "--steps", "7", world=1)
    assert ended == [0] and list(whole) == list(range(1, 8)), text
    losses, ended, text = start("--parallel", "ddp", "--steps", "2")
    assert ended == [0, 0] and "tokens/s on 2 processes, ddp" in text, text
    assert_same(losses, whole)

    checkpoints = ["--checkpoints", str(tmp_path / "checkpoints")]
    losses, ended, text = start("--parallel", "fsdp", "--steps", "7", *checkpoints, trouble=signal.SIGKILL)
    assert list(losses) == [1, 2, 3, 4] and ended[0] not in (0, None), (ended, text)
    assert_same(losses, whole)
    assert "Error" in text

    losses, ended, text = start("--parallel", "fsdp", "--steps", "6", *checkpoints)
    assert ended == [0, 0] and list(losses) == [5, 6], text
    assert_same(losses, whole)

    # From two processes' checkpoint one process makes the next step, and two do under tensor parallel.
    for parallel, world in (("ddp", 1), ("tp", 2)):
        losses, ended, text = start("--parallel", parallel, "--steps", "7", *checkpoints, world=world)
        assert ended == [0] * world and list(losses) == [7], text
        assert_same(losses, whole)


def test_a_process_that_hangs_ends_the_run(start):
    losses, ended, text = start("--parallel", "tp", "--steps", "7", "--timeout", "2", trouble=signal.SIGSTOP)
    assert 5 not in losses and ended[0] not in (0, None), (ended, text)
