#!/usr/bin/env python3
"""Golden token ids from the `tokenizers` package, for tests/coordinator/ctl/tokenizer_test.cc.

    python3 tests/coordinator/ctl/golden/make_tokenizers.py     # needs: pip install tokenizers

Trains two small tokenizers, one of GPT-2's kind (merges as text) and one of Llama 3's (merges as pairs,
ignore_merges, more special tokens), and writes them with the ids of every case below. The files are
committed; the test reads only them.
"""
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).resolve().parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")

CORPUS = [
    "In the beginning was the word, and the word was with the people; and they didn't know it.\n",
    "The quick brown fox jumps over the lazy dog. It's 1984, we're 42 and they'll pay $3.50!\n",
    "  Indented code: for (int i = 0; i < 10; ++i) { sum += values[i]; }\n\n\n",
    "Grüße aus Köln, naïve café, Ærøskøbing; здравствуй, мир; 你好，世界; こんにちは世界; 🙂👍🏽 emoji\n",
    "don't can't won't I'm you've he'd she'll THEY'RE IT'S\n",
    "tabs\tand\u00a0no-break\u2003spaces   and  more    spaces\r\nwindows line\r\n",
]

CASES = CORPUS + [
    "",
    " ",
    "\n",
    "   \n\n  \t x",
    "a",
    "hello world",
    " hello  world ",
    "12345678901234567890 1,234.5678 ½ ² ٣٤٥ Ⅷ",
    "'s 't 're 'S 'T 'RE it''s 'ſ x'ſ y",
    "e\u0301 combining, \u200b zero width, \ufeff bom, \u0085 nel \u2028 line \u180e vowel",
    "𝕳𝖊𝖑𝖑𝖔 \U0001F468\u200d\U0001F469\u200d\U0001F467 \U00020000",
    "text<|endoftext|>more <|endoftext|><|endoftext|> end",
    "<|begin_of_text|>hi<|end_of_text|>",
    "<|endoftext",
    "snake_case camelCase kebab-case a.b.c http://example.com/?q=1&r=2#frag",
    "x" * 300,
    "ab" * 200 + " " * 70 + "=" * 120,
    "the the the the the\nand\nand\n\nand",
    "!!!???...---((( ))) [[[]]] {}{} \\n \"quoted\" 'single'",
    "ñandú ÀÉÎ ß ſ İ ı ǅ",
]


def random_texts(count, seed):
    """Strings of pieces that are hard for pre-tokenizers, in any order."""
    rng = random.Random(seed)
    pieces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "a", "the", "The", "é", "中", "я", "1", "23", "4567",
              "'s", "'LL", "'", "\"", ".", ",", "!", "-", "_", "(", "🙂", "\u0301", "\u200d", "<|endoftext|>", "$", "٣", "Ⅷ"]
    return ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def train(pre_tokenizer, special, vocabulary, **model_options):
    tokenizer = Tokenizer(models.BPE(**model_options))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def write(name, tokenizer, change):
    data = json.loads(tokenizer.to_str())
    change(data)
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    tokenizer = Tokenizer.from_str(text)
    (HERE / f"{name}.tokenizer.json").write_text(text)
    lines = []
    for case in CASES + random_texts(120, 7):
        ids = tokenizer.encode(case, add_special_tokens=False).ids
        lines.append(json.dumps({"text": case, "ids": ids, "decoded": tokenizer.decode(ids)}, ensure_ascii=False))
    (HERE / f"{name}.cases.jsonl").write_text("\n".join(lines) + "\n")


def merges_as_text(data):
    data["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]


def llama3_style(data):
    data["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    data["model"]["ignore_merges"] = True
    # A token that no merge makes: only ignore_merges finds it. It takes the id of <|plain|>, which moves up by one.
    size = len(data["model"]["vocab"])
    data["model"]["vocab"]["Ġbrownie"] = size
    for token in data["added_tokens"]:
        if token["id"] == size:
            token["id"] = size + 1


def main():
    gpt2 = train(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"], 400)
    write("gpt2_style", gpt2, merges_as_text)
    spaced = train(pre_tokenizers.ByteLevel(add_prefix_space=True), ["<|endoftext|>"], 350)
    write("prefix_space", spaced, lambda data: None)
    sequence = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    llama3 = train(sequence, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], 420)
    llama3.add_tokens([AddedToken("<|plain|>", normalized=False)])
    CASES.append("a brownie, brownies and <|plain|> text<|eot_id|>")
    write("llama3_style", llama3, llama3_style)


if __name__ == "__main__":
    main()
