# Cases of program_test.sh. Models with weights, from the folders of tests/data.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

bad_model_dir() {
    expect_bad '--model-dir: none/config.json: No such file' --model-dir none
    expect_bad '--model: found with --model-dir' --model-dir "$MODELS/tiny-llama" --model model.yaml
    expect_bad '--window: found with --model-dir' --model-dir "$MODELS/tiny-llama" --window 8
    expect_bad 'request 1: found 4114 tokens, expected at most the 4096 positions of tiny-llama' \
        --model-dir "$MODELS/tiny-llama" --input-len 4100 --output-len 15
    mkdir half && cp "$MODELS/tiny-sharded/config.json" half
    expect_bad 'half: found neither model.safetensors nor' --model-dir half --requests 1 --input-len 9
    cp "$MODELS/tiny-qwen2/model.safetensors" half
    expect_bad 'half: the weights have no tensor lm_head.weight' --model-dir half --requests 1 --input-len 9
    cp "$MODELS/tiny-llama2/model.safetensors" half
    expect_bad 'half: model.layers.0.self_attn.q_proj.weight: found shape [32, 32], expected [64, 32]' --model-dir half --requests 1 --input-len 9
    cp "$MODELS/tiny-qwen3-moe/config.json" half && cp "$MODELS/tiny-qwen3/model.safetensors" half
    expect_bad 'half: the weights have no tensor model.layers.0.mlp.gate.weight' --model-dir half --requests 1 --input-len 9
    sed -i 's/"moe_intermediate_size": 16/"moe_intermediate_size": 24/' half/config.json
    cp "$MODELS/tiny-qwen3-moe/model.safetensors" half
    expect_bad 'half: model.layers.0.mlp.experts.0.gate_proj.weight: found shape [16, 32], expected [24, 32]' \
        --model-dir half --requests 1 --input-len 9
    expect_bad '--experts: found spread, expected with the --model-dir of a model that has some' \
        --model-dir "$MODELS/tiny-llama" --experts spread
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
    for way in decode all; do
        run 2 --model-dir "$MODELS/tiny-mistral" --slice-weights $way --dtype fp32 --requests 5 --input-len 40 \
            --output-len 8 --verify 0.5 --check-logits 6
        expect_code 0 "slices of the weights: $way"
    done
    run 1 --model-dir "$MODELS/tiny-mistral" --dtype bf16 --requests 3 --input-len 50 --output-len 3 --verify 1
    expect_code 0 "bf16"
    grep -q 'tiny-mistral: 2 layers, 4 query and 2 KV heads of 16, bf16' out || fail "no line of the model"
}

# Rules of the layers reach every row, which the sampled check recomputes with them, and the bits of results do not depend
# on how rows are batched, cut and preempted.
score_rules() {
    local rules=(--softcap 4 --temperature-len 40 --alibi --sink-logits) some=(--requests 5 --input-len 150 --output-len 12) n
    for n in 1 3; do
        [ "$(few "$n")" = "$n" ] || continue
        run "$n" "${some[@]}" --verify 0.1 --result-json without.json
        expect_code 0 "no rules on $n ranks"
        run "$n" "${some[@]}" "${rules[@]}" --verify 0.2 --result-json plain.json
        expect_code 0 "rules on $n ranks"
        expect_value violations 0 plain.json
        [ "$(value output_digest without.json)" != "$(value output_digest plain.json)" ] || fail "rules change nothing"
        run "$n" "${some[@]}" "${rules[@]}" --verify 0.2 --max-num-batched-tokens 40 --max-num-seqs 2 --result-json other.json
        expect_code 0 "rules in small steps on $n ranks"
        expect_digest_of plain.json other.json
    done
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=lost-rules run 1 "${some[@]}" "${rules[@]}" --verify 0.05
    expect_code 1 "rules that are lost"
    expect_line 'float64 reference'
    CPATTN_FAULT=lost-rules@start run 1 "${some[@]}" "${rules[@]}"
    expect_code 1 "rules that are lost from the start"
    expect_line 'self-test: attend with softcap'
}

# Drafts change neither tokens nor results, on any number of ranks, whatever else happens; a rank that counts wrong drafts
# of its own alone is named.
speculative() {
    local options=(--model-dir "$MODELS/tiny-llama" --trace trace.jsonl --verify 0.05 --speculative) way n
    for n in 60 70 50 64; do trace_line 0 "$n" 90 1; done >trace.jsonl
    for way in "3 --num-blocks 11 --no-enable-prefix-caching" "2 --slice-weights decode"; do
        # shellcheck disable=SC2086
        run $way "${options[@]}" off --result-json plain.json
        expect_code 0 "without drafts, ranks and options $way"
        # shellcheck disable=SC2086
        run $way "${options[@]}" ngram:4:1..3 --check-logits 64 --result-json drafts.json
        expect_code 0 "with drafts, ranks and options $way"
        [ "$(value violations drafts.json | sort -u)" = 0 ] || fail "rows or logits are wrong with drafts"
        expect_digest_of plain.json drafts.json
        # Answers of small models loop: a sixth of some 400 drafts is right.
        [ "$((10 * $(value accepted_tokens drafts.json)))" -gt "$(value draft_tokens drafts.json)" ] &&
            [ "$(value draft_tokens drafts.json)" -ge 200 ] || fail "too few drafts, or too few right ones, with $way"
        [ "$(value accepted_tokens plain.json)" = 0 ] || fail "drafts that nobody asked for"
    done
    [ "$(few 2)" = 2 ] || return 0
    run 2 "${options[@]}" ngram:3x3:1..3 --verify 0.3 --check-logits 64 --result-json drafts.json
    expect_code 0 "trees of drafts"
    [ "$(value violations drafts.json | sort -u)" = 0 ] || fail "rows or logits are wrong with trees"
    [ "$(value accepted_tokens drafts.json)" -gt 0 ] || fail "no draft of a tree was right"
    # In 16 bits the first row that is wrong may be so by too little for its mistake to be told.
    CPATTN_FAULT=flat-tree CP_ATTN=$CP_ATTN_FAULTS run 2 "${options[@]}" ngram:4x2:1..3 --verify 0.3 --dtype fp32
    expect_code 1 "drafts that see other branches"
    said 'the query sees drafts of other branches of its tree' || fail "it is not named: $(our_lines)"
    CPATTN_FAULT=adjusted-length CP_ATTN=$CP_ATTN_FAULTS run 2 "${options[@]}" ngram:4:1..3
    expect_code 3 "a rank that counts wrong drafts of its own alone"
    said -E 'chunk of request [0-9]+ starts at [0-9]+, the cache of sequence [0-9]+ holds' || fail "it is not named: $(our_lines)"
}

# expected_ids MODEL PROMPT: what transformers continued prompt 0, 1 or 2 with, ids with spaces between.
expected_ids() {
    sed -n 's/^ "output_ids": \[\(.*\)\],$/\1/p' "$MODELS/$1/expected.json" | sed 's/\], \[/\n/g' | tr -d '[],' |
        sed -n "$(($2 + 1))p"
}

# prompt_ids MODEL PROMPT: with commas between.
prompt_ids() {
    sed -n 's/^ "prompts": \[\(.*\)\],$/\1/p' "$MODELS/$1/expected.json" | sed 's/\], \[/\n/g' | tr -d '[] ' |
        sed -n "$(($2 + 1))p"
}

# The tokens of transformers, on any number of ranks, in any chunks; JSON has the same, with log-probabilities.
generate() {
    local model n
    for n in 1 2 3 4; do
        [ "$(few "$n")" = "$n" ] || continue
        run "$n" generate --model-dir "$MODELS/tiny-llama" --prompt-ids 1,5,9 --max-tokens 16 --temperature 0 --dtype fp32
        expect_code 0 "generate on $n ranks"
        [ "$(head -1 out)" = "$(expected_ids tiny-llama 0)" ] || fail "other tokens on $n ranks: $(head -1 out)"
        grep -q '^16 tokens (length) after 3 of the prompt, TTFT' out || fail "no line of times: $(cat out)"
    done
    for model in tiny-qwen3 tiny-yarn tiny-sharded; do
        prompt_ids "$model" 2 >prompt
        run 2 generate --model-dir "$MODELS/$model" --prompt-ids @prompt --max-num-batched-tokens 48 --json --dtype fp32
        expect_code 0 "generate --json"
        grep -qF "\"ids\": [$(expected_ids "$model" 2 | sed 's/ /, /g')]" out || fail "other tokens of $model: $(cat out)"
        grep -qF '"reason": "length"' out || fail "another reason"
    done
}

# Latent attention: decode absorbs its queries, prompts expand keys; on any number of ranks, in chunks, with drafts, from
# caches in FP8 too, whose rows the sampled check recomputes; and the network's logits are those of a plain forward.
generate_latent() {
    local model n way
    for model in tiny-deepseek-v2 tiny-deepseek-v3 tiny-deepseek-fp8; do
        n=$([ "$model" = tiny-deepseek-v3 ] && few 3 || echo 1)
        way=$([ "$model" = tiny-deepseek-v2 ] && echo absorb || echo expand)
        prompt_ids "$model" 2 >prompt
        run "$n" generate --model-dir "$MODELS/$model" --prompt-ids @prompt --dtype fp32 --verify 0.2 \
            --max-num-batched-tokens 48 --speculative ngram:4:1..3 --check-logits 6 --short-prompts "$way" --result-json result.json
        expect_code 0 "$model on $n ranks"
        [ "$(head -1 out)" = "$(expected_ids "$model" 2)" ] || fail "other tokens of $model: $(head -1 out)"
        [ "$(value violations result.json | sort -u)" = 0 ] || fail "rows or logits of $model are wrong"
        expect_value attention latent result.json
        expect_value token_layer_bytes 192 result.json
    done
    prompt_ids tiny-deepseek-v32 2 >prompt # whose rows attend 24 of up to 145 keys, chosen by keys of 128 bytes beside
    for n in 1 2 3 4; do
        [ "$(few "$n")" = "$n" ] || continue
        run "$n" generate --model-dir "$MODELS/tiny-deepseek-v32" --prompt-ids @prompt --dtype fp32 --verify 0.2 \
            --block-size "$((4 << n))" --max-num-batched-tokens "$((34 * n))" --speculative ngram:4x2:1..3 --check-logits 6 \
            --result-json result.json
        expect_code 0 "keys that an indexer chooses, on $n ranks"
        [ "$(head -1 out)" = "$(expected_ids tiny-deepseek-v32 2)" ] || fail "other tokens on $n ranks: $(head -1 out)"
        [ "$(value violations result.json | sort -u)" = 0 ] || fail "rows or logits are wrong on $n ranks"
        expect_value token_layer_bytes 320 result.json
    done
    [ "$device" = host ] || return 0
    run 2 --model-dir "$MODELS/tiny-deepseek-v32" --kv-cache-dtype fp8_e4m3 --requests 3 --input-len 90 --output-len 8 \
        --verify 0.3
    expect_code 0 "index keys in codes"
    run 2 --model-dir "$MODELS/tiny-deepseek-v3" --dtype fp32 --kv-cache-dtype fp8_e4m3 --experts spread --requests 3 \
        --input-len 50 --output-len 4 --verify 0.3
    expect_code 0 "a cache in FP8, and experts that are spread"
}

# A prompt of 4096 tokens, or of 1536 on one number of ranks alone, whose rows attend 64 keys each: on every number of ranks
# it is gone on with by the same tokens, and the digest depends on no chunk and no block; on four it depends on the rank of
# the first token, as ranks meet in pairs, and so on blocks. Index keys in fp32 and in codes. Each choice that is checked
# is right.
chosen_keys() { # RANKS...
    local n keys way ways length=4096
    [ $# -gt 1 ] || length=1536
    cp -r "$MODELS/tiny-deepseek-v32" long && chmod -R u+w long
    sed -i 's/"index_topk": 24/"index_topk": 64/; s/"max_position_embeddings": 4096/"max_position_embeddings": 8192/' \
        long/config.json
    awk -v n=$length 'BEGIN { for (i = 0; i < n; i++) printf "%s%d", i ? "," : "", (i * i * 31 + i % 17 * 7) % 126 + 1 }' >prompt
    for keys in auto fp8_e4m3; do
        rm -f tokens
        for n in "$@"; do
            rm -f other.json
            ways=("512 16" "$length 64")
            [ "$n" -lt 4 ] || ways=("512 16" "$length 16")
            for way in "${ways[@]}"; do
                run "$n" generate --model-dir long --prompt-ids @prompt --dtype fp32 --kv-cache-dtype "$keys" \
                    --max-num-batched-tokens "${way% *}" --block-size "${way#* }" --interleave 64 --max-tokens 4 \
                    --verify 0.001 --skip-self-test --result-json result.json
                expect_code 0 "$length tokens on $n ranks, index keys in $keys, chunks and blocks of $way"
                [ "$(value violations result.json | sort -u)" = 0 ] || fail "a row is wrong on $n ranks, keys in $keys"
                [ "$(value selection_rows result.json)" -gt 5 ] || fail "too few rows are checked on $n ranks"
                head -1 out >>tokens
                [ ! -e other.json ] || expect_digest_of other.json result.json
                mv result.json other.json
            done
        done
        [ "$(sort -u tokens | wc -l)" = 1 ] || fail "other tokens: $(cat tokens)"
    done
}

# renamed MODEL SED: a folder `changed` whose weights are those of the model but for names, or shapes, of as many bytes.
renamed() {
    rm -rf changed && cp -r "$MODELS/$1" changed && chmod -R u+w changed
    LC_ALL=C sed -i "$2" changed/model.safetensors
}

# The model's own module for the token after next drafts: the digest is that of a run without, on any number of ranks and
# in chunks; where requests give way, a token may be computed in the other form of latents. The rows of its layer are
# checked like others.
mtp() {
    local options=(--model-dir "$MODELS/tiny-deepseek-mtp" --trace trace.jsonl --dtype fp32) way
    for n in 60 70 64; do trace_line 0 "$n" 24 1; done >trace.jsonl
    run 2 "${options[@]}" --max-num-batched-tokens 48 --result-json plain.json
    expect_code 0 "without a module that drafts"
    for way in "2 --max-num-batched-tokens 48" "3 --num-blocks $((12 / $(few 3))) --no-enable-prefix-caching"; do
        # shellcheck disable=SC2086
        run $way "${options[@]}" --speculative mtp:1 --verify 0.3 --check-logits 16 --result-json drafts.json
        expect_code 0 "with a module that drafts, ranks and options $way"
        [ "$(value violations drafts.json | sort -u)" = 0 ] || fail "rows or logits are wrong with drafts"
        case $way in 2*) expect_digest_of plain.json drafts.json ;; esac
        # A fifth of the drafts of this model is right.
        [ "$((10 * $(value accepted_tokens drafts.json)))" -gt "$(value draft_tokens drafts.json)" ] || fail "too few are right"
        [ "$(value draft_tokens drafts.json)" -ge 40 ] || fail "too few drafts"
    done
    expect_bad 'expected another way to draft, as '"$MODELS"'/tiny-deepseek-v3/config.json has no num_nextn_predict_layers' \
        generate --model-dir "$MODELS/tiny-deepseek-v3" --prompt-ids 1 --speculative mtp:1
    renamed tiny-deepseek-mtp 's/model.layers.2.enorm/model.layers.2.xnorm/'
    expect_bad 'changed: the weights have no tensor model.layers.2.enorm.weight' \
        generate --model-dir changed --prompt-ids 1 --speculative mtp:1
    renamed tiny-deepseek-mtp 's/model.layers.2.embed_tokens/model.layers.2.embed_tokenz/'
    run 1 generate --model-dir changed --prompt-ids 1,5,9 --max-tokens 16 --speculative mtp:1 --dtype fp32
    expect_code 0 "a module without an embedding of its own"
    [ "$(head -1 out)" = "$(expected_ids tiny-deepseek-mtp 0)" ] || fail "other tokens: $(head -1 out)"
}

# A checkpoint of latents that lacks something is refused with a line that names it.
bad_latents() {
    local layer=model.layers.1.self_attn
    renamed tiny-deepseek-v3 's/kv_b_proj/kv_x_proj/'
    expect_bad 'changed: the weights have no tensor model.layers.0.self_attn.kv_b_proj.weight' \
        generate --model-dir changed --prompt-ids 1
    renamed tiny-deepseek-v3 's/e_score_correction/e_score_collection/g'
    expect_bad 'changed: the weights have no tensor model.layers.1.mlp.gate.e_score_correction_bias' \
        generate --model-dir changed --prompt-ids 1
    renamed tiny-deepseek-fp8 's/\("'$layer'.kv_b_proj.weight_scale_inv":{"dtype":"F32","shape":\)\[2,1\]/\1[1,2]/'
    expect_bad "$layer.kv_b_proj.weight_scale_inv: found 2 scales in 2 dimensions, expected [2, 1]" \
        generate --model-dir changed --prompt-ids 1
    renamed tiny-deepseek-v3 's/"'$layer'.kv_b_proj.weight":{"dtype":"BF16","shape":\[160,32\]/"'$layer'.kv_b_proj.weight":{"dtype":"BF16","shape":[32,160]/'
    expect_bad "$layer.kv_b_proj.weight: found shape [32, 160], expected [160, 32]" \
        generate --model-dir changed --prompt-ids 1
    renamed tiny-deepseek-v32 's/indexer.weights_proj/indexer.weights_pro_/g'
    expect_bad 'changed: the weights have no tensor model.layers.0.self_attn.indexer.weights_proj.weight' \
        generate --model-dir changed --prompt-ids 1
    renamed tiny-deepseek-v32 's/"\('$layer'.indexer.wk.weight\)":{"dtype":"BF16","shape":\[32,32\]/"\1":{"dtype":"BF16","shape":[16,64]/'
    expect_bad "$layer.indexer.wk.weight: found shape [16, 64], expected [32, 32]" \
        generate --model-dir changed --prompt-ids 1
    ranks=2 expect_bad 'slices are not supported with latent attention' \
        generate --model-dir "$MODELS/tiny-deepseek-v3" --prompt-ids 1 --slice-weights all
}

# The same with experts, in files of a tensor for each and of one for all, replicated or spread; results have the same bits,
# and the ranks that have no tokens work for those that have.
experts() {
    local model n options=(--trace trace.jsonl --verify 0.2)
    for n in 1 2 3 4; do
        [ "$(few "$n")" = "$n" ] || continue
        model=$(echo tiny-mixtral tiny-qwen3-moe tiny-joined-moe tiny-mixtral | cut -d ' ' -f "$n")
        prompt_ids "$model" 2 >prompt
        run "$n" generate --model-dir "$MODELS/$model" --prompt-ids @prompt --max-num-batched-tokens 48 --dtype fp32 \
            --speculative ngram:4:1..3
        expect_code 0 "generate of $model on $n ranks"
        [ "$(head -1 out)" = "$(expected_ids "$model" 2)" ] || fail "other tokens of $model on $n ranks: $(head -1 out)"
    done
    if [ "$device" != host ]; then
        prompt_ids tiny-mixtral 2 >prompt
        run "$(few 2)" generate --model-dir "$MODELS/tiny-mixtral" --prompt-ids @prompt --max-num-batched-tokens 48 \
            --dtype fp32 --experts spread --slice-weights off
        expect_code 0 "experts on one rank each"
        [ "$(head -1 out)" = "$(expected_ids tiny-mixtral 2)" ] || fail "other tokens: $(head -1 out)"
        return
    fi
    for n in 60 70 50 64; do trace_line 0 "$n" 20 1; done >trace.jsonl
    for model in "3 tiny-mixtral" "2 tiny-qwen3-moe --local-context 4096"; do
        # shellcheck disable=SC2086
        set -- ${model/tiny/--model-dir $MODELS/tiny}
        run "$@" "${options[@]}" --check-logits 8 --result-json plain.json
        expect_code 0 "experts on every rank: $model"
        run "$@" "${options[@]}" --experts spread --max-num-batched-tokens 32 --result-json spread.json
        expect_code 0 "experts on one rank each: $model"
        expect_digest_of plain.json spread.json
        expect_value row_bytes_sent 0 plain.json
        [ "$(value row_bytes_sent spread.json)" -gt 0 ] || fail "no row has travelled"
    done
    run 2 --model-dir "$MODELS/tiny-mixtral" --slice-weights decode --dtype bf16 --requests 2 --input-len 16 --output-len 4
    expect_code 0 "slices of experts in bf16"
    run 2 --model-dir "$MODELS/tiny-deepseek-v2" --dry-run --requests 1 --input-len 16 --output-len 4
    expect_code 0 "a dry run over latents"
    grep -q 'prompts 32' out err || fail "widths of heads: $(cat out err)"
    run 2 --model-dir "$MODELS/tiny-joined-moe" --experts spread --slice-weights decode --dtype fp32 --requests 3 \
        --input-len 40 --output-len 8 --check-logits 8
    expect_code 0 "experts on one rank each, with slices of the weights in decode"
}

# A prompt of text is that of its ids, and the answer comes as text: on several ranks, from a file, as JSON.
generate_text() {
    local text=(generate --model-dir "$MODELS/tiny-llama" --dtype fp32 --max-tokens 20) ids
    run 2 "${text[@]}" --prompt 'Grüße, 世界' --json
    expect_code 0 "a prompt of text"
    ids=$(sed -n 's/^{"prompt_ids": \[\([0-9, ]*\)\].*/\1/p' out)
    [ "${ids%%,*}" = 1 ] || fail "the prompt does not begin with the token of the beginning: $(cat out)"
    sed 's/"text".*//' out >by_text
    printf '%b\n' "$(sed -n 's/.*"text": "\(.*\)", "logprobs".*/\1/p' out)" >text
    run 1 "${text[@]}" --prompt-ids "${ids// /}" --json
    [ "$(sed 's/"logprobs".*//' out)" = "$(cat by_text)" ] || fail "other ids than those of the text: $(cat out by_text)"
    printf 'Grüße, 世界' >prompt
    run 1 "${text[@]}" --prompt @prompt
    expect_code 0 "a prompt of a file"
    grep -q "^20 tokens (length) after $(wc -w <<<"$ids") of the prompt, TTFT" out || fail "no line of times: $(cat out)"
    grep -q 'ũ.*Fran' text || fail "another text than expected: $(cat text)"
    head -n -1 out | cmp - text || fail "another text than in the JSON: $(cat out text)"
}

# A chat is the text that its template makes of it; an answer ends in front of a text that is named; prompts may be long.
generate_chat() {
    local text=(generate --model-dir "$MODELS/tiny-llama" --dtype fp32 --max-tokens 20) ids whole
    run 1 "${text[@]}" --prompt Hello --chat --system "Be brief" --chat-template chatml --json
    expect_code 0 "a chat"
    ids=$(sed 's/"logprobs".*//' out)
    printf '<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n' >chat
    run 1 "${text[@]}" --prompt @chat --json
    [ "$(sed 's/"prompt_ids": \[1, /"prompt_ids": [/; s/"logprobs".*//; s/"ids".*//' out)" = "${ids%%\"ids\"*}" ] ||
        fail "another prompt than the template's: $(cat out; echo "$ids")"
    cp -r "$MODELS/tiny-llama" plain && chmod -R u+w plain && rm plain/tokenizer_config.json
    expect_bad '--chat: found no chat template in plain' generate --model-dir plain --prompt a --chat
    run 1 "${text[@]}" --prompt 'Grüße, 世界'
    whole=$(head -n -1 out)
    run 2 "${text[@]}" --prompt 'Grüße, 世界' --stop Fran
    expect_code 0 "an answer with a stop"
    [ "$(head -n -1 out)" = "${whole%%Fran*}" ] || fail "it does not end before its stop: $(cat out); $whole"
    grep -q ' tokens (stop) after' out || fail "no line of the end: $(cat out)"
    run 1 "${text[@]}" --prompt 'Grüße, 世界' --stop Fran --json
    [[ $(cat out) = *'Fran'* ]] && fail "the JSON has the stop: $(cat out)"
    grep -qF '"reason": "stop"' out || fail "another reason in the JSON: $(cat out)"
    run 1 "${text[@]}" --prompt 'Grüße, 世界' --stop Fran --min-tokens 20
    [ "$(head -n -1 out)" = "$whole" ] || fail "a stop ends it before --min-tokens: $(cat out)"
    run 1 "${text[@]}" --prompt 'Grüße, 世界' --stop 'Francisco was not there'
    [ "$(head -n -1 out)" = "$whole" ] || fail "a stop that never comes changes the text: $(cat out)"
    run 2 generate --model-dir "$MODELS/tiny-llama" --max-tokens 2 --prompt-ids "$(yes 7 | head -700 | paste -sd,)"
    expect_code 0 "a prompt of 1,400 bytes"
    grep -q 'after 700 of the prompt' out || fail "another length of the prompt: $(cat out)"
}

# An answer ends at the model's own end tokens, unless these are ignored, and at those that are named.
generate_ends() {
    local all ids
    all=$(expected_ids tiny-llama2 1)
    read -ra ids <<<"${all%% 31 *} 31"
    run 1 generate --model-dir "$MODELS/tiny-llama2" --prompt-ids "$(prompt_ids tiny-llama2 1)" --dtype fp32
    expect_code 0 "an answer that ends"
    [ "$(head -1 out)" = "${ids[*]}" ] || fail "it does not end with 31: $(head -1 out)"
    grep -q "^${#ids[@]} tokens (stop) after 40 of the prompt" out || fail "no line of the end: $(cat out)"
    run 2 generate --model-dir "$MODELS/tiny-llama2" --prompt-ids "$(prompt_ids tiny-llama2 1)" --ignore-eos --dtype fp32
    [ "$(head -1 out)" = "$all" ] || fail "it ends although that is ignored: $(head -1 out)"
    run 2 generate --model-dir "$MODELS/tiny-llama2" --prompt-ids "$(prompt_ids tiny-llama2 1)" --stop-ids "${ids[2]}" --dtype fp32
    grep -q ' tokens (stop) after' out || fail "a stop id does not end it"
    run 2 generate --model-dir "$MODELS/tiny-llama2" --prompt-ids "$(prompt_ids tiny-llama2 1)" --dtype fp32 \
        --min-tokens $((${#ids[@]} + 2))
    [ "$(head -1 out | wc -w)" -ge $((${#ids[@]} + 2)) ] || fail "it ends before --min-tokens: $(head -1 out)"
    run 1 generate --model-dir "$MODELS/tiny-llama2" --prompt-ids "$(prompt_ids tiny-llama2 1)" --dtype fp32 \
        --max-tokens 3 --logit-bias 31:-100,7:50
    [ "$(head -1 out)" = "7 7 7" ] || fail "a bias changes nothing: $(head -1 out)"
    # A logit that is not finite, of a weight of the last product: the request fails, and no token is made up.
    cp -r "$MODELS/tiny-llama2" nan && chmod -R u+w nan
    printf '\000\176' | dd of=nan/model.safetensors bs=1 conv=notrunc status=none \
        seek=$((8 + $(od -An -tu8 -N8 nan/model.safetensors)))
    run 1 generate --model-dir nan --prompt-ids 1,2 --max-tokens 4 --dtype fp32
    expect_code 1 "logits that are not finite"
    grep -q 'not finite: the logits of its next token' out err || fail "no reason: $(cat out err)"
    ! grep -q 4294967295 out || fail "a token that is none: $(cat out)"
}

# Draws depend on the seed alone, and logits of a run are those of a plain forward.
generate_draws() {
    local options=(generate --model-dir "$MODELS/tiny-qwen2" --prompt-ids "3,2,1" --temperature 1.5 --top-k 50 --top-p 0.95
        --repetition-penalty 1.2 --ignore-eos --dtype fp32 --seed)
    run 1 "${options[@]}" 1 --check-logits 8 --result-json result.json
    expect_code 0 "draws"
    expect_value tokens 8 result.json
    grep -q '^logits *8 tokens compared with a plain forward, 0 violations' out || fail "no verdict: $(cat out)"
    head -1 out >one
    run 2 "${options[@]}" 1
    [ "$device" != host ] || [ "$(head -1 out)" = "$(cat one)" ] || fail "two ranks draw otherwise"
    run 1 "${options[@]}" 2
    [ "$(head -1 out)" != "$(cat one)" ] || fail "another seed draws the same"
}

# An answer may be imposed; beside it stands what would have been the most probable.
generate_given() {
    local ids
    ids=$(expected_ids tiny-qwen3 1 | sed 's/ /, /g')
    run 2 generate --model-dir "$MODELS/tiny-qwen3" --prompt-ids "$(prompt_ids tiny-qwen3 1)" --given-ids "$ids" --json --dtype fp32
    expect_code 0 "given ids"
    grep -qF "\"ids\": [$ids], " out || fail "other ids than the given ones: $(cat out)"
    grep -qF "\"best_ids\": [$ids], " out || fail "other ids are the most probable ones: $(cat out)"
    run 2 generate --model-dir "$MODELS/tiny-qwen3" --prompt-ids "$(prompt_ids tiny-qwen3 1)" --given-ids 7,7,7 --json --dtype fp32
    grep -qF '"ids": [7, 7, 7], ' out || fail "other ids than the given ones: $(cat out)"
    grep -qF "\"best_ids\": [${ids%%,*}, " out || fail "the first one does not depend on them: $(cat out)"
    ! grep -qF '"best_ids": [7, 7, 7]' out || fail "the given ids are called the most probable ones"
}

# Attention that is wrong gives logits that are.
wrong_logits() {
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=$1 run 2 generate --model-dir "$MODELS/tiny-llama" --prompt-ids "$(prompt_ids tiny-llama 1)" --verify 0 \
        --skip-self-test --check-logits 8
    expect_code 1 "$1"
    said -E 'logits of [0-9]+ of 8 tokens are wrong; request 1, position [0-9]+: off by' || fail "no line: $(our_lines)"
}

bad_generate() {
    local model=(--model-dir "$MODELS/tiny-llama")
    expect_bad 'generate: found no --model-dir' generate --prompt-ids 1
    expect_bad 'generate: found no --prompt and no --prompt-ids' generate "${model[@]}"
    expect_bad '--prompt: the text is not UTF-8 at byte 1' generate "${model[@]}" --prompt $'a\xff'
    expect_bad '--prompt: found neither tokenizer.json nor' generate --model-dir "$MODELS/tiny-yarn" --prompt a
    expect_bad "--prompt-ids: found '320', expected ids from 0 to 319" generate "${model[@]}" --prompt-ids 1,320
    expect_bad '--trace: found with' generate "${model[@]}" --prompt-ids 1 --trace trace.jsonl
    expect_bad "--temperature: found without 'generate'" "${model[@]}" --temperature 1
    expect_bad 'request 1: found 5002 tokens, expected at most the 4096' generate "${model[@]}" --prompt-ids 1,2,3 --max-tokens 5000
    expect_bad '--min-tokens: found 20, expected at most --max-tokens, 16' \
        generate "${model[@]}" --prompt-ids 1 --min-tokens 20
    expect_bad '--logit-bias: found with --given-ids' \
        generate "${model[@]}" --prompt-ids 1 --given-ids 1 --logit-bias 1:1
    expect_bad "--logit-bias: found '320:1', expected ID:BIAS, of ids from 0 to 319" \
        generate "${model[@]}" --prompt-ids 1 --logit-bias 320:1
    expect_bad '--given-ids: found no id' generate "${model[@]}" --prompt-ids 1 --given-ids ,
    expect_bad '--max-tokens: found' generate "${model[@]}" --prompt-ids 1 --max-tokens 99999999999
    expect_bad '--check-logits: found without --model-dir' --check-logits 1
}
