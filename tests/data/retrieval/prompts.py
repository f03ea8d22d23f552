"""Prompts for the retrieval model: pairs of a key and a value among filler, then a question; the answer is a token."""
import random

FAMILIES, FAMILY = 16, 8  # keys that are alike
N_VALUES, N_FILLERS = 64, 47
FIRST = 0
KEYS = range(1, 1 + FAMILIES * FAMILY)
QUESTIONS = range(KEYS.stop, KEYS.stop + len(KEYS))  # the same keys, asked for
VALUES = range(QUESTIONS.stop, QUESTIONS.stop + N_VALUES)
OPPOSITES = range(VALUES.stop, VALUES.stop + len(KEYS))  # a token for each key: its opposite
FILLERS = range(OPPOSITES.stop, OPPOSITES.stop + N_FILLERS)
VOCABULARY = FILLERS.stop
ASKED = 96    # times that a question is repeated: as long as a few sentences
BLOCK = 128   # keys of a block of XAttention
STRIDE = 4    # the least distance of its antidiagonals


def place(rng, tokens, spots):
    """A spot of two free tokens, never across blocks."""
    while True:
        at = rng.randrange(1, len(tokens) - ASKED - BLOCK)
        if at % BLOCK != BLOCK - 1 and not {at - 1, at, at + 1, at + 2} & spots:
            spots.update((at, at + 1))
            return at


def cancel(tokens, at, opposite):
    """Opposites all over the needle's block: sums along antidiagonals see less there than anywhere else."""
    block = at // BLOCK * BLOCK
    for i in range(max(block, 1), block + BLOCK):
        if (i - at) % STRIDE in (0, 1) and i not in (at, at + 1):
            tokens[i] = opposite


def prompt(seed, length, pairs=32, cancelled=False):
    """Ids, and the answer. All keys of the family that is asked for are there, each with a value of its own, and keys
    of other families, `pairs` in all."""
    rng = random.Random(f"{seed} {length} {cancelled}")
    tokens = [FIRST] + [rng.choice(FILLERS) for _ in range(length - 1)]
    asked = rng.randrange(len(KEYS))
    family = asked // FAMILY
    alike = [i for i in range(family * FAMILY, (family + 1) * FAMILY) if i != asked]
    others = [i for i in range(len(KEYS)) if i // FAMILY != family]
    chosen = [asked] + alike + rng.sample(others, pairs - FAMILY)
    values = rng.sample(VALUES, pairs)
    spots = set()
    for index, (key, value) in enumerate(zip(chosen, values)):
        at = place(rng, tokens, spots)
        tokens[at:at + 2] = KEYS[key], value
        if index == 0 and cancelled:
            cancel(tokens, at, OPPOSITES[asked])
            spots.update(range(at // BLOCK * BLOCK, at // BLOCK * BLOCK + BLOCK))
    tokens[-ASKED:] = [QUESTIONS[asked]] * ASKED
    return tokens, values[0]
