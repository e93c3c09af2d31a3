"""A Hugging Face Llama's training step on two GPUs beside one: patched by coda_torch, and as it is under torch.compile.

  two_gpus.py --out two.json [--cases 'coda/*/1b' ...] [--steps 8] [--limit 200]     runs cases, and puts them into FILE
  two_gpus.py --out two.json --cases none --picture two.svg                           prints the table and draws what is there

A case is VARIANT/PARALLEL/MODEL: coda or torch_compile; one (GPU), ddp, fsdp, or tp (2, with sequence parallel); 1b (hidden 2048,
16 layers, tied embedding) or 8b (hidden 4096, 8 layers or --layers). Each runs in processes of its own, one after the other, ends
after --limit seconds at the latest, and replaces what FILE has of it: a run can be put together from several commands.

All cases make the same steps: bfloat16 weights from the same seed, the same random tokens, --batch sequences of --length tokens,
--micro at a time on each GPU (under tp, where a GPU has half of every layer, twice as many), fused AdamW, and clipping. Where one GPU
takes its sequences in two micro-batches, two GPUs take one each, so tokens/s ÷ (2 · tokens/s of one GPU) is the scaling efficiency of
the same work. torch.compile is by layer, and of the loss, as torchtitan does it, in all cases; PyTorch's tensor parallel is
parallelize_module with sequence parallel norms and loss_parallel.

The losses of every step are held to one GPU's of the same variant: the largest difference, relative. The measure of what bfloat16
rounding does to them is the same difference between the two variants on one GPU, which compute the same formulas and round at
other places; it is printed beside.

With --profile (the default on GPUs), one more step is recorded by torch.profiler on process 0, and reduced to the times when
communication and other kernels ran: how much of the communication is covered by them, and the picture.

Without a GPU it runs small models on gloo, in float32 and uncompiled: that shows that it works, and no speed.
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import pathlib
import socket
import statistics
import time

VARIANTS = ("coda", "torch_compile")
PARALLEL = ("one", "ddp", "fsdp", "tp")
MODELS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip
# What stands for them without a GPU.
SMALL = {
    name: {**MODELS[name], "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": layers,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for name, layers in (("1b", 2), ("8b", 3))
}  # fmt: skip

p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--out", type=pathlib.Path, help="where the figures are, and what they are put into")
p.add_argument("--cases", nargs="+", default=["*"], help="names, or patterns of them")
p.add_argument("--layers", type=int, help="of the 8b model")
p.add_argument("--batch", type=int, default=4, help="sequences of a step, on all GPUs together")
p.add_argument("--micro", type=int, default=2, help="sequences at a time on each GPU")
p.add_argument("--length", type=int, help="tokens of a sequence; 4096, and 32 without a GPU")
p.add_argument("--steps", type=int, default=8, help="timed, behind --warm")
p.add_argument("--warm", type=int, default=3, help="steps that are not timed")
p.add_argument("--limit", type=float, default=200, help="seconds of a case")
p.add_argument("--profile", action=argparse.BooleanOptionalAction, help="record one more step")
p.add_argument("--picture", type=pathlib.Path, help="draw communication beside computation")


def make_model(name, o, device):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict((MODELS if o.gpu else SMALL)[name])
    if o.layers and name == "8b":
        sizes["num_hidden_layers"] = o.layers
    config = LlamaConfig(
        vocab_size=128256 if o.gpu else 256, max_position_embeddings=131072, rms_norm_eps=1e-5, attn_implementation="sdpa",
        use_cache=False, **sizes,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config).to(torch.bfloat16 if o.gpu else torch.float32).train()


# Each prepares a model in place and gives a function of tokens [batch, length]: the mean loss, with a graph.


def coda(model, parallel, mesh):
    import coda_torch
    import torch

    coda_torch.patch(model)
    if parallel == "fsdp":
        coda_torch.shard(model, mesh)
    elif parallel == "tp":
        coda_torch.parallelize(model, mesh)
    called = torch.nn.parallel.DistributedDataParallel(model) if parallel == "ddp" else model
    return called, lambda tokens: called(input_ids=tokens, labels=tokens).loss


def torch_compile(model, parallel, mesh):
    import contextlib

    import torch
    from torch.distributed.tensor.parallel import loss_parallel

    if parallel == "tp":
        shard_by_pytorch(model, mesh)
    gpu = next(model.parameters()).is_cuda
    if gpu:
        for layer in model.model.layers:
            layer.compile()
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    called = torch.nn.parallel.DistributedDataParallel(model) if parallel == "ddp" else model

    def cross_entropy(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    # loss_parallel's operators are not the compiler's.
    of_logits = torch.compile(cross_entropy) if gpu and parallel != "tp" else cross_entropy

    def loss(tokens):
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        position = torch.arange(tokens.shape[1], device=tokens.device)[None]  # of whole sequences, whose rows are sharded
        return of_logits(called(input_ids=tokens, position_ids=position).logits, labels)

    loss.context = loss_parallel if parallel == "tp" else contextlib.nullcontext
    return called, loss


def shard_by_pytorch(model, mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
    )  # fmt: skip

    tied = model.lm_head.weight is model.model.embed_tokens.weight
    rows, whole = Shard(1), Replicate()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.model.layers)):
        layer = f"model.layers.{i}"
        plan |= {f"{layer}.{norm}": SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": rows}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
        plan |= {f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"{layer}.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{layer}.{name}": RowwiseParallel(output_layouts=rows) for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(model, mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def tokens_of(step, o, vocab):
    import torch

    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocab, (o.batch, o.length), generator=generator)


def run(case, o, rank, world, port, pipe):
    """A process of a case. The first one sends a row; all send what stopped them."""
    try:
        row = measure(case, o, rank, world, port)
        if rank == 0:
            pipe.send(row)
    except Exception as error:
        pipe.send({"case": case, "error": f"{type(error).__name__}: {error}".splitlines()[0]})


def measure(case, o, rank, world, port):
    import contextlib
    import datetime

    import torch
    import torch.distributed as dist

    variant, parallel, name = case.split("/")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    device = torch.device("cuda", rank) if o.gpu else torch.device("cpu")
    if o.gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if o.gpu else "gloo", timeout=datetime.timedelta(seconds=o.limit))
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,)) if world > 1 else None
    model = make_model(name, o, device)
    vocab = model.config.vocab_size
    called, loss_of = {"coda": coda, "torch_compile": torch_compile}[variant](model, parallel, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=o.gpu)
    context = getattr(loss_of, "context", contextlib.nullcontext)
    losses, seconds = [], []

    def wait():
        if o.gpu:
            torch.cuda.synchronize()

    def step():
        tokens = tokens_of(len(losses), o, vocab).to(device)
        if parallel in ("ddp", "fsdp"):
            tokens = tokens.chunk(world)[rank]
        micro = tokens.split(o.micro * (world if parallel == "tp" else 1))
        total = 0
        for i, part in enumerate(micro):
            last = i + 1 == len(micro)
            if parallel == "fsdp":
                called.set_requires_gradient_sync(last)
            with called.no_sync() if parallel == "ddp" and not last else contextlib.nullcontext(), context():
                loss = loss_of(part) / len(micro)
                loss.backward()
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)

    for i in range(o.warm + o.steps):
        if i == o.warm and o.gpu:
            torch.cuda.reset_peak_memory_stats()
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor(float(torch.cuda.max_memory_allocated() if o.gpu else 0), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    profile = record(step, wait, o) if o.profile else None
    mean = torch.stack([x.float() for x in losses])
    dist.all_reduce(mean)  # of equal shares, or of the same losses
    mean = mean[: o.warm + o.steps] / world
    timed = seconds[o.warm :]
    row = {
        "case": case, "processes": world, "layers": model.config.num_hidden_layers, "tokens": o.batch * o.length,
        "losses": [round(x, 6) for x in mean.tolist()],
        "ms": [round(f(timed) * 1e3, 2) for f in (statistics.median, min, max)],
        "tokens_per_s": round(o.batch * o.length / statistics.median(timed)),
        "peak_bytes": int(peak.item()), "profile": profile,
        "device": torch.cuda.get_device_name() if o.gpu else "CPU", "torch": torch.__version__,
    }  # fmt: skip
    dist.destroy_process_group()
    return row


def record(step, wait, o):
    """One step as times in microseconds: when communication ran, and when something else did, with what is close put together."""
    import torch
    from torch.profiler import ProfilerActivity

    activity = [ProfilerActivity.CUDA if o.gpu else ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity) as profiler:
        step()
        wait()
    of = {"communication": [], "compute": []}
    for event in profiler.events():
        if o.gpu and (event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation):
            continue
        exchanged = "nccl" in event.name or "gloo:" in event.name
        if exchanged or o.gpu or event.name.startswith("coda::") or event.name in ("aten::mm", "aten::addmm"):
            of["communication" if exchanged else "compute"].append((event.time_range.start, event.time_range.end))
    merged = {name: merge(times, 0) for name, times in of.items()}
    everything = [t for times in merged.values() for t in times]
    if not everything:
        return None
    first, last = min(t[0] for t in everything), max(t[1] for t in everything)
    covered = sum(
        max(0, min(c[1], k[1]) - max(c[0], k[0])) for c in merged["communication"] for k in merged["compute"]
    )
    return {
        "step_us": round(last - first), "covered_us": round(covered),
        **{f"{name}_us": round(sum(b - a for a, b in times)) for name, times in merged.items()},
        "times": {
            name: [[round(a - first), round(b - a)] for a, b in merge(times, (last - first) / 2000)]
            for name, times in merged.items()
        },
    }  # fmt: skip


def merge(times, gap):
    out = []
    for a, b in sorted(times):
        if out and a <= out[-1][1] + gap:
            out[-1][1] = max(out[-1][1], b)
        else:
            out.append([a, b])
    return out


def run_case(case, o):
    context = multiprocessing.get_context("spawn")
    world = 1 if "/one/" in case else 2
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=run, args=(case, o, rank, world, port, theirs), daemon=True) for rank in range(world)
    ]
    for process in processes:
        process.start()
    theirs.close()
    row = {"case": case, "error": f"not done after {o.limit:.0f} s"}
    if ours.poll(o.limit):
        try:
            row = ours.recv()
        except EOFError:
            row["error"] = "its process died"
    if "error" not in row:
        processes[0].join(20)
    for process in processes:
        process.kill()
        process.join()
    return row


def apart(losses, others):
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others))


def table(rows):
    first = next(iter(rows.values()))
    print(f"\n{first['device']}, torch {first['torch']}, {first['tokens']} tokens a step\n")
    print("| model | variant | parallel | tokens/s | ms a step | efficiency | peak memory | losses apart | covered communication |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, row in sorted(rows.items(), key=lambda item: list(reversed(item[0].split("/")))):
        variant, parallel, name = case.split("/")
        one = rows.get(f"{variant}/one/{name}")
        alone = one is row or one is None
        efficiency = "" if alone else f"{row['tokens_per_s'] / (row['processes'] * one['tokens_per_s']):.3f}"
        difference = "" if alone else f"{apart(row['losses'], one['losses']):.1e}"
        profile = row["profile"]
        covered = ""
        if profile and profile["communication_us"] and not alone:
            covered = f"{profile['covered_us'] / profile['communication_us']:.2f} of {profile['communication_us'] / 1e3:.1f} ms"
        low, high = row["ms"][1:]
        print(f"| {name}, {row['layers']} layers | {variant} | {parallel} | {row['tokens_per_s']} | {low:.1f} to {high:.1f} | "
              f"{efficiency} | {row['peak_bytes'] / 1e9:.1f} GB | {difference} | {covered} |")  # fmt: skip
    for name in MODELS:
        pair = [rows.get(f"{variant}/one/{name}") for variant in VARIANTS]
        if all(pair):
            print(f"\n{name}: the two variants' losses on one GPU are {apart(*(r['losses'] for r in pair)):.1e} apart")


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {case: row for case, row in rows.items() if row["processes"] > 1 and row["profile"]}
    if not shown:
        raise SystemExit("no case of two processes with a profile; nothing to draw")
    figure, axes = pyplot.subplots(len(shown), figsize=(10, 1.1 * len(shown) + 0.6), squeeze=False)
    for (case, row), axis in zip(sorted(shown.items()), axes[:, 0]):
        for lane, (kind, color) in enumerate((("compute", "#1f6f8b"), ("communication", "#e0a458"))):
            spans = [(a / 1e3, length / 1e3) for a, length in row["profile"]["times"][kind]]
            axis.broken_barh(spans, (1 - lane, 0.8), color=color)
        axis.set(yticks=(1.4, 0.4), yticklabels=("compute", "communication"), xlim=(0, row["profile"]["step_us"] / 1e3))
        axis.set_title(case, fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("ms of one step, process 0")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main():
    import torch

    o = p.parse_args()
    o.gpu = torch.cuda.is_available()
    o.length = o.length or (4096 if o.gpu else 32)
    o.profile = o.gpu if o.profile is None else o.profile
    if o.batch % (2 * o.micro) != 0:
        p.error(f"--batch is {o.batch}; it needs to be a multiple of {2 * o.micro}, --micro on each of two GPUs")
    rows = {}
    if o.out and o.out.exists():
        rows = {row["case"]: row for row in json.loads(o.out.read_text())}
    names = [f"{variant}/{parallel}/{name}" for name in MODELS for parallel in PARALLEL for variant in VARIANTS]
    chosen = [case for case in names if any(fnmatch.fnmatchcase(case, pattern) for pattern in o.cases)]
    if o.gpu and torch.cuda.device_count() < 2 and any("/one/" not in case for case in chosen):
        p.error(f"{torch.cuda.device_count()} GPU was found; two are needed for cases other than */one/*")
    for case in chosen:
        start = time.perf_counter()
        row = run_case(case, o)
        if "error" in row:
            print(f"{case}: left out, {row['error']}", flush=True)
            continue
        rows[case] = row
        print(f"{case}: {row['tokens_per_s']} tokens/s, {time.perf_counter() - start:.0f} s in all", flush=True)
        if o.out:
            o.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    if rows:
        table(rows)
    if o.picture:
        draw(rows, o.picture)


if __name__ == "__main__":
    main()
