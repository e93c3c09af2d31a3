"""Trains a small Hugging Face Llama on a text file, as it is and after coda_torch.patch, and draws both losses.

    pip install transformers matplotlib
    python finetune.py --text shakespeare.txt --steps 100 --picture losses.png

Tokens are bytes, and both runs start from the same random weights and see the same batches: their lines lie on each
other. Without --text it reads this file. For a model of your own, put LlamaForCausalLM.from_pretrained(...) where
LlamaForCausalLM(config) is, and its tokenizer's ids where the bytes are.
"""

import argparse
import time

import coda_torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", default=__file__, help="what to train on")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", default="losses.png", help="where the picture of both losses is written")
    return parser.parse_args()


def make_model(options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        num_key_value_heads=max(options.hidden // 64, 1),
        max_position_embeddings=options.length,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(options.device)


def batches(options):
    with open(options.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    if len(text) <= options.length:
        raise SystemExit(f"{options.text} has {len(text)} bytes; a sequence needs {options.length + 1}")
    generator = torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        first = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
        yield text[first + torch.arange(options.length)].to(options.device)


def train(model, options):
    """Losses, and tokens per second of the steps behind the first."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for batch in batches(options):
        # Weights and their gradients stay in float32; on a GPU the products are of bfloat16.
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        if len(losses) == 1:
            start = time.perf_counter()
    tokens = (len(losses) - 1) * options.batch * options.length
    return losses, tokens / (time.perf_counter() - start)


def draw(losses, path):
    import matplotlib

    matplotlib.use("Agg")  # a file needs no screen
    from matplotlib import pyplot

    _, axes = pyplot.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--")):
        axes.plot(range(1, len(values) + 1), values, style, label=name, linewidth=2)
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    pyplot.savefig(path)


def main():
    options = parse()
    if options.steps < 2:
        raise SystemExit(f"--steps is {options.steps}; it needs at least 2")
    losses = {}
    for name in ("as it is", "patched"):
        model = make_model(options)
        if name == "patched":
            coda_torch.patch(model)
        losses[name], speed = train(model, options)
        print(f"{name:9} loss {losses[name][0]:.4f} to {losses[name][-1]:.4f}, {speed:,.0f} tokens/s", flush=True)
    apart = max(abs(a - b) / a for a, b in zip(*losses.values()))
    draw(losses, options.picture)
    print(f"at most {apart:.1e} apart, relative; drawn in {options.picture}")


if __name__ == "__main__":
    main()
