#!/usr/bin/env python3
"""gpu_cases.py LIST: the cases that bench/scripts/gpu.sh measures, as --shapes of `cp_attn bench` wants them; `cudnn` and
`context_parallel` are those of the peers, bench/scripts/torch_attend.py and bench/scripts/torch_context_parallel.py. bench/scripts/gpu_table.py
compares what they gave."""
import sys

SIZES = ("8K", "16K", "32K", "64K")
CONTIGUOUS = ":pages=ordered:block-size=256"  # the largest pages of the kernels, one after another
HEADS = ("dtype=fp16", "head-dim=64", "head-dim=256")  # beside bf16 and 128
QUANTISED = ("int8", "fp8_e4m3")
CONTINUING = "1x8Kx136K"  # a chunk of 8K over 128K


def prefill(size, options=""):
    return f"1x{size}x{size}{options}"


# (case of ours, case of cuDNN)
BESIDE_CUDNN = (
    [(prefill(n, CONTIGUOUS), prefill(n)) for n in SIZES] + [(prefill(n), prefill(n)) for n in SIZES] +
    [(prefill(n, ":mask=full"),) * 2 for n in SIZES] +
    [(prefill("16K", f":{head}{mask}"),) * 2 for head in HEADS for mask in ("", ":mask=full")])
PAGES_OF_16 = [prefill(n, ":block-size=16") for n in SIZES]
# What is compared stands together: a device that is hot from the cases before lowers its clock.
PREFILL = [prefill(n, pages) for n in SIZES for pages in (CONTIGUOUS, "", ":block-size=16")] + [CONTINUING]
PREFILL += [ours for ours, _ in BESIDE_CUDNN if ours not in PREFILL]

BATCHES, CONTEXTS = (1, 16, 128), ("1K", "16K", "128K")
LARGE_DECODE = [f"128x1x128K{pages}" for pages in ("", ":block-size=16")]  # 64 GiB
DECODE = [
    f"{batch}x1x{context}{pages}" for pages in ("", ":block-size=16") for batch in BATCHES for context in CONTEXTS
    if (batch, context) != (128, "128K")
] + [f"{case}:ragged=true{pages}" for pages in ("", ":block-size=16") for case in ("16x1x128K", "128x1x16K")] + ["64x1x16K", "64x1x128K"]

DECODE_BESIDE_BF16, PREFILL_BESIDE_BF16 = ("16x1x128K", "64x1x16K"), ("1x16Kx16K", "1x64Kx64K")

# Blocks of one token and of few, beside those of 64: prefill whole, and of little over much; decode.
FEW_TOKENS = (":block-size=1", ":block-size=8")
FEW_PREFILL, FEW_DECODE = ("1x16Kx16K", "1x512x64K"), ("64x1x16K", "16x1x128K")

# Sequences that begin alike: most microseconds on an H200, where their cache is widened what that takes more; and where
# they share little or are few, beside each by itself.
CASCADE = {f"64x1x17K:shared=16K{cache}": most
           for cache, most in (("", 130), (":kv-cache-dtype=fp8_e4m3", 150), (":layout=vllm-x:block-size=16", 190))}
LITTLE_SHARED = ("64x1x2K:shared=256", "64x1x17K:shared=512", "2x1x4K:shared=2K", "2x1x17K:shared=16K", "8x1x2K:shared=1K",
                 "8x1x9K:shared=8K:kv-cache-dtype=fp8_e4m3")
FLAT = ":cascade-attention=off"


def encoder(shape, dim):
    return f"{shape}:mask=full:q-heads=16:kv-heads=16:head-dim={dim}"


# What is done to scores, beside the same without: least rate of prefill and of decode.
RULED_PREFILL, RULED_DECODE = "1x16Kx16K", "64x1x16K"
RULES = {"softcap": (0.65, 0.95), "alibi": (0.95, 0.95), "sink-logits": (0.99, 0.99), "bits": (0.85, 0.85)}
# Rules over other caches, blocks, layouts and widths, beside the same without: least rate.
RULED_CACHES = {"64x4x16K:kv-cache-dtype=fp8_e4m3": "tree", "64x1x16K:kv-cache-dtype=fp8_e4m3": "softcap",
                "64x1x16K:kv-cache-dtype=int8": "softcap", "1x4Kx4K:kv-cache-dtype=fp8_e4m3": "alibi",
                "64x1x16K:block-size=1": "softcap", "1x4Kx4K:layout=vllm-x": "softcap", "1x4Kx4K:head-dim=256": "alibi",
                "1x4Kx4K:block-size=8": "alibi"}
RULED_CACHES_RATE = 0.85
# Many short prompts at once: least TFLOP/s on an H200.
SHORT_PROMPTS = {"16x2Kx2K": 500, "64x512x512": 350}
# Several tokens a sequence in a step, drafts that are checked, as chains and as a tree: most time beside one.
DRAFTED = {"64x2x16K": 1.05, "64x4x16K": 1.10, "64x8x16K": 1.15, "64x4x16K:rules=tree": 1.10, "64x8x16K:rules=tree": 1.15}
ONE_TOKEN = "64x1x16K"

# Without a cache: long segments by the width of heads, and images of 577 rows.
ENCODERS = {dim: encoder("16x4Kx4K", dim) for dim in (64, 128, 72, 80)}
IMAGES = encoder("64x577x577", 64)

# Latents: 576 wide rows whose first 512 columns are the values; least TFLOP/s, or share of what can be read, on an H200.
def latents(shape, q_heads, cache=""):
    return f"{shape}:v-in-k=true:q-heads={q_heads}{cache}"


CODES = {"fp8_t128": ":kv-cache-dtype=fp8_t128", "fp8_e4m3": ":kv-cache-dtype=fp8_e4m3:tensor-scale=0.05"}
LATENT_FLOPS = {latents("64x1x16K", 128): 600, latents("128x1x4K", 128): 600, latents("16x2x16K", 128): 600,
                latents("1x1x128K", 128): 500, latents("64x1x17K:shared=16K", 128): 550,
                **{latents("64x1x16K", 128, cache): 450 for cache in CODES.values()}}
LATENT_READ = {latents("64x1x16K", 16): 0.92, **{latents("64x1x16K", 16, cache): 0.85 for cache in CODES.values()}}
# The same beside FlashInfer, where that is installed.
BESIDE_FLASHINFER = [latents(shape, heads) for shape in ("64x1x16K", "64x1x17K:shared=16K") for heads in (16, 128)]
# Latents of sequences that begin alike, most microseconds on an H200; under 128 heads products bind, however often they
# are read.
CASCADE |= {latents("64x1x17K:shared=16K", 16, cache): most
            for cache, most in (("", 150), (CODES["fp8_t128"], 180), (CODES["fp8_e4m3"], 160))}
CASCADE[latents("64x1x17K:shared=16K", 128)] = 565
LITTLE_SHARED += (latents("64x1x2K:shared=256", 16), latents("2x1x17K:shared=16K", 16))
# Keys that rows choose, 2K each: least TFLOP/s over latents under 128 heads, or share of what can be read, on an H200.
SPARSE_FLOPS = {latents("256x2Mx2K", 128, CODES["fp8_t128"]): 450, latents("256x2Mx2K", 128): 450,
                latents("4Kx128Kx2K", 128): 600}
SPARSE_READ = {"64x8Mx2K": 0.7, "64x8Mx2K:unit=4": 0.7}
# What chooses them: rows over keys, of an indexer with 64 heads; FP8 products at 0.7 of 1,979 TFLOP/s, an H200's peak. And
# the best 2K of its scores, in the time of two reads at 0.9 of what can be read: half of that as a share of one.
INDEX_FLOPS, INDEX_READ = {"1x4Kx64K": 1385}, {"64x1x128K": 0.85}
TOPK = {"64x128Kx2K": 0.45, "4Kx64Kx2K": 0.45}
# Rows that are made of others, where they take long: share of what can be copied.
INDEX_ROWS = {"index_write": "512K", "index_q": "8K"}
ENTRIES = {"q_norm_rope_kv_write": "1Kx128", "inverse_rope_quant": "1Kx128", "compress_write": "8Kx4"}
# The keys and values that latents stand for, of each head.
EXPANDED = [f"{prefill(size)}:q-heads=128:kv-heads=128:head-dim=192:v-head-dim=128" for size in ("16K", "64K")]
# XAttention: queries x keys x stride x tau in %, and queries x keys x blocks kept in %, beside dense prefill.
XATTN_SIZES = ("64K", "128K", "256K")
XATTN_DENSE = {size: f"1x{size}x{size}" for size in XATTN_SIZES}
XATTN = {f"{size}x{size}x{stride}x90": size for size in XATTN_SIZES for stride in (8, 16)}
ATTEND_BLOCKS = [f"64Kx64Kx{kept}" for kept in (10, 25, 100)]
# Rows of decode beside a chunk of a prompt over such blocks, and the two apart.
BESIDE, BESIDE_CHUNK, BESIDE_DECODE = "16Kx64Kx25x63x16K", "16Kx64Kx25", "63x1x16K"
# Caches on the host, through rings of an eighth of them: prompts beside the same in memory, and decode.
OFFLOADED_PREFILL, OFFLOADED_DECODE = ("1x16Kx128K", "1x128Kx128K"), ("1x1x128K", "1x1x128K:block-size=16", "64x1x16K")
# Tiles of keys left out, of prefill and of decode: where so many keys are light, the distance that leaves out about as
# many tiles of prefill, and the least rate beside the same with all; and where nothing can be left out, beside no such
# option.
LIGHT = {":light-keys=0.5": (":skip-tiles=8", 1.2), ":light-keys=0.7": (":skip-tiles=6", 1.4)}
SKIPPING, SKIPPING_NONE = (*(prefill(size) for size in ("16K", "64K", "128K")), "64x1x16K", "1x1x128K"), 0.99
# Products of experts, 8 of 256 for each of 4K tokens, beside a dense one of the same work.
DENSE_PRODUCT, EXPERT_PRODUCTS = "32Kx4Kx7K", [f"4Kx4Kx7K:experts=256{codes}" for codes in ("", ":fp8-weights=true")]

STATES = (2, 3, 4, 6, 8)
SCALING = {"1x64Kx64K": 0.96, "1x128Kx128K": 0.98, "1x512Kx512K": 0.99}  # least efficiency on four GPUs
DECODE_SCALING = "64x1x128K"
SHORT_DECODE = ("1x1x8K", "16x1x8K", "64x1x8K")
# Microseconds that exchanges and merge may add to a layer, beside what single layers differ by.
DECODE_ADDED_GOALS = {"1x1x8K": 12, "16x1x8K": 12, "64x1x8K": 10, DECODE_SCALING: 15}
MESSAGES = ("16K", "256K", "1M", "64M")

LISTS = {
    "prefill": PREFILL,
    "cudnn": list(dict.fromkeys(peer for _, peer in BESIDE_CUDNN)),
    "decode": DECODE,
    "decode-large": LARGE_DECODE,
    "cascade": [f"{case}{flat}" for case in (*CASCADE, *LITTLE_SHARED) for flat in ("", FLAT)],
    "quantised": [f"{case}{dtype}" for case in DECODE_BESIDE_BF16 + PREFILL_BESIDE_BF16
                  for dtype in ["", *(f":kv-cache-dtype={dtype}" for dtype in QUANTISED)]],
    "rules": [f"{case}{rule}" for case in (RULED_PREFILL, RULED_DECODE)
              for rule in ("", *(f":rules={name}" for name in RULES))] + [*DRAFTED],
    "ruled-caches": [f"{case}{rule}" for case, name in RULED_CACHES.items() for rule in ("", f":rules={name}")],
    "short-prompts": [*SHORT_PROMPTS],
    "small-blocks": [f"{case}{pages}" for case in FEW_PREFILL for pages in ("", *FEW_TOKENS)] +
                    [f"{case}{pages}" for case in FEW_DECODE for pages in FEW_TOKENS],
    "latents": [*LATENT_FLOPS, *LATENT_READ],
    "flashinfer": BESIDE_FLASHINFER,
    "sparse": [*SPARSE_FLOPS, *SPARSE_READ, latents("1x128Kx2K", 128), "1x128Kx2K"],
    "xattn": [*XATTN],
    "attend_blocks": ATTEND_BLOCKS,
    "attend_beside": [BESIDE],
    "beside-chunk": [BESIDE_CHUNK],
    "beside-decode": [BESIDE_DECODE],
    "offload-memory": [*OFFLOADED_PREFILL],
    "offload": [*OFFLOADED_PREFILL, *OFFLOADED_DECODE],
    "skip-tiles": [f"{case}{light}{skip}" for case in SKIPPING for light, skip in
                   [("", ""), ("", ":skip-tiles=1000"), *((light, skip) for light, (distance, _) in LIGHT.items() for skip in ("", distance))]],
    "xattn-dense": [*XATTN_DENSE.values()],
    "index_logits": [*INDEX_FLOPS, *INDEX_READ, "1x1x128K"],
    "topk": [*TOPK, "1x128Kx2K"],
    **{name: [shape] for name, shape in (INDEX_ROWS | ENTRIES).items()},
    "expanded": EXPANDED,
    "experts": EXPERT_PRODUCTS,
    "dense-product": [DENSE_PRODUCT],
    "varlen_attend": [*ENCODERS.values(), IMAGES],
    "varlen": ["64x8K", "64x8K:as-one=true"],
    "merge": [f"32Kx{n}" for n in STATES] + ["32Kx2:dtype=fp32", "32Kx8:dtype=fp32", "32Kx2:fp8-out=true"],
    "kv_write": ["128K", "128K:dtype=fp32:kv-cache-dtype=bf16", "128K:block-size=16"],
    "kv_pack": ["128K", "128K:block-size=16"],
    "kv_convert": [f"128K:layout=vllm-x:block-size={size}" for size in (16, 32)],
    "layouts": [f"64x1x16K:layout=vllm-x:block-size={size}{dtype}" for size in (16, 32)
                for dtype in ("", ":kv-cache-dtype=fp8_e4m3")],
    "exchange": [f"{n}:transport={name}:pattern=at-once" for n in MESSAGES for name in ("peer", "nccl")],
    "context_parallel": [*SCALING],
    "scaling": [*SCALING, DECODE_SCALING, *SHORT_DECODE],
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LISTS:
        sys.exit(f"{__doc__}\nLIST is one of {', '.join(LISTS)}")
    print(",".join(LISTS[sys.argv[1]]))
