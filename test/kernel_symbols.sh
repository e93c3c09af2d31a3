#!/usr/bin/env bash
# kernel_symbols.sh NM ISA OBJECT…: fails if an object compiled for ISA defines a function that the linker may choose in place of
# another object's copy, unless the function's name says ISA. Such a copy would run on machines that lack the instructions.
#
# Of nm's letters W is a weak function. V and u are data (vtables, typeinfo, guards, constants of templates) and let through:
# they hold no instructions, and their contents are the same whichever copy is kept.
set -euo pipefail
nm=$1 isa=$2
shift 2

leaks=$("$nm" -C --defined-only "$@" | sed -nE 's/^[0-9a-f]+ W (.*)$/  \1/p' | { grep -vi -- "$isa" || true; } | LC_ALL=C sort -u)
if [[ -n $leaks ]]; then
  printf 'compiled for %s, and yet open to every caller (put it in the namespace of its instruction set, or inline it):\n%s\n' \
    "$isa" "$leaks"
  exit 1
fi
