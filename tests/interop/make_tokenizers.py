#!/usr/bin/env python3
"""Trains the small tokenizers of tests/data/tokenizers with Hugging Face's tokenizers library, in the styles of known
models, and writes the ids and texts it gives for a corpus of its own.

    pip install tokenizers
    python tests/interop/make_tokenizers.py [OUT]        # default: tests/data/tokenizers
"""
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# What the tokenizers are trained on: enough to learn words, code and some other scripts.
TRAINING = """
The quick brown fox jumps over the lazy dog. The dog doesn't care; it's asleep, and they're all happy with that!
def forward(self, x):\n    y = self.norm(x)\n    return x + self.mlp(y)\n\nfor (int i = 0; i < n; ++i) { sum += a[i]; }
Überraschung für schöne Mädchen, déjà vu à l'école, el niño y la señora, Привет мир, как дела, 你好世界, こんにちは世界
In 2023 there were 1234567 people, 3.14159 of pi, and 100 percent of the rest. ABC abc Abc. www.example.com/path?x=1
""" * 4

CORPUS = [
    "", " ", "  ", "a", " a", "a ", "Hello, world!", "The quick brown fox jumps over the lazy dog.",
    "It's they're I'LL we'Ve don'T 'S 'ſ", "1 12 123 1234 12345 3.14159 ٣٤٥ ½ ² Ⅷ", "line\nline\r\n\r\n  indented\n\n\n",
    "\t\ttabs\t and   spaces   ", "   leading", "trailing   ", " \n \n ", "\n", "\r", "\u00a0nbsp\u2003em\u3000wide\u1680",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}  # comment\n", "if (a<b&&c>=d) { x->y = ~z; } // ok\n\n\n\n",
    "Überraschung déjà vu ÀÉÎ", "e\u0301 a\u030a o\u0308\u0304 \u1e69 s\u0323\u0307 \uac00 \u1100\u1161 \ufb01 \u212b",
    "Привет, мир! Как дела?", "你好，世界！今天天气很好。", "こんにちは世界、カタカナ", "안녕하세요 세계", "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลก", "🙂👍🏽👨‍👩‍👧‍👦🇩🇪 emoji 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "\U0001f9d1\u200d\U0001f680 zwj \u200b zwsp \ufeff bom",
    "\u0000 nul \u0001\u001f\u007f\u0080\u009f controls", "\ufffd replacement \ufffe \uffff", "\u180e mongolian \u0085 nel",
    "a" * 500, " " * 300, "\n" * 200, "ab" * 300, "1" * 200, "é" * 150, "🙂" * 100, "!?" * 100, "word " * 200,
    "<s>", "</s>", "<s> a </s> b", "<|begin|>x<|end|>", "a<|end|> b", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>",
    "x <mask> y", "x   <mask>   y<mask>", "foo_tool tool tools tool, (tool)", "toolé étool tool", "<unk>", "<0x41>", "▁a ▁▁b", "Ġa Ċ",
    "[INST] Hi [/INST] Hello</s>", "ÅB Å", "mixed\u00e9e\u0301<|end|>\u00e9e\u0301", "http://www.example.com/path?x=1&y=%20#z",
    "x=1;y=2;z=x+y;\tprint(z)\n", "ﬁ ﬂ ½ ℌ ① ㌀", "\u0344\u0958\u2126 \U0001d15e",
]


def finish(tokenizer, out, bos=None, eos=None):
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {name: token for name, token in (("bos_token", bos), ("eos_token", eos)) if token}
    (out / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


def byte_level(pattern, special, size=700, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pattern:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator([TRAINING], trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


def make_llama3(out):
    tokenizer = byte_level(LLAMA3, ["<|begin|>", "<|end|>"], ignore_merges=True)
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)])])
    finish(tokenizer, out, "<|begin|>", "<|end|>")


def make_qwen(out):
    tokenizer = byte_level(QWEN, ["<|im_start|>", "<|im_end|>", "<|end|>"], normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("tool", single_word=True, normalized=True), AddedToken("Å", normalized=True),
                          AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    finish(tokenizer, out, None, "<|im_end|>")


def make_gpt2(out):
    tokenizer = byte_level(None, ["<|end|>"])
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    finish(tokenizer, out, "<|end|>", "<|end|>")


def sentence_piece(out, new_form, size=900):
    """Characters with byte fallback, as SentencePiece models are converted."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # Trained with word boundaries, then used without a pre-tokenizer as the converted files are.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=120,
                                  special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)])
    tokenizer.train_from_iterator([TRAINING], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # the byte tokens are ordinary ones
    tokenizer = Tokenizer.from_str(json.dumps(data))
    if new_form:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.add_special_tokens(["[INST]", "[/INST]"])
    else:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", 1)])
    finish(tokenizer, out, "<s>", "</s>")


def make_unknown(out):
    """No byte fallback: unknown characters, not fused; pieces by Metaspace in its old form, with its decoder."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, limit_alphabet=60, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator([TRAINING], trainer)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    out.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    finish(Tokenizer.from_str(json.dumps(data)), out, None, "</s>")
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))


STYLES = {
    "llama3": make_llama3,
    "qwen": make_qwen,
    "gpt2": make_gpt2,
    "llama2": lambda out: sentence_piece(out, new_form=False),
    "mistral": lambda out: sentence_piece(out, new_form=True),
    "unknown": make_unknown,
}


def expected(directory):
    """One JSON object a line: a text, its ids, and what they decode to; then decodings of random ids."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    lines = []
    for text in CORPUS:
        ids = tokenizer.encode(text).ids
        lines.append({"text": text, "ids": ids, "plain_ids": tokenizer.encode(text, add_special_tokens=False).ids,
                      "decoded": tokenizer.decode(ids), "decoded_with_special": tokenizer.decode(ids, False)})
    rng = random.Random(1)
    for _ in range(40):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 12))]
        lines.append({"ids": ids, "decoded": tokenizer.decode(ids), "decoded_with_special": tokenizer.decode(ids, False)})
    text = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)
    (directory / "expected.jsonl").write_text(text)


def main():
    default = pathlib.Path(__file__).parent.parent / "data" / "tokenizers"
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for name, make in STYLES.items():
        make(out / name)
        expected(out / name)
        size = (out / name / "tokenizer.json").stat().st_size
        print(f"{name}: {size} bytes, {sum(1 for _ in open(out / name / 'expected.jsonl'))} cases")


if __name__ == "__main__":
    main()
