#!/usr/bin/env python3
"""Compares the Unicode of the package tokenizers with the newest, and notes what the package does with every code point.

    python3 -m venv VENV && VENV/bin/pip install tokenizers unicodedata2
    VENV/bin/python tests/data/make_unicode.py tables     # src/text/unicode_tables.c
    VENV/bin/python tests/data/make_unicode.py expected   # text/unicode.json, once the tables are there

The package has tables of several versions: its normal forms follow Unicode 9, patterns (Oniguruma) and words (the crate
regex) follow 16, digits (Rust's library) 17. Those of libunistring and PCRE2 are of 14 or later, whatever a machine has.
So what came between is listed:

    inert       has a normal form or a place among marks since Unicode 10: the package leaves it as it is
    stand-ins   is of another category for patterns than in Unicode 14: a character of this category, as many bytes long

text/unicode.json holds digests of what the package makes of all code points, of BLOCK in a row each, and texts for those
that would be too many:

    forms           for each form those of every code point, with marks before and behind it
    marks, pairs    ranges of combining marks; for each form a digest of all pairs of them
    alphabet, mixed characters that compose, move or block; for each form a digest of MIXED strings of them
    pre_tokenizers  for each a digest of the lengths of the words that code points make
    words           which code points are part of a word, beside an added token with single_word

These two leave most of the planes out in which nothing is assigned.
"""
import json
import sys
import unicodedata
from pathlib import Path

import unicodedata2
from make_text import (DEEPSEEK, GPT4O, HERE, LLAMA3, MASK, QWEN2, Random, hash_bytes, write)
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

FORMS = ["NFC", "NFD", "NFKC", "NFKD"]
BLOCK, ROW = 0x4000, 64
MIXED = 20000
START = 0xCBF29CE484222325
LAST = 0x110000
UNASSIGNED = "Cn"
# Scripts that patterns are written for: who stands in for a letter of one is of the same, where it has such a letter of
# old; else, as some signs of Cyrillic, it stands for the category alone.
SCRIPTS = """Latin Greek Cyrillic Armenian Hebrew Arabic Devanagari Bengali Gurmukhi Gujarati Tamil Telugu Kannada Malayalam
Sinhala Thai Lao Tibetan Myanmar Georgian Hangul Ethiopic Khmer Mongolian Hiragana Katakana Bopomofo Han""".split()


def is_character(code):
    return not 0xD800 <= code < 0xE000


CODES = [code for code in range(LAST) if is_character(code)]
FORM_OF = {form: getattr(normalizers, form)().normalize_str for form in FORMS}


def ranges(codes, value=lambda code: 0):
    """[first, last, value] of codes in a row with the same value."""
    out = []
    for code in sorted(codes):
        if out and out[-1][1] == code - 1 and out[-1][2] == value(code):
            out[-1][1] = code
        else:
            out.append([code, code, value(code)])
    return out


# ---- Tables ----

def around(code):
    """A character alone, and where a mark would move to its other side."""
    c = chr(code)
    return c, "a" + c + "\u0334", "a\u0345" + c


def inert():
    """What the package leaves as it is, and the newest Unicode does not, or composes with what follows."""
    has_form = [code for code in CODES if unicodedata2.combining(chr(code)) or unicodedata2.decomposition(chr(code))]
    out = {code for code in has_form for text in around(code)
           if any(FORM_OF[form](text) != unicodedata2.normalize(form, text) for form in FORMS)}
    for code in has_form:
        parts = unicodedata2.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            text = "".join(chr(int(part, 16)) for part in parts)
            if FORM_OF["NFC"](text) != unicodedata2.normalize("NFC", text):
                out.add(int(parts[0], 16))
    for code in out:
        assert all(FORM_OF[form](text) == text for form in FORMS for text in around(code)), hex(code)
    return out


def of_pattern(pattern):
    """The code points that a pattern of one character matches in the package; U+0000 aside, which no table has."""
    text = "".join(map(chr, CODES[1:]))
    rest = set(map(ord, normalizers.Replace(Regex(pattern), "").normalize_str(text)))
    return set(CODES[1:]) - rest


def categories():
    names = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
    out = dict.fromkeys(CODES, UNASSIGNED)
    for name in names:
        out.update(dict.fromkeys(of_pattern(r"\p{%s}" % name), name))
    return out


def stand_ins():
    """For each code point that is not in Unicode 14 what it is for the package, the last character that is alike."""
    assert unicodedata.unidata_version == "14.0.0", "this needs Python 3.11, whose Unicode is 14"
    of, script = categories(), {}
    for name in SCRIPTS:
        script.update(dict.fromkeys(of_pattern(r"\p{%s}" % name), name))

    def kind(code):
        return of[code], script.get(code), len(chr(code).encode())

    old = {code for code in CODES[1:] if of[code] == unicodedata.category(chr(code)) != UNASSIGNED}
    last = {kind(code): code for code in sorted(old)}
    new = [code for code in CODES[1:] if of[code] not in (UNASSIGNED, unicodedata.category(chr(code)))]
    lost = [code for code in new if kind(code) not in last]
    last.update({kind(code): last[of[code], None, len(chr(code).encode())] for code in lost})
    print(f"{len(lost)} lose their script: {', '.join(sorted({script[code] for code in lost}))}")
    return {code: last[kind(code)] for code in new}


def table(declaration, rows, each):
    lines = [f"{declaration} = {{"]
    for row in rows:
        if len(lines) == 1 or len(lines[-1]) + 1 + len(each(row)) > 119:
            lines.append("   ")
        lines[-1] += " " + each(row)
    return "\n".join(lines) + "\n};\n"


def write_tables():
    left, others = ranges(inert()), stand_ins()
    stand = ranges(others, others.get)
    text = ("/* Written by tests/data/make_unicode.py. */\n"
            '#include "src/text/unicode_tables.h"\n\n'
            + table("const cpa_unicode_range cpa_unicode_inert[CPA_UNICODE_INERT]", left, lambda r: "{0x%x, 0x%x, 0}," % tuple(r[:2]))
            + "\n"
            + table("const cpa_unicode_range cpa_unicode_stand_ins[CPA_UNICODE_STAND_INS]", stand, lambda r: "{0x%x, 0x%x, 0x%x}," % tuple(r)))
    (HERE.parent.parent / "src" / "text" / "unicode_tables.c").write_text(text)
    print(f"{len(left)} ranges are inert, {len(stand)} have stand-ins")


# ---- What is expected ----

def is_empty(first):
    """Whether a row is one of many without a character: of a plane that has none, and not the first of its block."""
    return 0x4 <= first >> 16 != 0xE and first % BLOCK != 0


def blocks(digest, is_left_out=lambda first: False):
    """A digest of each block, as a string of 16 digits for each; it is made row by row."""
    out, hash = "", START
    for first in range(0, LAST, ROW):
        if is_character(first) and not is_left_out(first):
            hash = digest(hash, range(first, first + ROW))
        if (first + ROW) % BLOCK == 0:
            out, hash = out + f"{hash:016x}", START
    return out


def digest_form(form, hash, codes):
    text = "".join(" ".join(around(code)) + " " for code in codes)
    normal = FORM_OF[form](text)
    return hash if normal == text else hash_bytes(hash, normal.encode())


def digest_pairs(form, marks):
    hash = START
    for first in marks:
        normal = FORM_OF[form]("".join("a" + chr(first) + chr(second) for second in marks))
        hash = hash_bytes(hash, normal.encode())
    return f"{hash:016x}"


def alphabet(marks):
    """Letters that compose, marks of all places, Hangul, what decomposes to several, and what is inert."""
    places = {unicodedata2.combining(chr(mark)): chr(mark) for mark in marks}
    composed = "aeioAOscdu\u00c5\u00e9\u1e69\u1ea5\u0344\u0958\u0f73\u0dda\u0dcf\u09c7\u09be\u1025\u102e\u30ab\u3099\ud55c\u1112\u1161\u11ab\u1100\u1b05\u1b35"
    compat = "\u212b\ufb01\u00bd\u3243\ufdfa\u2167\u00a8\u1fee\u2126\uff76\uff9e\u01c4\U0001d15e\U0001d1c0\U0002f800\U000110a5\U000110ba\U0001d11e"
    new = "".join(chr((first + last) // 2) for first, last, _ in ranges(inert()))
    return "".join(dict.fromkeys("".join(places.values()) + "\u0300\u0301\u0302\u0308\u0323\u0327\u0328" + composed + compat + new + " b"))


def mixed(letters, index):
    random = Random(index)
    return "".join(letters[random.below(len(letters))] for _ in range(1 + random.below(12)))


def digest_mixed(form, letters):
    hash = START
    for index in range(MIXED):
        hash = hash_bytes(hash, FORM_OF[form](mixed(letters, index)).encode())
    return f"{hash:016x}"


def split(pattern, behavior="Isolated"):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def metaspace(scheme, is_split):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": is_split}


PRE_TOKENIZERS = {
    "gpt2": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "llama3": split(LLAMA3), "qwen2": split(QWEN2), "gpt4o": split(GPT4O), "deepseek": split(DEEPSEEK),
    "scripts": split(r"[\p{Han}\p{Hiragana}\p{Katakana}]+|\p{Greek}+|[\p{Hebrew}\p{Thai}]", "MergedWithPrevious"),
    "digits": {"type": "Digits", "individual_digits": True},
    "runs of digits": {"type": "Digits", "individual_digits": False},
    "metaspace": {"type": "Sequence", "pretokenizers": [metaspace("first", True), {"type": "Digits", "individual_digits": True}]},
}


def pre_tokenizer(object):
    t = Tokenizer(models.BPE())
    file = json.loads(t.to_str())
    return Tokenizer.from_str(json.dumps({**file, "pre_tokenizer": object})).pre_tokenizer


def row_text(codes):
    return "".join(f"a{chr(code)} {chr(code)}1{chr(code)}{chr(code)}!" for code in codes)


def digest_words(cut, hash, codes):
    return hash_bytes(hash, bytes(min(len(word.encode()), 255) for word, _ in cut(row_text(codes))))


def words_of(pre_tokenizer):
    return blocks(lambda hash, codes: digest_words(pre_tokenizer.pre_tokenize_str, hash, codes), is_empty)


def digest_beside(tokenizer, hash, codes):
    return hash_bytes(hash, bytes(len(tokenizer.encode(text).ids) for code in codes for text in (chr(code) + "<w>", "<w>" + chr(code))))


def write_expected():
    marks = [code for code in CODES if unicodedata2.combining(chr(code))]
    letters = alphabet(marks)
    word = Tokenizer(models.BPE())
    word.add_tokens([AddedToken("<w>", single_word=True)])
    write(HERE / "text" / "unicode.json", {
        "forms": {form: blocks(lambda hash, codes: digest_form(form, hash, codes)) for form in FORMS},
        "marks": [range[:2] for range in ranges(marks)],
        "pairs": {form: digest_pairs(form, marks) for form in FORMS},
        "alphabet": letters,
        "mixed": {form: digest_mixed(form, letters) for form in FORMS},
        "pre_tokenizers": {name: {"pre_tokenizer": object, "digests": words_of(pre_tokenizer(object))}
                           for name, object in PRE_TOKENIZERS.items()},
        "words": blocks(lambda hash, codes: digest_beside(word, hash, codes), is_empty),
    })


if __name__ == "__main__":
    {"tables": write_tables, "expected": write_expected}[sys.argv[1]]()
