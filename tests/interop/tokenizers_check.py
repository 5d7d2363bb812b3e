#!/usr/bin/env python3
"""Compares rowan's tokenizers with Hugging Face's tokenizers library on random texts and tokens.

    pip install tokenizers
    python tests/interop/tokenizers_check.py build/bin/rowan-tests [--count 2000] [--seed 0] [DIRECTORY...]

Every DIRECTORY holds a tokenizer.json; the default is those of tests/data/tokenizers. What the library gives goes to a
temporary copy of each, which a hidden test case of rowan-tests reads.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unicodedata

sys.path = [entry for entry in sys.path if entry != str(pathlib.Path(__file__).parent)]  # this file is no such module
from tokenizers import Tokenizer  # noqa: E402

WORDS = ("the The dog's don't THEY'LL forward self def return for int x+1 -> :: # // \"q\" 'q' 12 2023 1234567 3.14 www "
         "http://a.b/c?d=e déjà Überraschung Привет 你好 世界 こんにちは नमस्ते 안녕 🙂 👍🏽 🇩🇪 e\u0301 \ufb01 ½ ٣ ſ İ ß").split()
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "    ", "\u0085", "\u180e", ""]


def character(rng):
    while True:
        limit = rng.choice([0x80, 0x80, 0x250, 0x3000, 0x10000, 0x20000, 0x110000])
        code = rng.randrange(limit)
        # Unassigned characters mean different things to different versions of Unicode.
        if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) != "Cn":
            return chr(code)


def text(rng, tokens):
    parts = []
    for _ in range(rng.randrange(1, 40)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(WORDS))
        elif kind < 0.55:
            parts.append("".join(character(rng) for _ in range(rng.randrange(1, 6))))
        elif kind < 0.65:
            parts.append(rng.choice(tokens))
        elif kind < 0.7:
            parts.append(rng.choice("a \n1!.é") * rng.randrange(1, 80))
        else:
            parts.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 8))))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def cases(tokenizer, count, seed):
    rng = random.Random(seed)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()] or ["<s>"]
    for _ in range(count):
        sample = text(rng, added)
        ids = tokenizer.encode(sample).ids
        yield {"text": sample, "ids": ids, "plain_ids": tokenizer.encode(sample, add_special_tokens=False).ids,
               "decoded": tokenizer.decode(ids), "decoded_with_special": tokenizer.decode(ids, False)}
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 12))]
        yield {"ids": ids, "decoded": tokenizer.decode(ids), "decoded_with_special": tokenizer.decode(ids, False)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="rowan-tests")
    parser.add_argument("directories", nargs="*", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=2000, help="texts for each tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = pathlib.Path(__file__).parent.parent / "data" / "tokenizers"
    directories = options.directories or sorted(path.parent for path in data.glob("*/tokenizer.json"))
    with tempfile.TemporaryDirectory() as scratch:
        copies = []
        for i, directory in enumerate(directories):
            copy = pathlib.Path(scratch) / f"{i}-{directory.name}"
            copy.mkdir()
            shutil.copy(directory / "tokenizer.json", copy)
            tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
            tokenizer.no_truncation()
            with open(copy / "expected.jsonl", "w") as out:
                for case in cases(tokenizer, options.count, options.seed):
                    out.write(json.dumps(case) + "\n")
            copies.append(str(copy))
        environment = dict(os.environ, ROWAN_TOKENIZERS=":".join(copies))
        status = subprocess.run([options.program, "[.interop]"], env=environment).returncode
    print(f"{len(directories)} tokenizers, {options.count} texts each: {'equal' if status == 0 else 'DIFFERENT'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
