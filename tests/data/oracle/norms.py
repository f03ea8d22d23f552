"""RMSNorm (Zhang and Sennrich, 2019) with residuals, and quantised."""
import numpy as np

from formats import BF16, E4M3_MAX, FP16, FP32, File, finite_absmax, peaky, power_of_two_above, round_to, to_e4m3
from rotary import rms

NONE, STATIC, TOKEN, GROUP, INT8 = range(5)


def to_int8(x):
    return np.rint(x).clip(-127, 127).astype(np.int8).view(np.uint8)


def quantise(y, kind, group, pow2, static, bound):
    """Codes and scales of fp32 y [rows, dim], step by step in fp32."""
    rows, dim = y.shape
    if kind == STATIC:
        return to_e4m3(y / static), None
    if kind == TOKEN:
        least = np.float32(1) / (E4M3_MAX * np.float32(512))
        scales = np.maximum(np.minimum(finite_absmax(y), bound) / E4M3_MAX, least)
        return to_e4m3(y / scales[:, None]), scales[:, None]
    if kind == INT8:
        scales = (finite_absmax(y) / np.float32(127))[:, None]
        return to_int8(y / np.where(scales == 0, np.float32(1), scales)), scales
    tiles = y.reshape(rows, dim // group, group)
    scales = np.maximum(finite_absmax(tiles), np.float32(1e-10)) / E4M3_MAX
    scales = power_of_two_above(scales) if pow2 else scales
    return to_e4m3(tiles / scales[..., None]).reshape(rows, dim), scales


def quantised(y, kind, group, pow2, static, bound):
    """Tensors of a case of float64 y. No code is so near a tie that 4 ulp of fp32 in norm or quotient change it."""
    codes, scales = quantise(y.astype(np.float32), kind, group, pow2, static, bound)
    encode = to_int8 if kind == INT8 else to_e4m3
    held = static if scales is None else np.repeat(scales, y.shape[1] // scales.shape[1], 1)
    nearly = (1 - 2.0**-21, 1 + 2.0**-21)
    others = [quantise((y * f).astype(np.float32), kind, group, pow2, static, bound)[0] for f in nearly]
    others += [encode((y / np.where(held == 0, np.float32(1), held) * f).astype(np.float32)) for f in nearly]
    assert all((other == codes).all() for other in others)
    return {"codes": codes} if scales is None else {"codes": codes, "scales": scales}


def rmsnorm():
    rng = np.random.default_rng(606)
    file = File("RMSNorm and its quantised forms", "dtype weight_dtype rows dim residual has_weight quant group pow2",
                "eps weight_offset static_scale scale_bound")

    def case(name, dtype, rows, dim, quant=NONE, residual=0, weight_dtype=None, has_weight=1, eps=1e-6, offset=0.0,
             group=0, pow2=0, static=0.0, bound=np.inf, zero_row=False):
        weight_dtype = dtype if weight_dtype is None else weight_dtype
        x = peaky(rng, rows, dim) * 10.0 ** rng.integers(-2, 3, (rows, 1))
        x[-1] = 0 if zero_row else x[-1]
        x = round_to(dtype, x)
        weight = round_to(weight_dtype, peaky(rng, dim, spread=0.3) + 1 - offset) if has_weight else None
        given, tensors = x.values, {"x": x}
        if residual:
            before = round_to(dtype, peaky(rng, rows, dim))
            after = round_to(dtype, before.values + x.values)
            given = after.values
            tensors.update(residual=before, residual_out=after)
        if has_weight:
            tensors["weight"] = weight
        y = rms(given, weight and weight.values, eps, offset)
        if quant == NONE:
            tensors["out"] = y.astype(np.float32)
        else:
            tensors.update(quantised(y, quant, group, pow2, np.float32(static), np.float32(bound)))
        file.case(name, {"dtype": dtype, "weight_dtype": weight_dtype, "rows": rows, "dim": dim, "residual": residual,
                         "has_weight": has_weight, "quant": quant, "group": group, "pow2": pow2, "eps": eps,
                         "weight_offset": offset, "static_scale": np.float32(static), "scale_bound": bound}, tensors)

    case("bf16, 64", BF16, 3, 64)
    case("fp16, 129, eps 1e-5", FP16, 2, 129, eps=1e-5)
    case("fp32, 1", FP32, 3, 1)
    case("fp32, offset 1", FP32, 2, 64, offset=1.0)
    case("bf16, no weight", BF16, 2, 64, has_weight=0)
    case("bf16, weight in fp32, residual", BF16, 3, 72, weight_dtype=FP32, residual=1)
    case("fp16, residual", FP16, 3, 64, residual=1)
    case("bf16, static fp8", BF16, 2, 96, STATIC, static=0.02)
    case("fp16, static fp8, a power of two, residual", FP16, 2, 96, STATIC, static=2.0**-7, residual=1)
    case("bf16, fp8 of tokens", BF16, 3, 96, TOKEN, zero_row=True)
    case("fp32, fp8 of tokens, bound", FP32, 3, 65, TOKEN, bound=2.0)
    case("bf16, fp8 of groups of 64", BF16, 5, 128, GROUP, group=64, zero_row=True)
    case("bf16, fp8 of groups of 128, residual", BF16, 2, 256, GROUP, group=128, residual=1)
    case("bf16, fp8 of groups of 128, powers of two", BF16, 2, 256, GROUP, group=128, pow2=1)
    case("fp32, fp8 of groups of 64, powers of two", FP32, 2, 128, GROUP, group=64, pow2=1, offset=1.0)
    case("bf16, int8", BF16, 3, 96, INT8, zero_row=True)
    case("fp16, int8, residual", FP16, 2, 96, INT8, residual=1)
    return file
