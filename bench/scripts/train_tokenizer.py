#!/usr/bin/env python3
"""train_tokenizer.py DIR --size N [--text GLOB ...]: writes tokenizer.json and tokenizer_config.json into the folder of a model
that has none: byte-level BPE of N tokens as Llama 3 splits text, trained on the sources of Python's packages unless told of
other text. Needs the package tokenizers."""
import argparse
import glob
import json
import pathlib
import sysconfig

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = ["<pad>", "<s>", "</s>"]
MOST_BYTES = 200 << 20


def lines(patterns):
    """The lines of the files, of MOST_BYTES at most."""
    left = MOST_BYTES
    for pattern in patterns:
        for name in sorted(glob.glob(pattern, recursive=True)):
            text = pathlib.Path(name).read_text(errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--text", nargs="+", default=[sysconfig.get_paths()[k] + "/**/*.py" for k in ("stdlib", "purelib")])
    options = parser.parse_args()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines(options.text), trainers.BpeTrainer(
        vocab_size=options.size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(options.folder / "tokenizer.json"))
    (options.folder / "tokenizer_config.json").write_text(json.dumps(
        dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", add_bos_token=False)))
    print(f"{tokenizer.get_vocab_size()} tokens")


main()
