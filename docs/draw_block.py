"""Draws docs/block.svg: a Llama layer as products with programs in their epilogues.  python3 docs/draw_block.py > docs/block.svg"""

FORWARD = [
    ("F4", "h W̃qkvᵀ", "RmsNormRope", "q, k = rotate(r ⊙ acc);  v = r ⊙ acc", "qkv"),
    (None, "attention", "", "causal, blocked online softmax", "a, lse"),
    ("F1", "a Woᵀ", "Residual", "h′ = acc + h;  Σ h′²", "h′ → r′"),
    ("F2", "h′ W̃guᵀ", "RmsNormSwiGlu", "z = r′ ⊙ acc;  y = silu(gate) · up", "z, y"),
    ("F3", "y Wdᵀ", "Residual", "h″ = acc + h′;  Σ h″²", "h″ → r″"),
]
BACKWARD = [
    ("B4", "dqkv′ W̃qkv", "RmsNormBackward", "dh = acc − r²·s·h + dh′", "dh"),
    (None, "its backward", "RopeBackward", "rotate⁻¹, ⊙ r;  Σ dy·y → s", "dqkv′"),
    ("B1", "dh′ Wo", "Store", "da = acc", "da"),
    ("B2", "dz′ W̃gu", "RmsNormBackward", "dh′ = acc − r′²·s·h′ + dh″", "dh′"),
    ("B3", "dh″ Wd", "SwiGluBackward", "dz = vjp(swiglu, z, acc);  Σ dz·z → s;  y again", "dz′, y"),
]
ROW, TOP, PRODUCT, PROGRAM = 74, 74, 150, 300


def text(x, y, content, size=13, weight="normal", fill="#222", anchor="start"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
            f'text-anchor="{anchor}">{content}</text>')


def column(x, title, rows, down):
    out = [text(x + (PRODUCT + PROGRAM) / 2, 46, title, 16, "bold", anchor="middle")]
    for i, (name, product, program, formula, stores) in enumerate(rows):
        y = TOP + i * ROW
        fused = name is not None
        out.append(f'<rect x="{x}" y="{y}" width="{PRODUCT}" height="46" rx="5" fill="{"#dbe9f6" if fused else "#eee"}" stroke="#888"/>')
        out.append(text(x + 10, y + 19, product, 14, "bold"))
        out.append(text(x + 10, y + 37, f"{name}: product" if fused else "a kernel of its own", 11, fill="#666"))
        out.append(f'<rect x="{x + PRODUCT}" y="{y}" width="{PROGRAM}" height="46" rx="5" fill="#fdf1d7" stroke="#888"/>')
        out.append(text(x + PRODUCT + 10, y + 19, program, 13, "bold", "#7a4b00"))
        out.append(text(x + PRODUCT + 10, y + 37, formula, 12))
        out.append(text(x + PRODUCT + PROGRAM + 8, y + 28, stores, 12, fill="#2c6e49"))
        if i + 1 < len(rows):
            start, end = (y + 46, y + ROW) if down else (y + ROW, y + 46)
            out.append(f'<line x1="{x + 75}" y1="{start}" x2="{x + 75}" y2="{end}" stroke="#555" stroke-width="1.5" marker-end="url(#arrow)"/>')
    return out


def main():
    height = TOP + len(FORWARD) * ROW + 34
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1130 {height}" font-family="DejaVu Sans, Arial, sans-serif">',
           '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
           '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
           f'<rect width="1130" height="{height}" fill="white"/>',
           text(20, 22, "A Llama layer: every box on the left is a product, the box beside it the program in its epilogue, "
                "green is what reaches memory", 13, fill="#444")]
    out += column(20, "forward (down)", FORWARD, True) + column(580, "backward (up)", BACKWARD, False)
    out.append(text(20, height - 14, "r = rsqrt(mean h² + eps) is applied one product late; W̃ = W ⊙ gamma; dz′ = r′ ⊙ dz; "
                    "weight gradients dh″ᵀy, dz′ᵀh′, dh′ᵀa, dqkv′ᵀh are plain products", 12, fill="#444"))
    print("\n".join(out + ["</svg>"]))


main()
