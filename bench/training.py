"""Training tokens/s of `coda train` and of torch.compile on Hugging Face's Llama, taking turns on the same cores.

  training.py --coda build/coda --text FILE [--rounds 3] [--threads 2] [--hidden 256 --layers 4 --heads 8 --kv-heads 4 --ffn 688]
              [--json FILE]

Both train the same model from the same checkpoint on the same windows, fp32. Tokens/s are by wall clock from outside: the time of 60
steps less the time of 20, so that loading, compiling and the first steps cancel. Beside them the rate of a large sgemm
(torch.mm, 2048³) and the share of it that each reaches, counting 6 FLOPs per parameter of a matrix and token (the embedding is
looked up, not multiplied) and attention's 12·T·width/2 per layer. Memory: what the first three steps add at their peak to what is
resident before them, of coda (`coda bench step`), torch.compile (compiling included) and torch without compiling. Needs torch and
transformers.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SHORT, LONG = 20, 60


def options():
    p = argparse.ArgumentParser()
    p.add_argument("--coda", required=True)
    p.add_argument("--text", required=True)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=2)
    for name, value in dict(hidden=256, layers=4, heads=8, kv_heads=4, ffn=688, batch=8, seq=256).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    p.add_argument("--json", help="writes the figures there too")
    p.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--role", default="compare", help=argparse.SUPPRESS)
    p.add_argument("--dir", help=argparse.SUPPRESS)
    p.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    return p.parse_args()


def make(o):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=o.hidden, num_hidden_layers=o.layers, num_attention_heads=o.heads,
                         num_key_value_heads=o.kv_heads, intermediate_size=o.ffn, vocab_size=256, head_dim=o.hidden // o.heads,
                         max_position_embeddings=4096)
    LlamaForCausalLM(config).save_pretrained(o.dir)


def resident(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def train_torch(o):
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(o.threads)
    model = LlamaForCausalLM.from_pretrained(o.dir, dtype=torch.float32, attn_implementation="sdpa")
    forward = model if o.eager else torch.compile(model)
    data = torch.frombuffer(bytearray(pathlib.Path(o.text).read_bytes()), dtype=torch.uint8)
    windows = (len(data) - 1) // o.seq
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3,
                                  betas=(0.9, 0.95), eps=1e-8)
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for step in range(o.steps):
        rows = torch.stack([data[i % windows * o.seq:][: o.seq + 1] for i in range(step * o.batch, (step + 1) * o.batch)]).long()
        logits = forward(rows[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    print("memory", resident("VmHWM") - before)


def sgemm_rate(threads):
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def output(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds(command):
    start = time.perf_counter()
    output(command)
    return time.perf_counter() - start


def compare(o):
    flops = 6 * (o.layers * (o.hidden * (o.hidden * 2 + 2 * o.kv_heads * (o.hidden // o.heads)) + 3 * o.hidden * o.ffn)
                 + 256 * o.hidden) + o.layers * 12 * o.seq * o.hidden // 2
    with tempfile.TemporaryDirectory() as folder:
        start = pathlib.Path(folder) / "start"
        same = ["--coda", o.coda, "--text", o.text, "--threads", o.threads, "--hidden", o.hidden, "--layers", o.layers, "--heads",
                o.heads, "--kv-heads", o.kv_heads, "--ffn", o.ffn, "--batch", o.batch, "--seq", o.seq, "--dir", start]
        seconds([sys.executable, __file__, *same, "--role", "make"])

        def ours(steps, n):
            return [o.coda, "train", "--init", start, "--data", o.text, "--in-order", "--batch", o.batch, "--seq", o.seq, "--steps",
                    steps, "--threads", o.threads, "--save-every", 10**6, "--out", pathlib.Path(folder) / f"run-{steps}-{n}"]

        def theirs(steps, _, *more):
            return [sys.executable, __file__, *same, "--role", "torch", "--steps", steps, *more]

        def memory_of_torch(*more):
            return int(output(theirs(3, 0, *more)).split("memory ")[1].split()[0])

        report = pathlib.Path(folder) / "step.json"
        output([o.coda, "bench", "step", "--threads", o.threads, "--hidden", o.hidden, "--layers", o.layers, "--heads", o.heads,
                "--kv-heads", o.kv_heads, "--ffn", o.ffn, "--batch", o.batch, "--seq", o.seq, "--rounds", 1, "--json", report])
        memory = {"coda": json.loads(report.read_text())["step"]["bytes_of_step"], "torch.compile": memory_of_torch(),
                  "torch": memory_of_torch("--eager")}

        rates = {"coda train": [], "torch.compile": []}
        peaks = []
        for n in range(o.rounds):
            for name, command in (("coda train", ours), ("torch.compile", theirs)):
                spent = seconds(command(LONG, n)) - seconds(command(SHORT, n))
                rates[name].append((LONG - SHORT) * o.batch * o.seq / spent)
            peaks.append(sgemm_rate(o.threads))
        peak = statistics.median(peaks)
        print(f"{flops / 1e6:.1f} MFLOP a token, {o.threads} threads, sgemm {peak / 1e9:.0f} GFLOP/s")
        for name, values in rates.items():
            middle = statistics.median(values)
            print(f"{name:14s} {middle:8.0f} tokens/s (from {min(values):.0f} to {max(values):.0f}), "
                  f"{middle * flops / 1e9:.0f} GFLOP/s, {100 * middle * flops / peak:.0f} % of sgemm")
        ratio = statistics.median(rates["coda train"]) / statistics.median(rates["torch.compile"])
        print(f"ratio of medians {ratio:.2f}")
        print("memory of a step: " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in memory.items()))
        if o.json:
            model = {name: getattr(o, name) for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "batch", "seq", "threads")}
            pathlib.Path(o.json).write_text(json.dumps(
                {"model": model, "tokens_per_second": rates, "ratio": ratio, "sgemm_flops": peaks, "flops_per_token": flops,
                 "bytes_of_step": memory}, indent=2) + "\n")


if __name__ == "__main__":
    o = options()
    {"compare": compare, "make": make, "torch": train_torch}[o.role](o)
