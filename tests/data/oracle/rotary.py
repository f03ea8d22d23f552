"""Rotary positions (Su et al., RoFormer, 2021): tables, and rows that are normed and rotated with them."""
import numpy as np

from formats import BF16, FP16, FP32, File, peaky, round_to

ROPE_KINDS = ("plain", "linear", "llama3", "yarn", "yarn of deepseek")


def mscale(factor, m):
    return 0.1 * m * np.log(factor) + 1 if factor > 1 else 1.0


def frequencies(kind, dim, p):
    """float64 [dim / 2], and what cosines and sines are multiplied by."""
    plain = p["base"] ** (-2 * np.arange(dim // 2) / dim)
    if kind == "plain":
        return plain, 1.0
    if kind == "linear":
        return plain / p["factor"], 1.0
    if kind == "llama3":  # by wavelength, Llama 3.1
        turns = p["original"] * plain / (2 * np.pi)  # in the length that it was trained for
        smooth = np.clip((turns - p["low"]) / (p["high"] - p["low"]), 0, 1)
        return plain * (smooth + (1 - smooth) / p["factor"]), 1.0
    # Peng et al., YaRN, 2023, with the bounds rounded as in the authors' code.
    turns = np.array([p["beta_fast"], p["beta_slow"]])
    low, high = dim * np.log(p["original"] / (2 * np.pi * turns)) / (2 * np.log(p["base"]))
    low, high = max(np.floor(low), 0), min(np.ceil(high), dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    mixed = plain / p["factor"] * ramp + plain * (1 - ramp)
    if kind == "yarn":
        return mixed, mscale(p["factor"], 1) * p.get("attention", 1)
    return mixed, mscale(p["factor"], p["mscale"]) / mscale(p["factor"], p["mscale_all_dim"])


def cos_sin(freqs, table_scale, positions):
    """fp32 [positions, dim]: cosines, then sines, of float64."""
    angles = np.asarray(positions, np.float64)[:, None] * freqs
    return (np.concatenate([np.cos(angles), np.sin(angles)], 1) * table_scale).astype(np.float32)


def rope_table():
    file = File("tables of cosines and sines, float64 rounded to fp32", "kind dim",
                "base factor original low high beta_fast beta_slow attention mscale mscale_all_dim table_scale "
                "softmax_factor")
    positions = np.array([0, 1, 63, 4095, 163839], np.int64)
    file.share("positions", positions)
    yarn = {"factor": 40, "original": 4096, "beta_fast": 32, "beta_slow": 1}
    for kind, dim, p in (
            ("plain", 64, {"base": 1e4}), ("plain", 16, {"base": 5e5}), ("plain", 2, {"base": 1e6}),
            ("linear", 32, {"base": 1e4, "factor": 2.5}),
            ("llama3", 64, {"base": 5e5, "factor": 8, "low": 1, "high": 4, "original": 8192}),
            ("llama3", 32, {"base": 1e4, "factor": 32, "low": 1, "high": 4, "original": 64}),
            ("yarn", 32, {**yarn, "base": 1e6, "factor": 4, "original": 32768}),
            ("yarn", 32, {"base": 1e4, "factor": 8, "original": 64, "beta_fast": 16, "beta_slow": 2}),
            ("yarn", 16, {**yarn, "base": 1e4, "attention": 0.5}),
            ("yarn", 8, {**yarn, "base": 1e4, "factor": 4, "original": 6}),  # low = high
            ("yarn of deepseek", 64, {"base": 1e4, **yarn, "mscale": 1, "mscale_all_dim": 1}),
            ("yarn of deepseek", 16, {"base": 1e4, **yarn, "mscale": 0.707, "mscale_all_dim": 0.707}),
            ("yarn of deepseek", 32, {"base": 1e4, **yarn, "mscale": 1, "mscale_all_dim": 0.8})):
        freqs, table_scale = frequencies(kind, dim, p)
        softmax = mscale(p["factor"], p["mscale_all_dim"]) ** 2 if kind == "yarn of deepseek" else 1
        p = {**p, "attention": p.get("attention", 1)} if kind == "yarn" else p
        file.case(f"{kind}, {dim}", {"kind": ROPE_KINDS.index(kind), "dim": dim, **p, "table_scale": table_scale,
                                     "softmax_factor": softmax},
                  {"frequencies": freqs, "cos_sin": cos_sin(freqs, table_scale, positions)})
    v3 = file.rows[10]
    assert v3["table_scale"] == 1 and abs(v3["softmax_factor"] - 1.8738) < 1e-4
    return file


MAX_POSITION = 10  # of the tables that rows are rotated with


def small_table(dim):
    return cos_sin(frequencies("plain", dim, {"base": 100.0})[0], 1.0, np.arange(MAX_POSITION))


def stream_of(i, sections, interleaved):
    """Which of positions t, h, w frequency i takes."""
    if interleaved:
        return 1 if i % 3 == 1 and i < 3 * sections[1] else 2 if i % 3 == 2 and i < 3 * sections[2] else 0
    return 0 if i < sections[0] else 1 if i < sections[0] + sections[1] else 2


def rotate(x, table, positions, first, dim, gptj=0, inverse=0, sections=(0, 0, 0), interleaved=0):
    """x float64 [tokens, heads, d]; positions [tokens] or [3, tokens]."""
    out, table = x.copy(), table.astype(np.float64)
    positions = np.broadcast_to(positions, (3, x.shape[0]))
    for i in range(dim // 2):
        a, b = (first + 2 * i, first + 2 * i + 1) if gptj else (first + i, first + i + dim // 2)
        at = positions[stream_of(i, sections, interleaved) if any(sections) else 0]
        cos, sin = table[at.clip(0, MAX_POSITION - 1)][:, [i, i + dim // 2]].T[..., None]
        sin = -sin if inverse else sin
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
    outside = ((positions < 0) | (positions >= MAX_POSITION)).any(0)
    out[outside, :, first:first + dim] = np.nan
    return out


def rms(x, weight, eps, offset=0.0):
    """float64, over the last axis: x / sqrt(mean x^2 + eps) (offset + w)."""
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * (offset + weight)


def draw_positions(rng, tokens, sections):
    positions = rng.integers(0, MAX_POSITION, (3, tokens) if any(sections) else tokens)
    positions.flat[0], positions.flat[-1] = 0, MAX_POSITION - 1
    return positions.astype(np.int64)


def rope_rows():
    rng = np.random.default_rng(404)
    file = File("rows that are normed (if norm_dim is not 0), then rotated; float64 from an fp32 table",
                "dtype tokens heads head_dim norm_dim has_weight first dim gptj inverse section_t section_h section_w "
                "interleaved max_position", "eps weight_offset")
    for dim in (16, 32, 64):
        file.share(f"cos_sin.{dim}", small_table(dim))

    def case(name, dtype, heads, head_dim, first, dim, tokens=3, norm_dim=0, eps=1e-6, offset=0.0, has_weight=1,
             outside=(), gptj=0, inverse=0, sections=(0, 0, 0), interleaved=0):
        how, table = {"gptj": gptj, "sections": sections, "interleaved": interleaved}, small_table(dim)
        x = round_to(dtype, peaky(rng, tokens, heads, head_dim))
        y, tensors = x.values.copy(), {"x": x}
        if norm_dim:
            weight = round_to(dtype, peaky(rng, norm_dim, spread=0.3) + 1 - offset) if has_weight else None
            y[..., :norm_dim] = rms(y[..., :norm_dim], weight and weight.values, eps, offset)
            tensors.update({"weight": weight} if has_weight else {})
        positions = draw_positions(rng, tokens, sections)
        for token, position in outside:
            positions[..., token] = position
        out = rotate(y, table, positions, first, dim, inverse=inverse, **how)
        if not outside:
            assert np.allclose(rotate(out, table, positions, first, dim, inverse=1 - inverse, **how), y, atol=1e-5)
        tensors.update(positions=positions, out=out.astype(np.float32))
        file.case(name, {"dtype": dtype, "tokens": tokens, "heads": heads, "head_dim": head_dim, "norm_dim": norm_dim,
                         "has_weight": has_weight if norm_dim else 0, "eps": eps, "weight_offset": offset,
                         "first": first, "dim": dim, "gptj": gptj, "inverse": inverse, "section_t": sections[0],
                         "section_h": sections[1], "section_w": sections[2], "interleaved": interleaved,
                         "max_position": MAX_POSITION}, tensors)

    case("neox bf16", BF16, 2, 32, 0, 32)
    case("gptj bf16", BF16, 2, 32, 0, 32, gptj=1)
    case("neox fp16, the first half", FP16, 2, 32, 0, 16)
    case("gptj fp32, a third", FP32, 2, 48, 0, 16, gptj=1, tokens=2)
    case("gptj bf16, the last of a latent row", BF16, 1, 48, 32, 16, gptj=1)
    case("neox bf16, the last of a query", BF16, 3, 32, 16, 16)
    case("gptj bf16, 192, the last 64", BF16, 1, 192, 128, 64, gptj=1, tokens=1)
    case("neox inverse fp32", FP32, 1, 32, 0, 32, inverse=1)
    case("gptj inverse bf16, the last", BF16, 1, 48, 32, 16, gptj=1, inverse=1)
    case("neox, positions outside of the table", BF16, 1, 32, 0, 32, outside=((1, MAX_POSITION), (2, -1)), tokens=4)
    case("m-rope consecutive, neox bf16", BF16, 2, 32, 0, 32, sections=(4, 6, 6))
    case("m-rope interleaved, neox bf16", BF16, 1, 32, 0, 32, sections=(6, 5, 5), interleaved=1)
    case("m-rope interleaved, uneven, fp32", FP32, 1, 32, 0, 32, sections=(10, 4, 2), interleaved=1)
    case("m-rope consecutive, gptj fp16, partial", FP16, 2, 48, 0, 32, gptj=1, sections=(4, 6, 6))
    case("normed, neox bf16", BF16, 2, 32, 0, 32, norm_dim=32)
    case("normed, gptj fp16, half, eps 1e-5", FP16, 2, 32, 0, 16, norm_dim=32, eps=1e-5, gptj=1)
    case("normed, neox fp32, offset 1", FP32, 1, 32, 0, 32, norm_dim=32, offset=1.0)
    case("normed, neox bf16, no weight", BF16, 2, 48, 0, 16, norm_dim=48, has_weight=0, tokens=2)
    case("normed, m-rope bf16", BF16, 1, 32, 0, 32, norm_dim=32, sections=(4, 6, 6))
    case("latent row bf16 32 + 16, gptj", BF16, 1, 48, 32, 16, norm_dim=32, gptj=1)
    case("latent row fp16 32 + 16, neox", FP16, 1, 48, 32, 16, norm_dim=32)
    case("latent row bf16 512 + 64, gptj", BF16, 1, 576, 512, 64, norm_dim=512, gptj=1, tokens=1)
    return file
