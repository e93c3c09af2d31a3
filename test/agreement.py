"""coda against Hugging Face's LlamaForCausalLM: the same checkpoint, the same bytes, step by step.

  agreement.py --coda build/coda --text FILE [--only NAME]

For every variant of the model: a fresh checkpoint made by transformers; 20 steps of both trainers on the same windows in the
same order, fp32; losses within 1e-4 and gradient norms within 1e-3 relative at every step; 100 more steps of coda; its saved
checkpoint loaded by transformers with nothing missing or unexpected, and its loss there within 1e-5 of `coda eval`'s.
Exit code 1 if any of it fails. Needs torch, transformers, safetensors (see the Makefile's agreement target).
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, MORE_STEPS, BATCH, SEQ, LR = 20, 100, 4, 128, 1e-3
LOSS_TOLERANCE, NORM_TOLERANCE, SAVED_TOLERANCE = 1e-4, 1e-3, 1e-5
EVAL_BATCHES = 8

VARIANTS = {
    "default": {},
    "tie": {"tie_word_embeddings": True},
    "head-dim-48": {"head_dim": 48},
    "theta-eps": {"theta": 5e5, "rms_norm_eps": 1e-5},
    "rope-llama3": {"rope": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64}},
    "rope-linear": {"rope": {"rope_type": "linear", "factor": 4.0}},
    "sharded": {"shard": "600KB"},
}


def make(directory, tie_word_embeddings=False, head_dim=32, theta=1e4, rms_norm_eps=1e-6, rope=None, shard="5GB"):
    torch.manual_seed(0)
    rope = {"rope_type": "default"} | (rope or {}) | {"rope_theta": theta}
    config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
                         intermediate_size=688, vocab_size=256, max_position_embeddings=4096, head_dim=head_dim,
                         tie_word_embeddings=tie_word_embeddings, rms_norm_eps=rms_norm_eps, rope_parameters=rope)
    LlamaForCausalLM(config).save_pretrained(directory, max_shard_size=shard)


def load(directory):
    model, info = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa",
                                                   output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, f"the checkpoint does not fit transformers' model: {wrong}"
    return model


def batch(data, first, count):
    windows = (len(data) - 1) // SEQ
    rows = torch.stack([data[i % windows * SEQ:][: SEQ + 1] for i in range(first, first + count)]).long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, data, first, count):
    inputs, targets = batch(data, first, count)
    logits = model(inputs, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference_steps(directory, data):
    model = load(directory)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        loss = loss_of(model, data, step * BATCH, BATCH)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield {"step": step, "loss": loss.item(), "grad_norm": norm.item()}


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def compare(coda, text, data, name, options):
    with tempfile.TemporaryDirectory() as folder:
        start, trained = pathlib.Path(folder) / "start", pathlib.Path(folder) / "trained"
        make(start, **options)
        shape = ["--data", text, "--batch", BATCH, "--seq", SEQ, "--holdout", 0, "--lr", LR]
        run(coda, "train", "--init", start, "--in-order", *shape, "--steps", STEPS, "--out", trained)
        ours = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
        theirs = list(reference_steps(start, data))
        assert len(ours) == STEPS, f"{len(ours)} steps in metrics.jsonl, not {STEPS}"
        loss_gap = max((abs(a["loss"] - b["loss"]), a["step"]) for a, b in zip(ours, theirs))
        norm_gap = max((abs(a["grad_norm"] / b["grad_norm"] - 1), a["step"]) for a, b in zip(ours, theirs))

        run(coda, "train", "--resume", trained, "--steps", STEPS + MORE_STEPS)
        ours_saved = json.loads(run(coda, "eval", "--model", trained, "--data", text, "--batch", BATCH, "--seq", SEQ,
                                    "--steps", EVAL_BATCHES))["loss"]
        model = load(trained)
        with torch.no_grad():
            theirs_saved = sum(loss_of(model, data, i * BATCH, BATCH).item() for i in range(EVAL_BATCHES)) / EVAL_BATCHES
        saved_gap = abs(ours_saved - theirs_saved)
        ok = loss_gap[0] <= LOSS_TOLERANCE and norm_gap[0] <= NORM_TOLERANCE and saved_gap <= SAVED_TOLERANCE
        print(f"{'ok  ' if ok else 'FAIL'} {name:12s} loss within {loss_gap[0]:.1e} (step {loss_gap[1]}), "
              f"norm within {norm_gap[0]:.1e} (step {norm_gap[1]}), after {STEPS + MORE_STEPS} steps "
              f"{ours_saved:.6f} here and {theirs_saved:.6f} in transformers", flush=True)
        return ok


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coda", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--only", choices=VARIANTS)
    options = parser.parse_args()
    data = torch.frombuffer(bytearray(pathlib.Path(options.text).read_bytes()), dtype=torch.uint8)
    results = [compare(options.coda, options.text, data, name, variant) for name, variant in VARIANTS.items()
               if options.only in (None, name)]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
