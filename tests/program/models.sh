# Cases of program_test.sh. Models with weights, from the folders of tests/data.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

bad_model_dir() {
    expect_bad '--model-dir: none/config.json: No such file' --model-dir none
    expect_bad '--model: found with --model-dir' --model-dir "$MODELS/tiny-llama" --model model.yaml
    expect_bad '--window: found with --model-dir' --model-dir "$MODELS/tiny-llama" --window 8
    expect_bad 'request 1: found 514 tokens, expected at most the 512 positions of tiny-llama' \
        --model-dir "$MODELS/tiny-llama" --input-len 500 --output-len 15
    mkdir half && cp "$MODELS/tiny-llama/config.json" half
    expect_bad 'half: found neither model.safetensors nor' --model-dir half --requests 1 --input-len 9
    cp "$MODELS/tiny-qwen2/model.safetensors" half
    expect_bad 'the weights have no tensor lm_head.weight' --model-dir half --requests 1 --input-len 9
    cp "$MODELS/tiny-llama2/model.safetensors" half
    expect_bad 'self_attn.q_proj.weight: found shape [32, 32], expected [64, 32]' --model-dir half --requests 1 --input-len 9
    sed 's/"llama"/"gpt2"/' "$MODELS/tiny-llama/config.json" >half/config.json
    expect_bad 'half/config.json: model_type: found gpt2' --model-dir half
}

# The results of a model do not depend on how its requests are batched, cut or shared, nor on preemption.
model_dir() {
    local options=(--trace trace.jsonl --verify 0.2) way n
    for n in 60 70 50 64; do trace_line 0 "$n" 40 1; done >trace.jsonl
    for n in 1 3; do
        [ "$(few "$n")" = "$n" ] || continue
        run "$n" --model-dir "$MODELS/tiny-llama" "${options[@]}" --result-json plain.json
        expect_code 0 "a model on $n ranks"
        expect_value violations 0 plain.json
        for way in "--max-num-batched-tokens 32" "--no-enable-prefix-caching --max-num-seqs 2" \
            "--num-blocks $((18 / n + 1)) --no-enable-prefix-caching"; do
            # shellcheck disable=SC2086
            run "$n" --model-dir "$MODELS/tiny-llama" "${options[@]}" $way --result-json other.json
            expect_code 0 "a model on $n ranks with $way"
            expect_digest_of plain.json other.json
        done
        [ "$(value preemptions other.json)" -gt 0 ] || fail "nobody was preempted on $n ranks"
    done
    run 1 --model-dir "$MODELS/tiny-mistral" --dtype bf16 --requests 3 --input-len 50 --output-len 3 --verify 1
    expect_code 0 "bf16"
    grep -q 'tiny-mistral: 2 layers, 4 query and 2 KV heads of 16, bf16' out || fail "no line of the model"
}
