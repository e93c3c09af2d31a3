"""Two processes of one gloo group, for all tests that need them: they start once."""

import concurrent.futures
import multiprocessing

import pytest
import torch
import torch.distributed as dist

WORLD = 2


def join(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)


@pytest.fixture(scope="session")
def both(tmp_path_factory):
    """Calls a function of a test's module in two processes of one group at once. They see each test's errors, and stay."""
    path = tmp_path_factory.mktemp("group") / "store"
    context = multiprocessing.get_context("spawn")
    pools = [
        concurrent.futures.ProcessPoolExecutor(1, context, initializer=join, initargs=(rank, path))
        for rank in range(WORLD)
    ]

    def run(function, *args):
        for future in [pool.submit(function, *args) for pool in pools]:
            future.result(timeout=240)

    yield run
    for pool in pools:
        pool.shutdown(cancel_futures=True)
