#!/usr/bin/env python3
"""A text and a tokenizer.json to a file of token ids for `coda train`.

  pip install tokenizers
  examples/tokenize.py tokenizer.json text.txt ids.bin [--document-separator TOKEN]

ids.bin is headerless little-endian ids, u16 where the vocabulary fits, u32 where it does not. With --document-separator, a token
of the vocabulary such as '</s>', an empty line (or --split-at TEXT) ends a document and the token is written after each. The last
line printed is the `coda train` command for the file.
"""
import argparse
import array
import os
import shlex
import sys

BLOCK = 1 << 20  # characters of text encoded at once, about


def documents(file, split_at):
    """The text in parts, each one a document or, without split_at, some whole lines."""
    rest = ""
    while text := file.read(BLOCK):
        rest += text
        if split_at:
            *parts, rest = rest.split(split_at)
            yield from parts
        elif cut := rest.rfind("\n") + 1:
            # A tokenizer's words seldom cross a line's end: ids differ from the whole text's at a block's edge, if at all.
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="tokenizer.json")
    parser.add_argument("text", help="a UTF-8 text")
    parser.add_argument("out", help="the token file to write")
    parser.add_argument("--document-separator", metavar="TOKEN", help="the token that ends a document")
    parser.add_argument("--split-at", metavar="TEXT", default="\n\n", help="what stands between documents in the text [an empty line]")
    options = parser.parse_args()

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(options.tokenizer)
    # The largest id counts, not how many there are: added tokens may leave gaps.
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    separator = None
    if options.document_separator is not None:
        separator = tokenizer.token_to_id(options.document_separator)
        if separator is None:
            sys.exit(f"tokenize.py: the vocabulary has no token {options.document_separator!r}")
    kind, code = ("u16", "H") if vocabulary <= 1 << 16 else ("u32", "I")

    total = 0
    partial = options.out + ".partial"
    with open(options.text, encoding="utf-8", newline="") as text, open(partial, "wb") as out:
        for part in documents(text, options.split_at if separator is not None else None):
            # Special tokens would come at both ends of every part.
            ids = array.array(code, tokenizer.encode(part, add_special_tokens=False).ids)
            if separator is not None and ids:
                ids.append(separator)
            if sys.byteorder == "big":
                ids.byteswap()
            ids.tofile(out)
            total += len(ids)
    os.replace(partial, options.out)

    print(f"{total} tokens, vocabulary {vocabulary}: {options.out}")
    line = f"coda train --data {shlex.quote(options.out)} --token-type {kind} --vocab {vocabulary}"
    print(line + (f" --document-separator {separator}" if separator is not None else ""))


if __name__ == "__main__":
    main()
