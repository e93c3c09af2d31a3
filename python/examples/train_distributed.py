"""Trains a small Hugging Face Llama, patched by coda_torch, on several processes: DDP, FSDP2, or tensor and sequence parallel.

    torchrun --nproc-per-node 2 train_distributed.py --parallel fsdp --text shakespeare.txt --checkpoints runs/first

Each process has a GPU of its own, or, where there is none, a share of the CPU. Tokens are bytes. --batch is the sequences of
a step on all processes together, and a step's sequences depend on its number only: every way to be parallel, and every number of
processes, has the same losses. A step is

    ddp    each process has the whole model and some sequences; gradients are averaged
    fsdp   the same, and of every boundary a part: it is gathered for one operator (coda_torch.shard)
    tp     each process has some heads, a part of the MLP and of the vocabulary, and all sequences (coda_torch.parallelize)

A checkpoint is written every --save-every steps (torch.distributed.checkpoint). A run with the same --checkpoints goes on from
the last one that is whole, on as many processes as there are now, under any --parallel.

If a process dies, torchrun ends the others and itself with an error; if one hangs in a step, or its host is gone, those that
wait for it end with one after --timeout seconds. Start it again to go on, or let torchrun do it: --max-restarts 3. For a model
of your own, put LlamaForCausalLM.from_pretrained(...) where LlamaForCausalLM(config) is.
"""

import argparse
import datetime
import os
import pathlib
import time

import coda_torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tp"], default="fsdp")
    parser.add_argument("--text", default=__file__, help="what to train on")
    parser.add_argument("--steps", type=int, default=40, help="of the whole run, those before a restart too")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step, on all processes together")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder for checkpoints, which all processes see")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--timeout", type=float, default=40, help="seconds that a process waits for another in a step")
    return parser.parse_args(arguments)


def make_model(options, device):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
        num_key_value_heads=max(options.hidden // 64, 1), max_position_embeddings=options.length, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return coda_torch.patch(LlamaForCausalLM(config).to(device).train())


def spread(model, options, device, group):
    """The model as it is called: DDP wraps it, the others change it in place."""
    if options.parallel == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, device.type)
    if options.parallel == "tp":
        return coda_torch.parallelize(model, mesh)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Weights stay in float32; on a GPU they are gathered, and multiplied, in bfloat16.
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    return coda_torch.shard(model, mesh, mp_policy=policy)


def batch_of(step, text, options, device):
    """This process' sequences of a step; under tp, where all compute on the same ones, all of them."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
    sequences = text[first + torch.arange(options.length)].to(device)
    return sequences if options.parallel == "tp" else sequences.chunk(dist.get_world_size())[dist.get_rank()]


class Checkpoints:
    """Folders step-N; one without .metadata was not finished."""

    def __init__(self, folder):
        self.folder = folder
        self.group = dist.new_group(backend="gloo")

    @staticmethod
    def state(model, optimizer, step):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    def save(self, model, optimizer, step):
        dcp.save(
            self.state(model, optimizer, step), checkpoint_id=self.folder / f"step-{step}", process_group=self.group
        )

    def load(self, model, optimizer):
        """Steps that the last checkpoint has behind it; 0 if there is none."""
        steps = [int(path.parent.name.removeprefix("step-")) for path in self.folder.glob("step-*/.metadata")]
        if not steps:
            return 0
        state = self.state(model, optimizer, 0)
        dcp.load(state, checkpoint_id=self.folder / f"step-{max(steps)}", process_group=self.group)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=True),
        )  # fmt: skip
        return state["step"]


@record  # so that torchrun shows the error of the process that failed first
def main(arguments=None):
    options = parse(arguments)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Processes may differ by minutes in how long they take to start, to load a model, or to write a checkpoint.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=10))
    if options.parallel != "tp" and options.batch % dist.get_world_size() != 0:
        raise SystemExit(f"--batch is {options.batch}; {dist.get_world_size()} processes need a multiple of that")
    text = torch.frombuffer(bytearray(pathlib.Path(options.text).read_bytes()), dtype=torch.uint8).long()
    if len(text) <= options.length:
        raise SystemExit(f"{options.text} has {len(text)} bytes; a sequence needs {options.length + 1}")

    model = make_model(options, device)
    # In a step, whoever waits for longer ends with an error: under NCCL its watchdog ends the process, gloo raises.
    group = dist.new_group(timeout=datetime.timedelta(seconds=options.timeout))
    model = spread(model, options, device, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    checkpoints = Checkpoints(options.checkpoints) if options.checkpoints else None
    done = checkpoints.load(model, optimizer) if checkpoints else 0
    start = time.perf_counter()
    for step in range(done + 1, options.steps + 1):
        batch = batch_of(step, text, options, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and options.parallel != "fsdp"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=group)  # of equal shares, or of the same loss
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.6f}", flush=True)
        if checkpoints and step % options.save_every == 0:
            checkpoints.save(model, optimizer, step)
    if dist.get_rank() == 0:
        tokens = (options.steps - done) * options.batch * options.length
        print(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s on {dist.get_world_size()} processes, {options.parallel}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
