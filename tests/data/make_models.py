#!/usr/bin/env python3
"""Writes the tiny models beside this file, with what transformers computes with them.

    python3 -m venv VENV && VENV/bin/pip install torch transformers
    VENV/bin/python tests/data/make_models.py [NAME...]

Each folder has what a Hugging Face folder has: config.json, generation_config.json, safetensors. Two more files hold what
transformers gave in fp32 (eager attention, on the CPU):

    expected.json          prompts, and for each the ids that greedy decoding appends; the least distance between the two
                           best logits of any step; versions
    expected_logits.f32    fp32, little-endian, [prompts, steps, vocabulary]: the logits that each of these ids is the
                           best of

With an indexer ("indexer"), which chooses other keys for a rounding now and then, a seed is taken with which
transformers has the same logits in fp64. Where a module drafts ("mtp"), expected.json also has draft_ids: of each id that is appended, the one that the module
expects behind it, by mtp.py.

The weights are random. They are scaled so that attention is peaky and logits differ: queries and keys have a standard
deviation above one. Of some seeds that one is taken whose two best logits are furthest apart where they are nearest.
"""
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

import mtp

HERE = Path(__file__).parent
SEEDS = 24
STEPS = 16
PROMPT_LENGTHS = (3, 40, 130)
VOCABULARY = 128
TEXT_VOCABULARY = 320  # of the model with a tokenizer, which make_text.py writes: all bytes, merges, special tokens
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "use_cache": True, "bos_token_id": 1,
}

# As transformers 4 writes them: rope_theta and rope_scaling beside each other, torch_dtype.
def version_4(architecture, model_type, dtype, rope_scaling, **more):
    return {"architectures": [architecture], "model_type": model_type, **SHAPE, "rope_theta": 10000.0,
            "rope_scaling": rope_scaling, "tie_word_embeddings": False, "torch_dtype": dtype,
            "transformers_version": "4.57.0", **more}


# As transformers 5 does: rope_parameters, dtype.
def version_5(architecture, model_type, dtype, rope, **more):
    return {"architectures": [architecture], "model_type": model_type, **SHAPE,
            "rope_parameters": {"rope_theta": 10000.0, **rope}, "tie_word_embeddings": False, "dtype": dtype,
            "transformers_version": "5.0.0", **more}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN_4 = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_5 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
          "beta_slow": 2.0, "attention_factor": 1.1}
DEEPSEEK_YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
                 "mscale": 1.0, "mscale_all_dim": 1.0}

# "eos": of generation_config.json; a number counted from the end of the answer to the second prompt, or ids.
# "latent": latent attention. "fp8": projections are stored in FP8.
# "mtp": a module that predicts the token after next.
# "experts": what the names of experts begin with, in files that have a tensor for each of them.
MODELS = {
    "tiny-llama": {"eos": [126, 127], "config": version_5(
        "LlamaForCausalLM", "llama", "bfloat16", LLAMA3, head_dim=16, attention_bias=False, mlp_bias=False,
        vocab_size=TEXT_VOCABULARY)},
    "tiny-llama2": {"eos": "ninth", "config": version_4(
        "LlamaForCausalLM", "llama", "float16", None, num_key_value_heads=4)},
    "tiny-mistral": {"eos": 127, "config": version_4(
        "MistralForCausalLM", "mistral", "bfloat16", None, head_dim=16, sliding_window=24)},
    "tiny-qwen2": {"eos": [127], "config": version_4(
        "Qwen2ForCausalLM", "qwen2", "bfloat16", None, tie_word_embeddings=True, use_sliding_window=True,
        sliding_window=32, max_window_layers=1)},
    "tiny-qwen3": {"eos": [127], "config": version_5(
        "Qwen3ForCausalLM", "qwen3", "bfloat16", {"rope_type": "default"}, head_dim=16, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=2,
        layer_types=["full_attention", "full_attention"])},
    "tiny-yarn": {"eos": 127, "config": version_4("Qwen2ForCausalLM", "qwen2", "float32", YARN_4, sliding_window=32,
                                                  use_sliding_window=False)},
    "tiny-mixtral": {"eos": 127, "shards": 2, "experts": "block_sparse_moe", "config": version_4(
        "MixtralForCausalLM", "mixtral", "bfloat16", None, head_dim=16, intermediate_size=32, sliding_window=40,
        num_local_experts=8, num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.02)},
    "tiny-qwen3-moe": {"eos": [127], "experts": "mlp", "config": version_5(
        "Qwen3MoeForCausalLM", "qwen3_moe", "bfloat16", {"rope_type": "default"}, head_dim=16, attention_bias=False,
        use_sliding_window=False, sliding_window=None, max_window_layers=2, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])},
    "tiny-joined-moe": {"eos": [127], "config": version_5(
        "Qwen3MoeForCausalLM", "qwen3_moe", "float32", {"rope_type": "default"}, num_key_value_heads=4,
        attention_bias=True, use_sliding_window=False, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12,
        norm_topk_prob=False, num_hidden_layers=3, mlp_only_layers=[1])},
    "tiny-sharded": {"eos": 127, "shards": 3, "config": version_5(
        "LlamaForCausalLM", "llama", "bfloat16", YARN_5, head_dim=16, attention_bias=True, mlp_bias=True)},
}


# DeepSeek's own files, of version 4: latent attention, a dense layer in front, then experts in groups beside one that
# is shared. The widths differ so that none can be taken for another.
def deepseek(architecture, model_type, rope_scaling, **more):
    return version_4(architecture, model_type, "bfloat16", rope_scaling, num_key_value_heads=4, num_hidden_layers=3,
                     kv_lora_rank=32, qk_rope_head_dim=16, first_k_dense_replace=1, moe_layer_freq=1, ep_size=1,
                     n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=16, n_group=4, topk_group=2,
                     attention_bias=False, attention_dropout=0.0, pretraining_tp=1, aux_loss_alpha=0.001, seq_aux=True,
                     rms_norm_eps=1e-6, **more)


MODELS |= {
    "tiny-deepseek-v2": {"eos": 127, "latent": True, "experts": "mlp", "config": deepseek(
        "DeepseekV2ForCausalLM", "deepseek_v2", None, q_lora_rank=None, qk_nope_head_dim=16, v_head_dim=24,
        num_experts_per_tok=2, norm_topk_prob=False, routed_scaling_factor=2.0, scoring_func="softmax",
        topk_method="group_limited_greedy")},
    "tiny-deepseek-v3": {"eos": 127, "latent": True, "experts": "mlp", "config": deepseek(
        "DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK_YARN, q_lora_rank=24, qk_nope_head_dim=24, v_head_dim=16,
        num_experts_per_tok=3, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc")},
}
# With a module that predicts the token after next. The layers add little to the embedding, so that it is often right.
MODELS["tiny-deepseek-mtp"] = {"eos": 127, "latent": True, "experts": "mlp", "mtp": True, "config": {
    **MODELS["tiny-deepseek-v3"]["config"], "num_hidden_layers": 2, "num_nextn_predict_layers": 1}}
# The second as its makers publish it: codes with a scale for each block of 128 x 128.
MODELS["tiny-deepseek-fp8"] = {"eos": 127, "latent": True, "experts": "mlp", "fp8": True, "config": {
    **MODELS["tiny-deepseek-v3"]["config"], "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}}
# With an indexer, whose rows attend fewer keys than most prompts have. With few heads keys would often have a score of 0,
# and which of these are chosen is not said.
MODELS["tiny-deepseek-v32"] = {"eos": 127, "latent": True, "experts": "mlp", "indexer": True, "config": {
    **MODELS["tiny-deepseek-v3"]["config"], "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}}


FP8_NAMES = ("_proj.weight", "_with_mqa.weight")


def to_fp8(state):
    """The state with codes and scales in the place of what projections have, and that as it is read again."""
    stored, read = {}, {}
    for name, values in state.items():
        stored[name] = read[name] = values
        if not name.endswith(FP8_NAMES):
            continue
        rows, columns = (-(-n // 128) for n in values.shape)
        scales = torch.empty(rows, columns)
        codes, wide = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(values.shape)
        for i in range(rows):
            for j in range(columns):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scales[i, j] = values[block].abs().max() / 448
                codes[block] = (values[block] / scales[i, j]).to(torch.float8_e4m3fn)
                wide[block] = codes[block].float() * scales[i, j]
        stored[name], stored[f"{name}_scale_inv"], read[name] = codes, scales, wide
    return stored, read


def latent_weights(model, seed):
    """Fills a model with latent attention; returns its state."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        spread = tensor.shape[-1] ** -0.5
        if name.endswith("k_norm.bias"):
            values = 0.2 * values
        elif "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("e_score_correction_bias"):
            values = 0.3 * values
        elif "embed_tokens" not in name:
            peaky = any(part in name for part in ("q_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"))
            values = values * spread * (1.5 if peaky else 2 if "lm_head" in name or name.endswith("gate.weight") else 1)
        state[name] = values
    return state


def random_weights(model, seed):
    """Fills the model; returns its state without tied duplicates."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        fan_in = tensor.shape[-1]
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values = 0.3 * values
        elif "q_proj" in name or "k_proj" in name:
            values = values * 1.5 / fan_in**0.5
        elif "embed_tokens" in name:
            values = values * (0.35 if model.config.tie_word_embeddings else 1)
        elif name.endswith("mlp.gate.weight"):
            values = values * 3 / fan_in**0.5
        elif "lm_head" in name:
            values = values * 2 / fan_in**0.5
        else:
            values = values / fan_in**0.5
        if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            state[name] = values
    return state


def as_published(state, block):
    """The experts of a layer, which transformers 5 has as one tensor, under the names of checkpoints."""
    gate, up, down = ("w1", "w3", "w2") if block == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, values in state.items():
        if ".mlp.experts." not in name:
            out[name.replace(".mlp.", f".{block}.")] = values
            continue
        experts = name.split(".mlp.")[0] + f".{block}.experts"
        for e, matrix in enumerate(values):
            parts = {gate: matrix.chunk(2)[0], up: matrix.chunk(2)[1]} if "gate_up" in name else {down: matrix}
            out.update({f"{experts}.{e}.{part}.weight": rows for part, rows in parts.items()})
    return out


def write_weights(folder, state, dtype, shards):
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    keep = ("correction_bias", "scale_inv")
    state = {name: (values if name.endswith(keep) or values.element_size() == 1 else values.to(dtype)).contiguous()
             for name, values in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(state), {}
    for shard in range(shards):
        part = {name: state[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    total = sum(values.nbytes for values in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def prompts():
    generator = torch.Generator().manual_seed(7)
    rest = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS[1:]]
    return [[1, 5, 9], *rest]


@torch.no_grad()
def greedy(model, prompt):
    """The ids that follow, their logits, and the least distance between the two best."""
    ids, rows = list(prompt), []
    for _ in range(STEPS):
        row = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        rows.append(row)
        ids.append(int(row.argmax()))
    best = torch.stack(rows).topk(2).values
    return ids[len(prompt):], torch.stack(rows), float((best[:, 0] - best[:, 1]).min())


def make(name):
    folder, spec = HERE / name, MODELS[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(spec["config"], indent=2) + "\n")
    plain = {key: value for key, value in spec["config"].items() if key != "quantization_config"}
    config = transformers.AutoConfig.for_model(**plain)
    empty = transformers.AutoModelForCausalLM.from_config(config)
    dtype = getattr(torch, spec["config"].get("dtype") or spec["config"]["torch_dtype"])

    def measure(seed):
        state, read = latent_weights(empty, seed) if spec.get("latent") else random_weights(empty, seed), folder
        if spec.get("mtp"):
            state = mtp.with_module(state, empty, seed)
        if spec.get("experts"):
            state = as_published(state, spec["experts"])
        if spec.get("fp8"):
            state, wide = to_fp8(state)
            read = Path(tempfile.mkdtemp())
            (read / "config.json").write_text(json.dumps(plain))
            exact = (*FP8_NAMES, "correction_bias")
            write_weights(read, {name: values if name.endswith(exact) else values.to(dtype).float()
                                 for name, values in wide.items()}, torch.float32, 1)
        write_weights(folder, state, dtype, spec.get("shards", 1))
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            read, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not info["missing_keys"], f"{name}: {info['missing_keys']} are drawn at random"
        model.eval()
        answers = [greedy(model, prompt) for prompt in prompts()]
        varied = all(len(set(ids)) >= 6 for ids, _, _ in answers)
        gap, drafts = min(gap for _, _, gap in answers), None
        if spec.get("indexer"):
            model.set_experts_implementation("eager")  # the others have no fp64
            exact = [rows for _, rows, _ in map(partial(greedy, model.double()), prompts())]
            varied = varied and all(torch.allclose(x, rows, atol=1e-4) for x, (_, rows, _) in zip(exact, answers))
        if spec.get("mtp"):
            drafts, draft_gap, varied_drafts = mtp.drafts(folder, spec["config"], prompts(), answers)
            gap, varied = min(gap, draft_gap), varied and varied_drafts
        return gap if varied else 0, answers, drafts

    gap, seed = max((measure(seed)[0], seed) for seed in range(SEEDS))
    gap, answers, drafts = measure(seed)
    assert gap > 1e-3, f"{name}: no seed keeps the two best logits 1e-3 apart"

    eos = spec["eos"]
    if eos == "ninth":  # the first id of the second answer, from its ninth on, that is new there
        ids = answers[1][0]
        eos = next(id for i, id in enumerate(ids) if i >= 8 and id not in ids[:i])
    generation = {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": eos,
                  "transformers_version": "4.57.0"}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    expected = {"prompts": prompts(), "output_ids": [ids for ids, _, _ in answers], "least_gap": round(gap, 4),
                "seed": seed, "torch": torch.__version__, "transformers": transformers.__version__}
    if drafts:
        expected["draft_ids"] = drafts
    lines = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in expected.items())
    (folder / "expected.json").write_text("{\n" + lines + "\n}\n")
    torch.stack([rows for _, rows, _ in answers]).numpy().astype("<f4").tofile(folder / "expected_logits.f32")
    print(f"{name}: seed {seed}, least gap {gap:.4f}, logits up to {max(r.abs().max() for _, r, _ in answers):.1f}, eos {eos}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model in sys.argv[1:] or MODELS:
        make(model)
