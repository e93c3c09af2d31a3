"""Draws the pictures of docs/benchmarks.md from what was measured in one run, and prints its tables.

  build/coda bench programs block --hidden 512 --ffn 1408 --json docs/benchmarks/512.json
  bench/training.py --coda build/coda --text FILE --json docs/benchmarks/training.json
  build/coda bench --device cuda --json docs/benchmarks/h200.json
  bench/training_gpu.py --coda build/coda --json docs/benchmarks/training-h200.json
  bench/huggingface.py --out docs/benchmarks/huggingface-h200.json
  docs/plot_benchmarks.py docs/benchmarks/512.json … docs/benchmarks/training.json …

A picture is written beside its figures: 512.json, 512.svg. Needs matplotlib.
"""
import json
import pathlib
import statistics
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {"coda": "#1f6f8b", "OpenBLAS": "#9aa5b1", "LIBXSMM": "#c9ced6", "torch.mm": "#b98ea7", "OpenBLAS and pass": "#e0a458",
          "OpenBLAS and passes": "#e0a458", "torch.compile": "#e0a458"}
plt.rcParams.update({"font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                     "svg.hashsalt": "coda", "figure.facecolor": "white", "legend.frameon": False})


def bars(axis, rows, names, value, labels):
    """Groups of bars, one per row; value(row, name) is None where there is nothing to compare with."""
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [j + (i - (len(names) - 1) / 2) * width for j, row in enumerate(rows) if value(row, name) is not None]
        heights = [value(row, name) for row in rows if value(row, name) is not None]
        axis.bar(at, heights, width * 0.92, label=name, color=COLORS[name])
    axis.set_xticks(range(len(rows)), labels)
    axis.axhline(1, color="#444444", linewidth=0.8)


def median(row, name):
    return row["times"][name]["median_s"] if name in row["times"] else None


def draw_programs(report, path):
    rows, shape, machine = report["programs"], report["shape"], report["machine"]
    figure, axes = plt.subplots(2 if report.get("blocks") else 1, 1, figsize=(11, 6.4 if report.get("blocks") else 3.6),
                                squeeze=False)
    axis = axes[0][0]

    def ratio(row, name, other):  # of each round, then their median
        ratios = sorted(a / b for a, b in zip(row["times"][name]["rounds_s"], row["times"][other]["rounds_s"]))
        return ratios[len(ratios) // 2]

    libraries = [name for name in ("OpenBLAS", "LIBXSMM", "torch.mm") if name in rows[0]["times"]]

    def relative(row, name):
        return max(ratio(row, name, plain) for plain in libraries) if name in row["times"] else None

    bars(axis, rows, ["coda", "OpenBLAS and pass", *libraries[1:]], relative,
         [f"{row['name'].split()[0]}\n{row['program']}\n{row['m']}, {row['n']},\n{row['k']}" for row in rows])
    axis.tick_params(axis="x", labelsize=6.5)
    axis.set_ylabel("time ÷ fastest plain product")
    axis.set_title(f"products with their programs, hidden {shape['hidden']}, ffn {shape['ffn']}, {shape['tokens']} tokens, "
                   f"{shape['dtype']}; {machine['cpu']}, {machine['threads']} threads, {machine['coda']}", fontsize=9, loc="left")
    axis.legend(ncol=4, fontsize=8)
    if report.get("blocks"):
        axis = axes[1][0]
        bars(axis, report["blocks"], ["coda", "OpenBLAS", "OpenBLAS and passes", *libraries[1:]],
             lambda row, name: row["ratio_to_coda"][name], [row["name"] for row in report["blocks"]])
        axis.set_ylabel("time ÷ coda's")
        axis.legend(ncol=5, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})

    print(f"\n{shape['tokens']} tokens, hidden {shape['hidden']}, ffn {shape['ffn']}, {shape['dtype']}; {machine['cpu']}, "
          f"{machine['threads']} threads, coda on {machine['coda']}, OpenBLAS' {machine['openblas']} kernels\n")
    columns = ["product", "program", "M, N, K", "coda, ms", *libraries, "OpenBLAS and a pass", "÷ fastest plain", "÷ passes"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        milliseconds = [f"{1e3 * median(row, name):.2f}" if name in row["times"] else ""
                        for name in ("coda", *libraries, "OpenBLAS and pass")]
        passes = f"{row['ratio_to_passes']:.2f}" if "ratio_to_passes" in row else ""
        print(f"| {row['name']} | `{row['program']}` | {row['m']}, {row['n']}, {row['k']} {row['form']} | "
              f"{' | '.join(milliseconds)} | {row['ratio_to_plain']:.2f} | {passes} |")
    for row in report.get("blocks", []):
        print(f"\n{row['name']}, ms (÷ coda): " + ", ".join(
            f"{name} {1e3 * time['median_s']:.1f} ({row['ratio_to_coda'][name]:.2f})" for name, time in row["times"].items()))


def draw_training(report, path):
    model, rates = report["model"], report["tokens_per_second"]
    figure, axis = plt.subplots(figsize=(5.2, 2.2))
    for i, (name, values) in enumerate(rates.items()):
        middle = statistics.median(values)
        axis.barh(i, middle, color=COLORS["coda" if name.startswith("coda") else name],
                  xerr=[[middle - min(values)], [max(values) - middle]], ecolor="#444444", height=0.6)
    axis.set_yticks(range(len(rates)), rates)
    axis.invert_yaxis()
    axis.set_xlabel("training, tokens/s")
    axis.set_title(f"hidden {model['hidden']}, {model['layers']} layers, {model['batch']} × {model['seq']} tokens, fp32, "
                   f"{model['threads']} threads", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"\n| hidden {model['hidden']}, {model['layers']} layers | tokens/s | memory that a step adds |\n| --- | --- | --- |")
    memory = report["bytes_of_step"]
    for name, values in rates.items():
        size = memory["coda" if name.startswith("coda") else name]
        print(f"| {name} | {statistics.median(values):.0f} (from {min(values):.0f} to {max(values):.0f}) | {size / 1e6:.0f} MB |")
    print(f"\nratio {report['ratio']:.2f}")


def bars_with_memory(axis, rows):
    """A bar of tokens/s for each row, its peak of memory beside it. rows: by name, and whether it is coda's."""
    for i, (_, is_coda, row) in enumerate(rows):
        axis.barh(i, row["tokens_per_s"], color=COLORS["coda" if is_coda else "torch.compile"], height=0.6)
        axis.text(row["tokens_per_s"], i, f" {row['peak_bytes'] / 1e9:.1f} GB", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.invert_yaxis()
    axis.set_xlabel("training, tokens/s")


def draw_gpu_training(report, path):
    rows = report["rows"]
    figure, axis = plt.subplots(figsize=(5.6, 1.8))
    bars_with_memory(axis, [(name, name == "coda", row) for name, row in rows.items()])
    axis.set_title(f"{report['model']}, {report['batch']} × {report['seq']} tokens; {report['gpu']}, torch {report['torch']}",
                   fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"\n| {report['model']}, {report['batch']} × {report['seq']} tokens | tokens/s | ms a step | peak memory |\n"
          "| --- | --- | --- | --- |")
    for name, row in rows.items():
        print(f"| {name} | {row['tokens_per_s']:.0f} | {1e3 * min(row['seconds']):.1f} to {1e3 * max(row['seconds']):.1f} | "
              f"{row['peak_bytes'] / 1e9:.1f} GB |")


def draw_huggingface(rows, path):
    """Rows of bench/huggingface.py, of models of several depths, each measured in one run."""
    names = {"coda": "patched by coda", "coda_compile": "patched by coda, torch.compile", "liger": "patched by Liger",
             "torch_compile": "torch.compile", "torch_compile_layers": "torch.compile, by layer"}
    depths = sorted({row["layers"] for row in rows}, reverse=True)
    figure, axes = plt.subplots(1, len(depths), figsize=(5.2 * len(depths), 2.2), squeeze=False)
    print("\n| layers | model | tokens/s | ms a step | peak memory |\n| --- | --- | --- | --- | --- |")
    for axis, layers in zip(axes[0], depths):
        shown = sorted((row for row in rows if row["layers"] == layers), key=lambda row: row["ms"][0])
        bars_with_memory(axis, [(names[row["variant"]], row["variant"].startswith("coda"), row) for row in shown])
        for row in shown:
            middle, least, most = row["ms"]
            print(f"| {layers} | {names[row['variant']]} | {row['tokens_per_s']} | {middle:.1f} ({least:.1f} to {most:.1f}) | "
                  f"{row['peak_bytes'] / 1e9:.1f} GB |")
        axis.margins(x=0.15)
        axis.xaxis.set_major_locator(plt.MaxNLocator(4))
        axis.set_title(f"{layers} layers, {shown[0]['tokens']} tokens; {shown[0]['card']}", fontsize=9, loc="left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_beside_torch(report, path):
    """The fastest of torch's spellings over coda, and over cuBLAS' products alone: what fusion alone could reach."""
    cases = {}
    for row in report["beside_torch"]:
        cases.setdefault((row["case"], row["d"]), {}).setdefault(row["regime"], {})[row["impl"]] = row["ms"]
    figure, axis = plt.subplots(figsize=(11, 3.4))
    print("\n| case | d | coda, ms | torch | cuBLAS' products alone | torch ÷ coda | cool |\n| --- | --- | --- | --- | --- | --- | --- |")
    for i, ((case, d), regimes) in enumerate(cases.items()):
        best = {regime: min(ms for name, ms in times.items() if name.startswith("torch")) for regime, times in regimes.items()}
        sustained, cool = regimes["sustained"], regimes["cool"]
        for at, value, color, label in (
                (i - 0.28, best["sustained"] / sustained["coda"], COLORS["coda"], "÷ coda, sustained"),
                (i, best["cool"] / cool["coda"], COLORS["OpenBLAS and pass"], "÷ coda, cool"),
                (i + 0.28, best["sustained"] / sustained["cublas_gemms"], COLORS["OpenBLAS"], "÷ cuBLAS' products alone, sustained")):
            axis.bar(at, value, 0.26, color=color, label=label if i == 0 else None)
        print(f"| {case} | {d} | {sustained['coda']:.3f} | {best['sustained']:.3f} | {sustained['cublas_gemms']:.3f} | "
              f"{best['sustained'] / sustained['coda']:.2f} | {best['cool'] / cool['coda']:.2f} |")
    axis.set_xticks(range(len(cases)), [f"{case}\n{d}" for case, d in cases], fontsize=5.5)
    axis.axhline(1, color="#444444", linewidth=0.8)
    axis.set_ylim(0.8, 1.5)
    axis.set_ylabel("torch.compile's time ÷")
    axis.set_title(f"{report['gpu']}, torch {report['torch']}", fontsize=9, loc="left")
    axis.legend(ncol=3, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_gpu(report, path):
    """Time over cuBLAS' default, per program: a bar is the geometric mean over its shapes and sizes, a dot one shape."""
    machine, options, means = report["machine"], report["options"], report["means"]
    figure, axis = plt.subplots(figsize=(11, 4))
    width = 0.4
    for i, (regime, color) in enumerate((("sustained", COLORS["coda"]), ("cool", COLORS["OpenBLAS and pass"]))):
        at = [j + (i - 0.5) * width for j in range(len(means))]
        axis.bar(at, [mean[regime] for mean in means], width * 0.92, color=color, label=regime)
        for x, mean in zip(at, means):
            axis.plot([x - width / 2, x + width / 2], [mean[f"{regime}_bar"]] * 2, color="#444444", linewidth=1)
            of_row = [r[regime]["ratio_to_cublas"] for r in report["results"] if r["row"] == mean["row"] and regime in r]
            axis.plot([x] * len(of_row), of_row, ".", color="#222222", markersize=3)
    axis.set_xticks(range(len(means)), [mean["row"].replace("-", "\n", 1) for mean in means], fontsize=7)
    axis.axhline(1, color="#444444", linewidth=0.8)
    axis.set_ylim(0.8, 1.3)
    axis.set_ylabel("time ÷ cuBLAS' plain product")
    axis.set_title(f"{machine['gpu']}, cuBLAS {machine['cublas']}, {options['tokens']} tokens, hidden "
                   f"{', '.join(map(str, options['hidden']))}; lines: what is aimed at", fontsize=9, loc="left")
    axis.legend(ncol=2, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"\n{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, cuBLAS {machine['cublas']}; {options['tokens']} tokens, "
          f"hidden {', '.join(map(str, options['hidden']))}, {options['rounds']} rounds\n")
    print("| program | shapes | sustained (aim) | worst shape | ÷ best of cublasLt | cool (aim) |\n| --- | --- | --- | --- | --- | --- |")
    for mean in means:
        print(f"| {mean['row']} | {mean['cases']} | {mean['sustained']:.3f} ({mean['sustained_bar']:.2f}) | {mean['worst_sustained']:.3f} | "
              f"{mean['sustained_to_best']:.3f} | {mean['cool']:.3f} ({mean['cool_bar']:.2f}) |")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        path = pathlib.Path(argument)
        report = json.loads(path.read_text())
        if isinstance(report, list):
            draw = draw_huggingface
        elif "tokens_per_second" in report:
            draw = draw_training
        elif "rows" in report:
            draw = draw_gpu_training
        elif "beside_torch" in report:
            draw = draw_beside_torch
        else:
            draw = draw_gpu if "gpu" in report["machine"] else draw_programs
        draw(report, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
