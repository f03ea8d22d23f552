#!/usr/bin/env python3
"""Writes small tokenizers, and what the package tokenizers makes of ten thousand strings with them.

    python3 -m venv VENV && VENV/bin/pip install tokenizers sentencepiece
    VENV/bin/python tests/data/make_text.py                  # everything in text/, and the tokenizer of tiny-llama
    VENV/bin/python tests/data/make_text.py show NAME FIRST  # the hundred strings from FIRST on, their ids and texts

    text/NAME/tokenizer.json  byte pair encoding, a folder for each pattern or way to treat spaces
    text/NAME/tokenizer.model models of sentencepiece, by merges and by unigrams
    text/strings.json         what strings are made of: blocks of characters of all scripts, and fragments
    text/expected.json        for each tokenizer digests of ids and texts, of a hundred strings each

String i is made by strings() here, and by string_make in tests/text/strings.c.
"""
import json
import re
import sys
from collections import Counter, namedtuple
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
STRINGS, GROUP = 10000, 100
MASK = (1 << 64) - 1
VOCABULARY = 700
Encoded = namedtuple("Encoded", "ids")

TEXT = """Hello, world! A model reads tokens, and it writes tokens; what is between them is attention. The quick brown fox jumps
over the lazy dog, and the dog says hello to the world. Each rank has a part of the context, and all of them share the work.
You are a helpful assistant. What is the capital of France? The capital of France is Paris. Tell me a story about the sea.
Gr\u00fc\u00dfe aus K\u00f6ln: das Haus ist gro\u00df, und der Hund schl\u00e4ft. O\u00f9 est la gare? C'est l\u00e0-bas, \u00e0 c\u00f4t\u00e9 de l'h\u00f4tel. \u4f60\u597d\uff0c\u4e16\u754c
for (int i = 0; i < count; i++) { sum += values[i]; }  return sum;  # 2024, 1999 and 3.14159
"""

# ---- Strings ----

# First and last code points of scripts and signs, old ones and such that no version of Unicode has assigned.
BLOCKS = [
    (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x700, 0x7BF), (0x900, 0x97F), (0x980, 0xA7F), (0xA80, 0xBFF),
    (0xC00, 0xDFF), (0xE00, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF),
    (0x1200, 0x137F), (0x13A0, 0x13FF), (0x1400, 0x167F), (0x1780, 0x17FF), (0x1800, 0x18AF), (0x1E00, 0x1FFF),
    (0x2000, 0x206F), (0x2070, 0x20CF), (0x2100, 0x218F), (0x2190, 0x23FF), (0x2460, 0x27BF), (0x2800, 0x28FF),
    (0x3000, 0x303F), (0x3040, 0x30FF), (0x3100, 0x318F), (0x3200, 0x33FF), (0x4E00, 0x9FEF), (0xA000, 0xA48F),
    (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFAD9), (0xFB00, 0xFDFF), (0xFE00, 0xFEFF), (0xFF00, 0xFFEF),
    (0x10300, 0x1034F), (0x12000, 0x123FF), (0x13000, 0x1342E), (0x1D100, 0x1D7FF), (0x1F000, 0x1F2FF),
    (0x1F300, 0x1F64F), (0x1F680, 0x1F9FF), (0x20000, 0x2A6D6), (0xE0020, 0xE007F),
    (0x8A0, 0x8FF), (0x1AB0, 0x1AFF), (0x10570, 0x107BF), (0x11380, 0x113FF), (0x11F00, 0x11F5F), (0x16100, 0x1613F),
    (0x1CC00, 0x1CCFF), (0x1E030, 0x1E08F), (0x31340, 0x3145F),
]

FRAGMENTS = [
    "'s", "'S", "'\u017f", "'LL", "don't", "I'Ve", "''re", " 're", "\u2019s", "\n", "\n\n", " \n", "\r\n", "\t", "\r", "\x0b\x0c",
    "  \n  x", "\u00a0", "\u3000", "\u180e", "\u200b", "\u200d", "\ufeff", "\u0085", "\u2028", "\0", "\x7f", "\x1b[0m",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "1\ufe0f\u20e3",
    "e\u0301", "\u00e9", "a\u0323\u0302", "a\u0302\u0323", "\u1100\u1161\u11a8", "\u212b", "\ufb01", "\u0130", "\u00df", "\ufffd", "\U0010ffff",
    "1234567", "3.14159", "\u0663\u0664\u0665\u0666", "\u216b\u00bd\u00b2", "12,345.67e-8", "\u4e2d\u6587\u5b57\u7b26", "\u65e5\u672c\u8a9e\u306e\u6587",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e2\u05d1\u05e8\u05d9\u05ea", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "for (int i = 0; i < n; i++) {\n    sum += a[i];\n}\n", "def f(x):\n\treturn x**2  # square\n", "https://example.org/a?b=c&d=%20e",
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<mask>", "<0x41>", "<tool>", "name_1", "\u2581", "\u2581\u2581a", "...", "---", "!?",
    "The quick brown fox", " jumps over", " the lazy dog", "HELLO World", "camelCaseName", "snake_case_name", "\u0120", "Gr\u00f6\u00dfe", "na\u00efve",
]


def mix64(x):
    """The finaliser of splitmix64, as base/hash.h has it."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Random:
    def __init__(self, seed):
        self.at = mix64(seed)

    def below(self, n):
        self.at = (self.at + 0x9E3779B97F4A7C15) & MASK
        return mix64(self.at) % n


def string(parts, index):
    random, out = Random(index), []
    for _ in range(1 + random.below(8)):
        kind = random.below(8)
        if kind < 2:
            out.append(parts["fragments"][random.below(len(parts["fragments"]))])
        elif kind == 2:
            out.append(" " * (1 + random.below(5)))
        elif kind == 3:
            out.append("".join(chr(97 + random.below(26)) for _ in range(1 + random.below(9))))
        else:
            block = parts["blocks"][random.below(len(parts["blocks"]))]
            for _ in range(1 + random.below(7)):
                out.append(chr(block[0] + random.below(block[1] - block[0] + 1)))
    return "".join(out)


# ---- Tokenizers ----

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = WORDS % "{1,3}", WORDS % ""
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(add_prefix_space=False, use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def template(before, after, ids):
    special = [(token, ids[token]) for token in dict.fromkeys([*before, *after])]
    return processors.TemplateProcessing(single=" ".join([*before, "$A", *after]), special_tokens=special)


def train(tokenizer, texts, special, size=VOCABULARY, alphabet=True, **more):
    if alphabet:
        more["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, **more)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def gpt2(texts):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = byte_level(add_prefix_space=True, use_regex=True), decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return train(t, texts, ["<|endoftext|>"])


def llama3(texts):
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), decoders.ByteLevel()
    train(t, texts, ["<s>", "</s>"])
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(["<s>"], [], {"<s>": 0})])
    return t


def qwen2(texts):
    t = Tokenizer(models.BPE())
    t.normalizer, t.decoder = normalizers.NFC(), decoders.ByteLevel()
    t.pre_tokenizer = pre_tokenizers.Sequence([split(QWEN2), byte_level()])
    train(t, texts, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # Tokens that are no special ones; one is looked for in the normal form.
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("na\u0069\u0308ve", normalized=True)])
    return t


def gpt4o(texts):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.Sequence([split(GPT4O, "removed", True), byte_level()]), decoders.ByteLevel()
    train(t, texts, ["<|endoftext|>"])
    # Tokens that take white space in, and one that stands alone.
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False), AddedToken("</s>", rstrip=True, normalized=False)])
    t.add_tokens([AddedToken("fox", single_word=True), AddedToken("...", lstrip=True, rstrip=True)])
    t.post_processor = template(["<|endoftext|>"], ["</s>"], {"<|endoftext|>": 0, "</s>": t.token_to_id("</s>")})
    return t


def deepseek(texts):
    t = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(DEEPSEEK)]
    t.pre_tokenizer, t.decoder = pre_tokenizers.Sequence([*steps, byte_level()]), decoders.ByteLevel()
    return train(t, texts, ["<s>"])


def characters(t, texts):
    """Of characters, with bytes to fall back to."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    counts = Counter(c for text in texts for c in text if c not in " \u2581\0")  # keys with U+0000 are refused
    alphabet = ["\u2581", *sorted(counts, key=lambda c: (-counts[c], c))[:150]]
    train(t, texts, ["<unk>", "<s>", "</s>", *bytes_], alphabet=False, limit_alphabet=len(alphabet), initial_alphabet=alphabet)
    file = json.loads(t.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(file))


def llama2(texts):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="always", split=True)  # to train with
    t = characters(t, texts)
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.pre_tokenizer = None
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.post_processor = template(["<s>"], [], {"<s>": 1})
    return t


def metaspace(texts):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False, byte_fallback=False))
    t.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=True)
    t = characters(t, texts)
    t.decoder = decoders.Metaspace("\u2581", prepend_scheme="first", split=True)
    return t


def gemma(texts):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never", split=True)
    t = characters(t, texts)
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return t


def across(texts):
    """Without words: tokens reach over spaces."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    train(t, TEXT.split("\n") * 20, ["<unk>"], alphabet=False)
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return t


TOKENIZERS = [gpt2, llama3, qwen2, gpt4o, deepseek, llama2, metaspace, gemma, across]


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


# ---- Models of sentencepiece ----

class Pieces:
    """A model, with the special tokens that a text spells out and the id of its beginning, as transformers uses one."""

    def __init__(self, path):
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def encode(self, text):
        ids = [self.model.bos_id()]
        for part in re.split("(<s>|</s>|<unk>)", text):
            special = part in ("<s>", "</s>", "<unk>")
            ids += [self.model.piece_to_id(part)] if special else self.model.encode(part)
        return Encoded(ids)

    def get_vocab_size(self):
        return self.model.get_piece_size()

    def decode(self, ids, skip_special_tokens):
        return self.model.decode([id for id in ids if id > 2])


def write_pieces(name, texts):
    folder = HERE / "text" / name
    folder.mkdir(exist_ok=True)
    more = {"remove_extra_whitespaces": False, "model_type": "bpe"} if name == "pieces_bpe" else {"model_type": "unigram"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.split("\n") if "\0" not in line),
        model_prefix=str(folder / "tokenizer"), vocab_size=380,
        byte_fallback=True, normalization_rule_name="identity", character_coverage=0.98, num_threads=1, minloglevel=2,
        unk_id=0, bos_id=1, eos_id=2, **more)
    (folder / "tokenizer.vocab").unlink()
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {"add_bos_token": True, "added_tokens_decoder": {str(id): {"content": content, **token}
                                                              for id, content in enumerate(("<unk>", "<s>", "</s>"))}}
    write(folder / "tokenizer_config.json", config)
    return Pieces(folder / "tokenizer.model")


# ---- The tokenizer of tiny-llama ----

SPECIAL = {0: "<|finetune_right_pad_id|>", 1: "<|begin_of_text|>", 2: "<|start_header_id|>", 3: "<|end_header_id|>",
           126: "<|eot_id|>", 127: "<|end_of_text|>"}


def tiny_llama(texts, size=320):
    """As of Llama 3: all bytes and some merges, with the special tokens where the model's config has them."""
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Sequence([split(LLAMA3), byte_level()]), decoders.ByteLevel()
    train(t, texts, [], size - len(SPECIAL))
    file = json.loads(t.to_str())
    tokens = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    free = [id for id in range(size) if id not in SPECIAL]
    ids = {**SPECIAL, **dict(zip(free, tokens, strict=True))}
    file["model"]["vocab"] = {ids[id]: id for id in range(size)}
    t = Tokenizer.from_str(json.dumps(file))
    t.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL.values()])
    begin = SPECIAL[1]
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template([begin], [], {begin: 1})])
    return t


# ---- What is expected ----

def hash_bytes(hash, data):
    """FNV-1a, as base/hash.h has it."""
    for byte in data:
        hash = ((hash ^ byte) * 0x100000001B3) & MASK
    return hash


def results(tokenizer, text):
    ids = tokenizer.encode(text).ids
    return ids, tokenizer.decode(ids, skip_special_tokens=False)


def digest(tokenizer, texts, first):
    """Of ids, 32 bits each, the low byte first, and of the text that they stand for; then of the text of ids at random."""
    hash = 0xCBF29CE484222325
    for text in texts:
        ids, back = results(tokenizer, text)
        hash = hash_bytes(hash, b"".join(id.to_bytes(4, "little") for id in ids))
        hash = hash_bytes(hash, back.encode())
    random, special = Random(first), 3 if isinstance(tokenizer, Pieces) else 0
    ids = [special + random.below(tokenizer.get_vocab_size() - special) for _ in range(GROUP)]
    hash = hash_bytes(hash, tokenizer.decode(ids, skip_special_tokens=False).encode())
    return f"{hash:016x}"


def write_all():
    parts = {"blocks": BLOCKS, "fragments": FRAGMENTS}
    (HERE / "text").mkdir(exist_ok=True)
    write(HERE / "text" / "strings.json", parts)
    texts = [string(parts, i) for i in range(STRINGS)]
    training = [TEXT] * 20 + [string(parts, i) for i in range(STRINGS, STRINGS + 2000)]
    expected = {}
    for make in TOKENIZERS:
        name = make.__name__
        tokenizer = make(training)
        path = HERE / "text" / name / "tokenizer.json"
        file = json.loads(tokenizer.to_str())
        if name in ("gpt2", "llama2"):  # as files of before 2024 have them; lists since
            file["model"]["merges"] = [" ".join(merge) for merge in file["model"]["merges"]]
        write(path, file)
        tokenizer = Tokenizer.from_file(str(path))
        expected[name] = [digest(tokenizer, texts[first:first + GROUP], first) for first in range(0, STRINGS, GROUP)]
        exact = sum(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
                    for text in texts)
        print(f"{name}: {tokenizer.get_vocab_size()} tokens, {exact} of {STRINGS} strings come back as they were")
    for name in ("pieces_bpe", "pieces_unigram"):
        pieces = write_pieces(name, [TEXT] * 20)
        expected[name] = [digest(pieces, texts[first:first + GROUP], first) for first in range(0, STRINGS, GROUP)]
    lines = ",\n".join(f' "{name}": {json.dumps(digests)}' for name, digests in expected.items())
    (HERE / "text" / "expected.json").write_text("{\n" + lines + "\n}\n")
    write(HERE / "tiny-llama" / "tokenizer.json", json.loads(tiny_llama([TEXT]).to_str()))


def show(name, first):
    parts = json.loads((HERE / "text" / "strings.json").read_text())
    folder = HERE / "text" / name
    model = folder / "tokenizer.model"
    tokenizer = Pieces(model) if model.exists() else Tokenizer.from_file(str(folder / "tokenizer.json"))
    for i in range(first, first + GROUP):
        text = string(parts, i)
        ids, back = results(tokenizer, text)
        print(i, ascii(text), ids, "" if back == text else ascii(back))


if __name__ == "__main__":
    if sys.argv[1:2] == ["show"]:
        show(sys.argv[2], int(sys.argv[3]))
    else:
        write_all()
