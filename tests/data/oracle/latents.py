"""Caches of latents (DeepSeek-V2, 2024): what is written, and attention that is absorbed or expanded."""
import numpy as np

from formats import BF16, E4M3_MAX, FLT_MIN, FP16, FP32, File, Tensor, finite_absmax, from_e4m3, peaky
from formats import power_of_two_above, round_to, to_e4m3

BLOCK = 16  # tokens of a block of the cache
UNUSED = 2147480000  # entries of a table that must not be read
PLAIN, FP8, T128 = 0, 1, 2  # columns that hold the format of a cache
TILE = 128  # latents of a scale of T128
DEEPSEEK_SCALE = 192**-0.5 * (0.1 * np.log(40) + 1) ** 2  # of V3: nope 128 + rope 64, YaRN of factor 40


def t128_scales(latent):
    """fp32 scales of tiles of 128: max(absmax / 448, FLT_MIN) (vLLM, fp8_ds_mla)."""
    tiles = latent.astype(np.float32).reshape(len(latent), -1, TILE)
    return np.maximum(finite_absmax(tiles) / E4M3_MAX, FLT_MIN)


def latent_entries(form, dtype, latent, rope, scale=1.0, scales=None):
    """Bytes [tokens, entry] of fp32 inputs."""
    with np.errstate(over="ignore", invalid="ignore"):
        if form == PLAIN:
            return round_to(dtype, np.concatenate([latent, rope], 1)).bytes()
        if form == FP8:
            return to_e4m3(np.concatenate([latent, rope], 1).astype(np.float32) / np.float32(scale))
        scales = t128_scales(latent) if scales is None else scales
        tiles = latent.astype(np.float32).reshape(len(latent), -1, TILE)
        codes = to_e4m3(tiles / scales[..., None]).reshape(len(latent), -1)
    return np.concatenate([codes, scales.view(np.uint8), round_to(BF16, rope).bytes()], 1)


def latent_rows(form, dtype, entries, latent_dim, scale=1.0):
    """fp32 [tokens, latent + rope]: fp32(code) x scale, a product of fp32; what has no scale as it is."""
    if form == PLAIN:
        raw = {FP32: ("F32", np.float32), FP16: ("F16", np.float16), BF16: ("BF16", np.uint16)}[dtype]
        return Tensor(raw[0], np.ascontiguousarray(entries).view(raw[1])).values.astype(np.float32)
    if form == FP8:
        return from_e4m3(entries) * np.float32(scale)
    tiles = latent_dim // TILE
    scales = np.ascontiguousarray(entries[:, latent_dim:latent_dim + 4 * tiles]).view(np.float32)
    latent = from_e4m3(entries[:, :latent_dim]).reshape(-1, tiles, TILE) * scales[..., None]
    rope = np.ascontiguousarray(entries[:, latent_dim + 4 * tiles:]).view(np.uint16)
    return np.concatenate([latent.reshape(-1, latent_dim), Tensor("BF16", rope).values.astype(np.float32)], 1)


SPECIAL = np.array([
    0.0, -0.0, 1.0625, -1.1875, 2.0**-10, 3 * 2.0**-10, 432, 448, -464, 465, 1e6, -3e38, np.inf, -np.inf, np.nan,
    FLT_MIN, 1e-40, -1e-45, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-11), 65519, 65520, -65536, 6e-8, 2.9e-8, 1e-6,
    -2.0**-9, 17, -19, 240, 0.1], np.float32)


def latent_write():
    rng = np.random.default_rng(101)
    file = File("latent entries, byte for byte", "format input_dtype cache_dtype tokens latent_dim rope_dim", "scale")

    def case(name, form, given, cache, latent, rope, scale=1.0):
        tokens, (latent, rope) = len(latent), (round_to(given, latent), round_to(given, rope))
        slots = rng.permutation(3 * BLOCK)[:tokens].astype(np.int64)
        slots[-1] = -1
        entries = latent_entries(form, cache, latent.values, rope.values, scale)
        tensors = {"latent": latent, "rope": rope, "slots": slots, "entries": entries}
        if form != PLAIN and given == BF16:
            tensors["gathered"] = latent_rows(form, cache, entries, latent.raw.shape[1], scale)
        file.case(name, {"format": form, "input_dtype": given, "cache_dtype": cache, "tokens": tokens, "scale": scale,
                         "latent_dim": latent.raw.shape[1], "rope_dim": rope.raw.shape[1]}, tensors)

    names = ("fp32", "fp16", "bf16")
    for given in (FP32, FP16, BF16):
        latent, rope = peaky(rng, 3, 32), peaky(rng, 3, 16)
        latent[0], rope[0] = SPECIAL, SPECIAL[::-1][:16]
        for cache in (FP32, FP16, BF16):
            case(f"plain, {names[given]} to {names[cache]}", PLAIN, given, cache, latent, rope)
        for scale in (0.1, 1.0):
            case(f"fp8, {names[given]}, scale {scale}", FP8, given, 0, latent, rope, np.float32(scale))

    def tiled(tokens):
        latent, rope = peaky(rng, tokens, 512), peaky(rng, tokens, 64)
        latent[0, TILE:2 * TILE] = 0
        latent[0, 2 * TILE:3 * TILE] *= 2.0**-132  # subnormal, and zero in fp16
        latent[0, 2 * TILE] = 448 * FLT_MIN * 0.9  # the scale is FLT_MIN
        latent[0, 3 * TILE:] *= 1e37
        latent[0, 3 * TILE] = 3e38
        latent[1, :32] = SPECIAL
        latent[1, 10:12] = 1  # what overflows would drown the rest of the tile
        latent[1, TILE:2 * TILE] = np.resize([np.nan, np.inf, -np.inf], TILE)  # nothing finite
        latent[1, 2 * TILE:3 * TILE] = np.resize(SPECIAL[:8], TILE)  # greatest 448: the scale is 1, and ties are ties
        latent[1, 3 * TILE:] = 0
        latent[1, 3 * TILE] = -1e-3
        rope[1, :32] = SPECIAL
        return latent, rope

    for given, tokens in ((BF16, 3), (FP16, 2), (FP32, 2)):
        latent, rope = tiled(tokens)
        case(f"t128, {names[given]}", T128, given, 0, latent, rope)
    return file


def attend(q, k, v, scale):
    """One row and head: q [d], k [n, d], v [n, dv]; O and the natural logarithm of the sum of exp(scores)."""
    if len(k) == 0:
        return np.zeros(v.shape[1]), -np.inf
    scores = scale * (k @ q)
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ v / weights.sum(), top + np.log(weights.sum())


def merge(states):
    """O and LSE of a union of keys from those of its parts (FlashAttention; Milakov and Gimelshein, 2018)."""
    lse = np.logaddexp.reduce([lse for _, lse in states])
    return (sum(np.exp(part - lse) * o for o, part in states) if lse > -np.inf else states[0][0]), lse


def check_shards(q, k, v, scale, whole):
    """Blocks dealt out to three ranks in turn give the same."""
    owner = np.arange(len(k)) // BLOCK % 3
    o, lse = merge([attend(q, k[owner == rank], v[owner == rank], scale) for rank in range(3)])
    assert np.allclose(o, whole[0], atol=1e-12, rtol=1e-12) and (lse == whole[1] or abs(lse - whole[1]) < 1e-12)


def draw_keys(rng, tokens, q, scale):
    """Rows [tokens, d] for queries [.., d] of the sequence: the first is a sink of all, some are each near to one."""
    keys, q = peaky(rng, tokens, q.shape[-1], spread=0.6), q.reshape(-1, q.shape[-1])
    step = 1 / (scale * (q * q).sum(1).mean())  # of a query: what adds one to its score
    if tokens:
        keys[0] += 3 * step * q.sum(0)
    for token in range(tokens // 2, tokens, 4):
        keys[token] += 3 * step * q[rng.integers(len(q))]
    return keys


def latent_attend():
    rng = np.random.default_rng(202)
    file = File("absorbed attention over latent caches, float64",
                "format dtype heads latent_dim rope_dim sequences rows window causal blocks out_step",
                "scale cache_scale")

    def case(name, form, dtype, heads, dims, lengths, new, scale=DEEPSEEK_SCALE, window=0, causal=1, out_step=1,
             pow2=False):
        latent_dim, width = dims[0], sum(dims)
        rows = [(s, length - n + i) for s, (length, n) in enumerate(zip(lengths, new)) for i in range(n)]
        q = round_to(dtype, peaky(rng, len(rows), heads, width, spread=5 / width**0.5))
        sequence = np.array([s for s, _ in rows])
        keys = np.concatenate([draw_keys(rng, n, q.values[sequence == s], scale) for s, n in enumerate(lengths)])
        keys = keys.astype(np.float32)
        cache_scale = np.float32(finite_absmax(keys.ravel()) / 300) if form == FP8 else np.float32(1)
        scales = power_of_two_above(t128_scales(keys[:, :latent_dim])) if pow2 else None
        entries = latent_entries(form, dtype, keys[:, :latent_dim], keys[:, latent_dim:], cache_scale, scales)
        k = latent_rows(form, dtype, entries, latent_dim, cache_scale)
        # Tiles are multiplied in fp32 and rounded to bf16 before they are used; a tensor's scale stays outside.
        k = (round_to(BF16, k).values if form == T128 else
             from_e4m3(entries) * np.float64(cache_scale) if form == FP8 else k.astype(np.float64))
        first = np.concatenate([[0], np.cumsum(lengths)])
        out, lse, seen = np.zeros((len(rows), heads, latent_dim)), np.zeros((len(rows), heads)), []
        for r, (s, index) in enumerate(rows):
            end = min(index + 1, lengths[s]) if causal else lengths[s]
            begin = max(0, index + 1 - window) if window else 0
            seen.append((s, index, begin, max(begin, end)))
            part = k[first[s] + begin:first[s] + max(begin, end)]
            for h in range(heads):
                out[r, h], lse[r, h] = whole = attend(q.values[r, h], part, part[:, :latent_dim], scale)
                check_shards(q.values[r, h], part, part[:, :latent_dim], scale, whole)
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = sum(counts) + 2
        shuffled, tables = iter(rng.permutation(blocks)), np.full((len(lengths), max(counts)), UNUSED, np.int32)
        for s, count in enumerate(counts):
            tables[s, :count] = [next(shuffled) for _ in range(count)]
        file.case(name, {"format": form, "dtype": dtype, "heads": heads, "latent_dim": latent_dim, "rope_dim": dims[1],
                         "sequences": len(lengths), "rows": len(rows), "window": window, "causal": causal,
                         "blocks": blocks, "out_step": out_step, "scale": scale, "cache_scale": cache_scale},
                  {"q": q, "entries": entries, "lengths": np.array(lengths, np.int32), "tables": tables,
                   "rows": np.array(seen, np.int32), "out": out[..., ::out_step].astype(np.float32), "lse": lse})

    small, lengths = (32, 16), (21, 0, 9)
    case("plain bf16, a head", PLAIN, BF16, 1, small, (33, 0, 4), (1, 1, 1))
    case("plain fp16, 3 heads, 3 tokens, window", PLAIN, FP16, 3, small, lengths, (3, 1, 3), window=9)
    case("plain fp32, 3 heads, 2 tokens", PLAIN, FP32, 3, small, (17, 0, 3), (2, 1, 1), scale=48**-0.5)
    case("plain bf16, 16 heads", PLAIN, BF16, 16, small, (21, 9), (1, 1))
    case("plain bf16, 3 heads, every key", PLAIN, BF16, 3, small, lengths, (2, 1, 1), causal=0)
    case("plain bf16, window within a block", PLAIN, BF16, 3, small, (33, 5, 0), (1, 2, 1), window=2)
    case("plain bf16, whole prompts", PLAIN, BF16, 1, small, (3, 1, 17), (3, 1, 17))
    case("fp8, 3 heads, 3 tokens", FP8, BF16, 3, small, lengths, (3, 1, 1))
    case("fp8, 16 heads, window", FP8, BF16, 16, small, (21, 9), (1, 1), window=17)
    large = {"dims": (512, 64), "out_step": 7}
    case("plain bf16 576/512, 3 heads", PLAIN, BF16, 3, lengths=(5, 2), new=(1, 1), **large)
    case("fp8 576/512, a head", FP8, BF16, 1, lengths=(7, 2), new=(2, 1), **large)
    case("t128 576/512, a head", T128, BF16, 1, lengths=(17, 2), new=(2, 1), **large)
    case("t128 576/512, scales powers of two, window", T128, BF16, 1, lengths=(5, 3), new=(1, 1), window=4, pow2=True,
         **large)
    return file


def hashed(shape, seed):
    """Numbers i / 1024 with -128 <= i < 128, exact in bf16, from flat indices (Wellons's mixer lowbias32)."""
    x = (np.arange(np.prod(shape)) + seed).astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    return ((x >> np.uint32(24)).astype(np.int64) - 128).reshape(shape) / 1024


def expand():
    rng = np.random.default_rng(303)
    file = File("keys and values from latents, and attention by either form, float64",
                "tokens heads latent_dim rope_dim nope_dim v_dim rows hash_seed", "scale")

    def case(name, tokens, heads, latent_dim, rope_dim, nope, v_dim, rows, seed):
        scale = (nope + rope_dim) ** -0.5
        latent = round_to(BF16, peaky(rng, tokens, latent_dim + rope_dim, spread=0.8))
        shape = (heads, nope + v_dim, latent_dim)
        weight = round_to(BF16, hashed(shape, seed))
        q = round_to(BF16, peaky(rng, rows, heads, nope + rope_dim))
        c, r = latent.values[:, :latent_dim], latent.values[:, latent_dim:]
        up_k, up_v = weight.values[:, :nope], weight.values[:, nope:]
        k = np.concatenate([np.einsum("tc,hic->thi", c, up_k), np.repeat(r[:, None], heads, 1)], 2)
        v = np.einsum("tc,hic->thi", c, up_v)
        folded = np.concatenate([np.einsum("rhi,hic->rhc", q.values[..., :nope], up_k), q.values[..., nope:]], 2)
        out, lse = np.zeros((rows, heads, v_dim)), np.zeros((rows, heads))
        latent_out = np.zeros((rows, heads, latent_dim))
        for row in range(rows):
            n = tokens - rows + row + 1
            for h in range(heads):
                out[row, h], lse[row, h] = attend(q.values[row, h], k[:n, h], v[:n, h], scale)
                latent_out[row, h], absorbed = attend(folded[row, h], latent.values[:n], c[:n], scale)
                assert np.allclose(latent_out[row, h] @ up_v[h].T, out[row, h], atol=1e-10, rtol=0)
                assert abs(absorbed - lse[row, h]) < 1e-10
        file.case(name, {"tokens": tokens, "heads": heads, "latent_dim": latent_dim, "rope_dim": rope_dim,
                         "nope_dim": nope, "v_dim": v_dim, "rows": rows, "hash_seed": seed, "scale": scale},
                  {"latent": latent, "q": q, "k": k.astype(np.float32), "v": v.astype(np.float32),
                   "folded_q": folded.astype(np.float32), "latent_out": latent_out.astype(np.float32),
                   "out": out.astype(np.float32), "lse": lse})

    case("32/16, 3 heads, a prompt", 5, 3, 32, 16, 16, 16, 5, seed=1)
    case("32/24, a head, decode", 9, 1, 40, 8, 24, 24, 1, seed=2)
    case("192/128, 2 heads", 2, 2, 512, 64, 128, 128, 1, seed=3)
    return file
