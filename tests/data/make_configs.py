#!/usr/bin/env python3
"""Writes configs.json beside this file: changes of the tiny models' config.json, with what transformers 5 computes.

    python3 -m venv VENV && VENV/bin/pip install torch transformers
    VENV/bin/python tests/data/make_configs.py

Each case names a tiny model (make_models.py), the keys that are set (null too) and removed, and either

    "refused"   what the line must name that the case is refused with
    "outputs"   of each prompt, the ids that transformers appends greedily (fp32, eager attention, on the CPU); they end
                before the two best logits come as near to each other as TOO_NEAR

A case with outputs is one that transformers can load, and where it gives the same with and without its cache. Whether
the outputs are those of the model without the change is printed, not kept.
"""
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
STEPS = 8
TOO_NEAR = 2e-4
FAMILIES = {"llama": "tiny-llama2", "mistral": "tiny-mistral", "qwen2": "tiny-yarn", "qwen3": "tiny-qwen3",
            "mixtral": "tiny-mixtral", "qwen3_moe": "tiny-qwen3-moe"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
ALTERNATE = ["sliding_attention", "full_attention"]
FULL = ["full_attention", "full_attention"]

cases = []


def case(model, set=None, remove=(), refused=None):
    cases.append({"model": model, "set": set or {}, "remove": list(remove), **({"refused": refused} if refused else {})})


def of_every_family(model):
    """Changes that every family takes alike. The base of qwen3 has rope_parameters, the others rope_scaling."""
    def only(rope):
        return {"rope_parameters": rope, "rope_scaling": None}

    # Which object counts, and which key of it.
    case(model, {**only(PLAIN), "rope_theta": 500.0})
    case(model, {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0})
    case(model, {"rope_parameters": PLAIN, "rope_scaling": LINEAR})
    case(model, {"rope_parameters": LLAMA3, "rope_scaling": YARN, "rope_theta": 500.0})
    case(model, {"rope_parameters": {**YARN, "rope_theta": 500.0}, "rope_scaling": {**LINEAR, "rope_theta": 2000.0}})
    case(model, {"rope_parameters": {**LINEAR, "rope_theta": 10000.0}, "rope_scaling": {}})
    case(model, only({"rope_type": "linear", "type": "yarn", "factor": 2}))
    case(model, only({"type": "default"}))
    # Every scaling, whole and with what it may leave out.
    case(model, only({**LLAMA3, "rope_theta": 10000.0}))
    case(model, {**only({**LLAMA3, "rope_theta": 10000.0}), "original_max_position_embeddings": 16})
    case(model, {**only(YARN), "original_max_position_embeddings": 16})
    case(model, {**only({k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}),
                 "max_position_embeddings": 256})
    case(model, only({**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}))
    case(model, only({**YARN, "mscale": 2.0, "attention_factor": None}))
    case(model, only({**YARN, "attention_factor": 1.5, "beta_fast": 0, "beta_slow": 3}))
    case(model, {**only(PLAIN), "original_max_position_embeddings": 16})
    # Parts of heads: passed over without a scaling.
    case(model, only({**PLAIN, "partial_rotary_factor": 0.5}))
    case(model, {**only(PLAIN), "partial_rotary_factor": 0.5})
    case(model, only({**LINEAR, "partial_rotary_factor": 0.5}), refused="partial_rotary_factor")
    case(model, {**only(LLAMA3), "partial_rotary_factor": 0.25}, refused="partial_rotary_factor")
    case(model, {**only({**YARN, "partial_rotary_factor": 1.0}), "partial_rotary_factor": 0.5})
    # Rotary positions that are not supported, or not whole.
    case(model, only({"rope_type": "dynamic", "factor": 2.0}), refused="rope_type")
    case(model, {"rope_parameters": PLAIN, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8,
                                                            "long_factor": [2.0] * 8}}, refused="rope_type")
    case(model, only({"rope_type": "proportional", "partial_rotary_factor": 0.5}), refused="rope_type")
    case(model, only({"rope_type": "linear"}), refused="factor")
    case(model, only({**YARN, "truncate": False}), refused="truncate")
    case(model, only({**YARN, "llama_4_scaling_beta": 0.1}), refused="llama_4_scaling_beta")
    case(model, only({"full_attention": PLAIN, "sliding_attention": LINEAR}), refused="full_attention")
    case(model, {**only(None), "rope_theta": None}, refused="rope_theta")
    case(model, {**only(YARN), "original_max_position_embeddings": None}, refused="original_max_position_embeddings")
    case(model, only({"type": None}), refused="type")
    # Keys that other families have.
    case(model, {"rms_norm_eps": 0.5})
    case(model, {"attention_dropout": 0.5, "chunk_size_feed_forward": 16, "output_attentions": False})
    case(model, {"attention_chunk_size": None, "attention_output_gate": False, "is_causal": True})
    for key, value in {
        "is_causal": False, "dual_chunk_attention_config": {"chunk_size": 32}, "attn_logit_softcapping": 3.0,
        "attention_chunk_size": 32, "attention_output_gate": True, "attention_multiplier": 0.5,
        "residual_multiplier": 0.5, "logits_scaling": 4.0, "query_pre_attn_scalar": 64, "qk_layernorm": True,
        "rotary_dim": 4, "no_rope_layers": [0, 1],
        "per_layer_config": {"1": {"intermediate_size": 32}},
    }.items():
        case(model, {key: value}, refused=key)
    case(model, {"is_causal": None}, refused="is_causal")
    case(model, {"hidden_act": "gelu"}, refused="hidden_act")
    case(model, {"tie_word_embeddings": True}, refused="lm_head.weight")


def of_llama():
    case("tiny-llama2", {"sliding_window": 16}, refused="sliding_window")
    case("tiny-llama2", {"use_sliding_window": True, "sliding_window": None}, refused="use_sliding_window")
    case("tiny-llama2", {"sliding_window": None, "use_sliding_window": False})
    case("tiny-llama2", {"layer_types": FULL})
    case("tiny-llama2", {"layer_types": ALTERNATE}, refused="layer_types")
    case("tiny-llama2", {"num_key_value_heads": None})
    case("tiny-llama2", {"pretraining_tp": 2})
    case("tiny-llama2", {"attention_bias": True}, refused="q_proj.bias")
    case("tiny-llama2", {"mlp_bias": True}, refused="gate_proj.bias")
    case("tiny-sharded", {"attention_bias": False})
    case("tiny-sharded", {"mlp_bias": False})
    case("tiny-sharded", {"attention_bias": False, "mlp_bias": False})
    case("tiny-llama", {"rope_theta": 500.0})
    case("tiny-llama", {"original_max_position_embeddings": 16})


def of_mistral():
    case("tiny-mistral", {"sliding_window": None})
    case("tiny-mistral", {"sliding_window": 7})
    case("tiny-mistral", {"sliding_window": 100})
    case("tiny-mistral", remove=["sliding_window"])
    case("tiny-mistral", {"layer_types": ALTERNATE})
    case("tiny-mistral", {"layer_types": ALTERNATE[::-1], "sliding_window": 40})
    case("tiny-mistral", {"layer_types": FULL})
    case("tiny-mistral", {"layer_types": None})
    case("tiny-mistral", {"layer_types": ALTERNATE, "sliding_window": None}, refused="layer_types")
    case("tiny-mistral", {"layer_types": ["full_attention", "chunked_attention"]}, refused="layer_types")
    case("tiny-mistral", {"use_sliding_window": True}, refused="use_sliding_window")
    case("tiny-mistral", {"use_sliding_window": False})
    case("tiny-mistral", {"max_window_layers": 1}, refused="max_window_layers")
    case("tiny-mistral", {"attention_bias": True, "mlp_bias": True})


def of_qwen(model):
    used = {"use_sliding_window": True, "sliding_window": 16}
    for layers in (0, 1, 2):
        case(model, {**used, "max_window_layers": layers, "layer_types": None})
    case(model, {**used, "layer_types": None}, remove=["max_window_layers"])
    case(model, {**used, "layer_types": ALTERNATE, "max_window_layers": 2})
    case(model, {**used, "layer_types": FULL, "max_window_layers": 0})
    case(model, {**used, "sliding_window": None, "max_window_layers": 0, "layer_types": None})
    case(model, {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0, "layer_types": None})
    case(model, {"sliding_window": 16, "max_window_layers": 0, "layer_types": None}, remove=["use_sliding_window"])
    case(model, {"use_sliding_window": False, "layer_types": ALTERNATE}, refused="layer_types")
    case(model, {**used, "layer_types": ["sliding_attention"]}, refused="layer_types")
    case(model, {"mlp_bias": True})


def of_mixtral():
    for window in (None, 7, 100):
        case("tiny-mixtral", {"sliding_window": window})
    case("tiny-mixtral", remove=["sliding_window"])
    case("tiny-mixtral", remove=["rope_theta"])
    case("tiny-mixtral", {"layer_types": FULL})
    case("tiny-mixtral", {"use_sliding_window": True}, refused="use_sliding_window")
    case("tiny-mixtral", {"max_window_layers": 1}, refused="max_window_layers")
    case("tiny-mixtral", {"norm_topk_prob": True}, refused="norm_topk_prob")
    case("tiny-mixtral", {"num_local_experts": 4}, refused="block_sparse_moe.gate.weight")
    case("tiny-mixtral", {"num_local_experts": None}, refused="num_local_experts")
    case("tiny-mixtral", {"intermediate_size": 16}, refused="experts.0.w1.weight")
    case("tiny-mixtral", {"router_jitter_noise": 0.5, "output_router_logits": False, "router_aux_loss_coef": 1.0})
    case("tiny-mixtral", {"attention_bias": True, "mlp_bias": True})


def of_qwen3_moe(model):
    used = {"use_sliding_window": True, "sliding_window": 16}
    for layers in (0, 1, 2):
        case(model, {**used, "max_window_layers": layers})
    case(model, {"use_sliding_window": False, "sliding_window": 16})
    case(model, {**used, "layer_types": ["sliding_attention"] * 2})
    case(model, {"layer_types": FULL})
    case(model, {"norm_topk_prob": False})
    case(model, remove=["norm_topk_prob"])
    case(model, {"mlp_only_layers": None})
    case(model, {"mlp_only_layers": [1]}, refused="layers.1.mlp.gate_proj.weight")
    case(model, {"decoder_sparse_step": 2}, refused="layers.0.mlp.gate_proj.weight")
    case(model, {"num_experts": 4}, refused="mlp.gate.weight")
    case(model, {"moe_intermediate_size": 8}, refused="experts.0.gate_proj.weight")
    case(model, {"intermediate_size": 8, "mlp_bias": True})
    case(model, {"attention_bias": True}, refused="q_proj.bias")
    case("tiny-joined-moe", {"norm_topk_prob": True})
    case("tiny-joined-moe", {"mlp_only_layers": []}, refused="layers.1.mlp.gate.weight")
    case("tiny-joined-moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}, refused="layers.0.mlp.gate_proj.weight")
    for key, value in {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
                       "scoring_func": "sigmoid", "shared_expert_intermediate_size": 16,
                       "moe_layer_freq": 2}.items():
        case(model, {key: value}, refused=key)


def of_experts(model):
    for top_k in (1, 3, 8):
        case(model, {"num_experts_per_tok": top_k})
    case(model, {"num_experts_per_tok": 9}, refused="num_experts_per_tok")


def of_deepseek():
    def scaled(model, **rope):
        case(model, {"rope_scaling": {**YARN, "original_max_position_embeddings": 32, **rope}})

    for model in ("tiny-deepseek-v2", "tiny-deepseek-v3"):
        scaled(model, mscale=0.707, mscale_all_dim=0.707)
        scaled(model, mscale=1.0, mscale_all_dim=0.5, factor=16.0)
        scaled(model, mscale=0.5)
        case(model, {"rope_scaling": None, "rope_theta": 500.0})
        case(model, {"rope_scaling": {**LINEAR, "mscale_all_dim": 1.5}})
        case(model, {"routed_scaling_factor": 0.7, "rms_norm_eps": 0.1})
        case(model, {"n_group": 2, "topk_group": 1})
        case(model, {"n_group": 1, "topk_group": 1})
        case(model, {"num_experts_per_tok": 1})
        case(model, {"kv_lora_rank": 30}, refused="kv_a_proj_with_mqa.weight")
        case(model, {"qk_nope_head_dim": 8}, refused="self_attn.q_")
        for key, value in {
            "attention_bias": True, "num_key_value_heads": 1, "head_dim": 64, "moe_layer_freq": 2, "n_group": 3,
            "topk_group": 9, "scoring_func": "tanh", "topk_method": "best", "first_k_dense_replace": -1,
            "n_shared_experts": 0, "num_experts_per_tok": 9, "index_topk": 64, "sliding_window": 8,
            "quantization_config": {"quant_method": "gptq"}, "num_experts": 8,
        }.items():
            case(model, {key: value}, refused=key)
    case("tiny-deepseek-v2", {"topk_method": "greedy", "n_group": None, "topk_group": None})
    case("tiny-deepseek-v2", {"norm_topk_prob": True}, refused="norm_topk_prob")
    case("tiny-deepseek-v2", {"q_lora_rank": 24}, refused="q_a_proj.weight")
    case("tiny-deepseek-v2", {"rope_interleave": True}, refused="rope_interleave")
    case("tiny-deepseek-v3", {"rope_interleave": False})
    case("tiny-deepseek-v3", {"norm_topk_prob": False})
    case("tiny-deepseek-v3", {"q_lora_rank": None}, refused="q_proj.weight")
    case("tiny-deepseek-v3", {"num_nextn_predict_layers": 1})


def prompts():
    generator = torch.Generator().manual_seed(31)
    return [torch.randint(0, 128, (n,), generator=generator).tolist() for n in (5, 60, 200)]


@torch.no_grad()
def answer(model, prompt, cached):
    """The ids of greedy decoding, and before which of them two logits are too near."""
    ids, last, cache, sure = list(prompt), list(prompt), None, None
    for step in range(STEPS):
        got = model(torch.tensor([last]), use_cache=cached, past_key_values=cache)
        cache, row = got.past_key_values, got.logits[0, -1].float()
        best = row.topk(2)
        if sure is None and float(best.values[0] - best.values[1]) < TOO_NEAR:
            sure = step
        ids.append(int(best.indices[0]))
        last = ids[-1:] if cached else ids
    return ids[len(prompt):], STEPS if sure is None else sure


def compute(model, config):
    """The outputs of transformers, or what keeps it from having them."""
    with tempfile.TemporaryDirectory() as place:
        for file in (HERE / model).glob("model*.safetensors*"):
            (Path(place) / file.name).symlink_to(file)
        (Path(place) / "config.json").write_text(json.dumps(config))
        try:
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
            loaded.eval()
            if info["missing_keys"]:
                return None, f"{sorted(info['missing_keys'])[0]} is drawn at random"
            outputs = []
            for prompt in prompts():
                (ids, sure), (others, _) = answer(loaded, prompt, False), answer(loaded, prompt, True)
                if ids[:sure] != others[:sure]:
                    return None, "the cache changes the answer"
                outputs.append(ids[:sure])
            return outputs, None
        except Exception as error:
            return None, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def main():
    for model in FAMILIES.values():
        of_every_family(model)
    of_llama()
    of_mistral()
    of_qwen(FAMILIES["qwen2"])
    of_qwen(FAMILIES["qwen3"])
    of_mixtral()
    of_qwen3_moe(FAMILIES["qwen3_moe"])
    of_experts(FAMILIES["mixtral"])
    of_experts(FAMILIES["qwen3_moe"])
    of_deepseek()
    unchanged, wrong = {}, 0
    for entry in cases:
        model = entry["model"]
        config = json.loads((HERE / model / "config.json").read_text())
        unchanged.setdefault(model, compute(model, config)[0])
        config = {key: value for key, value in {**config, **entry["set"]}.items() if key not in entry["remove"]}
        outputs, why = compute(model, config)
        said = why or ("the same" if outputs == unchanged[model] else "others")
        if "refused" not in entry:
            entry["outputs"] = outputs
            short = outputs and sum(map(len, outputs)) < 12
            if why or short:
                said += " <-- no outputs to compare with"
                wrong += 1
        print(f"{model:13} {json.dumps(entry['set'])[:110]:110} {entry.get('refused', '-'):22} {said}")
    print(f"{len(cases)} cases, {sum('refused' in entry for entry in cases)} refused")
    if wrong:
        sys.exit(f"{wrong} cases are not as they should be")
    head = {"torch": torch.__version__, "transformers": transformers.__version__, "prompts": prompts()}
    lines = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    lines.append(' "cases": [\n' + ",\n".join("  " + json.dumps(entry) for entry in cases) + "\n ]")
    (HERE / "configs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
