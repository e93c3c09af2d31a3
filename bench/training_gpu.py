#!/usr/bin/env python3
"""Training steps of a Llama on one GPU: coda's and torch.compile's on Hugging Face's Llama, taking turns.

  training_gpu.py --coda build/coda [--preset llama-1b] [--batch 4] [--seq 4096] [--rounds 3] [--steps 10] [--json FILE]

Two torch models, each compiled, with PyTorch's own best attention, clipping and fused AdamW:
  autocast   fp32 weights under bf16 autocast;
  masters    bf16 weights and gradients, AdamW on fp32 masters that are copied back after every step.
A round times so many steps of each, back to back, and then `coda bench step` (which times its own by wall clock, as is done here: each
step ends when its loss and its gradients' norm are on the host). Peak memory: what the driver counts in use by a process of its own
(coda), or torch's reserved peak of one model, the other one's weights left out. Needs torch and transformers.
"""
import argparse
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # of src/llama/presets.h
    "llama-1b": dict(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
                     intermediate_size=8192, tie_word_embeddings=True),
    "llama-3b": dict(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, head_dim=128,
                     intermediate_size=8192, tie_word_embeddings=True),
    "llama-8b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     intermediate_size=14336, tie_word_embeddings=False),
}


class Autocast:
    """fp32 weights; products in bf16."""

    def __init__(self, config, tokens):
        self.model = LlamaForCausalLM(config)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.compiled = torch.compile(self.loss)
        self.tokens = tokens

    def loss(self, tokens, targets):
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self):
        loss = self.compiled(*self.tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()


class Masters(Autocast):
    """bf16 weights; fp32 masters in the optimizer."""

    def __init__(self, config, tokens):
        super().__init__(config, tokens)
        self.model.bfloat16()
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss(self, tokens, targets):
        logits = self.model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self):
        loss = self.compiled(*self.tokens)
        loss.backward()
        for master, p in zip(self.masters, self.parameters):
            master.grad = p.grad.float()
            p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        torch._foreach_copy_([p.data for p in self.parameters], self.masters)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()


def timed(model, steps):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        model.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def release():
    gc.collect()
    torch.cuda.empty_cache()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--coda", required=True)
    p.add_argument("--preset", choices=sorted(SHAPES), default="llama-1b")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--json", help="writes the figures there too")
    o = p.parse_args()

    torch.manual_seed(0)
    torch.set_default_device("cuda")
    config = LlamaConfig(vocab_size=128256, rms_norm_eps=1e-5, rope_theta=5e5, max_position_embeddings=o.seq,
                         attn_implementation="sdpa", **SHAPES[o.preset])
    tokens = [torch.randint(0, config.vocab_size, (o.batch, o.seq)) for _ in range(2)]
    report = pathlib.Path(tempfile.mkdtemp()) / "step.json"
    coda = [o.coda, "bench", "step", "--device", "cuda", "--preset", o.preset, "--batch", str(o.batch), "--seq", str(o.seq),
            "--rounds", "3", "--json", str(report)]

    models, peaks = {}, {}
    for kind in (Autocast, Masters):
        name = "torch.compile, " + kind.__name__.lower()
        release()
        before = torch.cuda.memory_reserved()
        models[name] = kind(config, tokens)
        for _ in range(3):
            models[name].step()
        torch.cuda.reset_peak_memory_stats()
        models[name].step()
        peaks[name] = torch.cuda.max_memory_reserved() - before
    seconds = {name: [] for name in [*models, "coda"]}
    for _ in range(o.rounds):
        for name, model in models.items():
            timed(model, 2)
            seconds[name].append(timed(model, o.steps))
        release()
        done = subprocess.run(coda, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        figures = json.loads(report.read_text())["step"]
        seconds["coda"].append(figures["times"]["step"]["median_s"])
        peaks["coda"] = figures["bytes"]

    rows = {name: {"tokens_per_s": o.batch * o.seq / statistics.median(times), "seconds": times, "peak_bytes": peaks[name]}
            for name, times in seconds.items()}
    print(f"{o.preset}, {o.batch} x {o.seq} tokens, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, row in rows.items():
        print(f"{name:26s} {row['tokens_per_s']:8.0f} tokens/s ({min(row['seconds']) * 1e3:.1f} to "
              f"{max(row['seconds']) * 1e3:.1f} ms a step), {row['peak_bytes'] / 1e9:.1f} GB")
    best = max(row["tokens_per_s"] for name, row in rows.items() if name != "coda")
    print(f"ratio to the faster torch {rows['coda']['tokens_per_s'] / best:.3f}")
    if o.json:
        report = {"model": o.preset, "batch": o.batch, "seq": o.seq, "gpu": torch.cuda.get_device_name(),
                  "torch": torch.__version__, "rows": rows}
        pathlib.Path(o.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
