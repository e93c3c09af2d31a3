"""A Hugging Face Llama's training step on one GPU: as it is under torch.compile, whole or by layer, with Liger's patch, and with
coda_torch's.

  huggingface.py [--layers 16] [--batch 4] [--seq 4096] [--rounds 5] [--steps 4] [--out FILE]

All variants are LlamaForCausalLM of the 1B shape (hidden 2048, 32 heads and 8 of keys and values of 64, ffn 8192, vocabulary 128256) in
bfloat16 with the same weights and tokens, fused AdamW of PyTorch, and scaled_dot_product_attention. Each has a process of its own, since
Liger's patch changes transformers for everybody in it; the processes take turns on the card, in random order, round after round, and a figure
is the median over rounds. Memory: PyTorch's own peak. Prints a JSON object per variant. Liger's needs liger-kernel; a variant that cannot be
made is left out, which is said.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import random
import statistics
import time

p = argparse.ArgumentParser()
p.add_argument("--layers", type=int, default=16)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=4096)
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--steps", type=int, default=4, help="of a round")
p.add_argument("--only", nargs="+", help="variants")
p.add_argument("--out")


def compiled(model):
    import torch

    return torch.compile(model)


def compiled_by_layer(model):
    """Each layer, and the loss, by itself: attention is then called by code that sees no mask, which it does not need."""
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    for layer in model.model.layers:
        layer.compile()
    model.loss_function = torch.compile(ForCausalLMLoss)
    return model


def liger(model):
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def coda(model):
    import coda_torch

    return coda_torch.patch(model)


def coda_compiled(model):
    return compiled(coda(model))


VARIANTS = {"torch_compile": compiled, "torch_compile_layers": compiled_by_layer, "liger": liger, "coda": coda, "coda_compile": coda_compiled}


def run(name, o, pipe):
    """A variant's process: makes itself, says so, and runs a round whenever it is told to."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=o.layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        attn_implementation="sdpa", use_cache=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (o.batch, o.seq), device="cuda")
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    losses = []
    try:
        prepared = VARIANTS[name](model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step():
            loss = prepared(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())

        for _ in range(3):
            step()
        torch.cuda.synchronize()
    except Exception as error:
        pipe.send({"variant": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    pipe.send({
        "variant": name, "layers": o.layers, "tokens": o.batch * o.seq, "card": torch.cuda.get_device_name(),
        "torch": torch.__version__, "losses": [round(x.item(), 4) for x in losses],
    })  # fmt: skip
    while pipe.recv() == "round":
        step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(o.steps):
            step()
        torch.cuda.synchronize()
        pipe.send(((time.perf_counter() - start) / o.steps, torch.cuda.max_memory_allocated()))
        torch.cuda.empty_cache()  # the others need it


def main():
    o = p.parse_args()
    random.seed(0)
    context = multiprocessing.get_context("spawn")
    running = {}
    for name in o.only or VARIANTS:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(name, o, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a process that dies is noticed
        running[name] = (ours, process)
    rows = {}
    waiting, start = {pipe: name for name, (pipe, _) in running.items()}, time.perf_counter()
    while waiting:
        for pipe in multiprocessing.connection.wait(list(waiting)):
            name = waiting.pop(pipe)
            try:
                made = pipe.recv()
            except EOFError:
                made = {"error": "its process died"}
            if "error" in made:
                print(f"{name}: left out, {made['error']}", flush=True)
            else:
                rows[name] = made
                print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    times = {name: [] for name in rows}
    for _ in range(o.rounds):
        for name in random.sample(list(rows), len(rows)):
            running[name][0].send("round")
            seconds, rows[name]["peak_bytes"] = running[name][0].recv()
            times[name].append(seconds)
    for name, row in rows.items():
        running[name][0].send("stop")
        seconds = statistics.median(times[name])
        row["ms"] = [round(x * 1e3, 2) for x in (seconds, min(times[name]), max(times[name]))]
        row["tokens_per_s"] = round(row["tokens"] / seconds)
        print(json.dumps(row), flush=True)
    if o.out:
        with open(o.out, "w") as file:
            json.dump(list(rows.values()), file, indent=1)


if __name__ == "__main__":
    main()
