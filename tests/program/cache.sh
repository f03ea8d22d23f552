# Cases of program_test.sh. Results are right, and the same, whatever the cache holds, shares, moves and gives back.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# A quantised cache of every kind, in both layouts, under both algorithms.
quant() {
    small_model
    local cache algorithm
    for cache in fp8_e4m3 "fp8_e4m3 --k-scale 0.03 --v-scale 0.03" "fp8_e4m3 --k-scale 0.03,0.05 --v-scale 0.04" "int8 --kv-layout head-major"; do
        for algorithm in pass-kv pass-q; do
            # shellcheck disable=SC2086
            run 2 --model model.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --seed 3 \
                --kv-cache-dtype $cache --algorithm $algorithm --result-json "$algorithm.json"
            expect_code 0 "a cache of $cache, $algorithm"
            expect_value violations 0 "$algorithm.json"
            grep -q "\"dtype\": \"${cache%% *}\"" "$algorithm.json" || fail "the cache is not $cache"
        done
        expect_digest_of pass-kv.json pass-q.json
    done
    expect_bad 'expected both or none' --kv-cache-dtype fp8_e4m3 --k-scale 1
    cache="--model model.yaml --requests 2 --input-len 90 --kv-cache-dtype fp8_e4m3 --v-scale 0.04"
    # shellcheck disable=SC2086
    run 1 $cache --k-scale 0.03 --result-json one.json
    # shellcheck disable=SC2086
    run 1 $cache --k-scale 0.03,0.03 --result-json two.json
    expect_digest_of one.json two.json
    expect_bad '--k-scale: found 3 scales, expected 1, or those of 2 KV heads' --model model.yaml \
        --kv-cache-dtype fp8_e4m3 --k-scale 1,2,3 --v-scale 1
    expect_bad "--v-scale: found 'x', expected a number" --kv-cache-dtype fp8_e4m3 --k-scale 1 --v-scale 1,x
    expect_bad '--v-scale: found without --k-scale' --kv-cache-dtype fp8_e4m3 --v-scale 1
    expect_bad 'expected fp8_e4m3' --kv-cache-dtype int8 --k-scale 1 --v-scale 1
}

# Layers of a quantised cache that keep the model's dtype: a key and a value of 16 fp32 in 2 heads, beside codes.
skipped_layers() {
    small_model
    local algorithm options=(--model model.yaml --kv-cache-dtype int8 --kv-cache-dtype-skip-layers=-1)
    for algorithm in pass-kv pass-q; do
        run 2 "${options[@]}" --requests 3 --input-len 150 --output-len 4 --verify 0.5 --algorithm $algorithm \
            --result-json "$algorithm.json"
        expect_code 0 "a layer that is skipped, $algorithm"
        expect_value violations 0 "$algorithm.json"
        expect_value block_bytes $((16 * (2 * 2 * (16 + 4) + 2 * 2 * 16 * 4))) "$algorithm.json"
        tr -d ' \n' <"$algorithm.json" | grep -qF '"unquantised_layers":[1]' || fail "another layer is skipped"
        grep -q 'int8, 1 of 2 layers fp32' out || fail "the report does not tell of the layer"
    done
    expect_digest_of pass-kv.json pass-q.json
    run 1 --model model.yaml --requests 2 --input-len 90 --kv-cache-dtype int8 --kv-cache-dtype-skip-layers 0,1 \
        --result-json all.json
    run 1 --model model.yaml --requests 2 --input-len 90 --result-json none.json
    expect_digest_of all.json none.json
    expect_bad "found '2', expected layers from 0 to 1, or from -1 to -2" "${options[@]}" --kv-cache-dtype-skip-layers 0,2
    expect_bad "found '', expected layers" "${options[@]}" --kv-cache-dtype-skip-layers 0,
    expect_bad "found 'sliding_window', expected" "${options[@]}" --kv-cache-dtype-skip-layers sliding_window
    expect_bad 'found with a cache of bf16, expected a quantised one' "${options[@]}" --kv-cache-dtype bf16
}

# Latents have one scale, that of keys, for both.
latent_scales() {
    latent_model
    local options=(--model model.yaml --kv-cache-dtype fp8_e4m3 --k-scale 0.05 --requests 2 --input-len 40 --output-len 3)
    run 2 "${options[@]}" --verify 0.5 --result-json k.json
    expect_code 0 "latents of one scale"
    expect_value violations 0 k.json
    expect_value token_layer_bytes 576 k.json
    run 2 "${options[@]}" --v-scale 0.05 --result-json both.json
    expect_digest_of k.json both.json
    expect_bad '--v-scale: found 0.06 over latents, expected none, or 0.05 as --k-scale' "${options[@]}" --v-scale 0.06
}

# Partial states in 16 bits: half the bytes of states, and results within what the check allows.
narrow_states() {
    small_model
    local dtype options=(--model model.yaml --dtype bf16 --algorithm pass-q --requests 3 --input-len 90 --output-len 4)
    for dtype in fp32 bf16; do
        run 2 "${options[@]}" --verify 0.5 --state-dtype $dtype --result-json $dtype.json
        expect_code 0 "states in $dtype"
        expect_value violations 0 $dtype.json
        expect_value state-dtype $dtype $dtype.json
    done
    [ "$(few 2)" = 1 ] || [ "$(value bytes_sent bf16.json)" -lt "$(value bytes_sent fp32.json)" ] ||
        fail "as many bytes are sent"
    expect_bad 'state_dtype is fp16, expected fp32, or bf16 as the model' "${options[@]}" --state-dtype fp16
}

# Blocks of a token, under both algorithms, where a prefix is found to the token.
small_blocks() {
    small_model
    local algorithm
    { trace_line 0 150 4 1; trace_line 90 190 4 1; trace_line 90 77 4 2; } >trace.jsonl
    for algorithm in pass-kv pass-q; do
        run 3 --model model.yaml --trace trace.jsonl --max-num-seqs 1 --verify 0.5 --block-size 1 \
            --algorithm $algorithm --result-json "$algorithm.json"
        expect_code 0 "blocks of a token, $algorithm"
        expect_value violations 0 "$algorithm.json"
    done
    expect_digest_of pass-kv.json pass-q.json
    [ "$(value prefix_hits pass-q.json)" -ge 150 ] || fail "only $(value prefix_hits pass-q.json) tokens are found"
}

# Layers with windows of their own, from the model file; --window goes over them.
window() {
    small_model
    cp model.yaml mixed.yaml
    echo 'sinks: 2
layer_windows: 40 0' >>mixed.yaml
    run 3 --model mixed.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --result-json mixed.json
    expect_code 0 "layers with windows of their own"
    expect_value violations 0 mixed.json
    grep -q 'windows in [0-9]* layers, 2 sinks' out || fail "the report does not tell of the windows"
    run 3 --model mixed.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --window 0 --result-json full.json
    expect_code 0 "a window for all layers"
    run 3 --model model.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --result-json plain.json
    expect_digest_of full.json plain.json
    [ "$(value output_digest mixed.json)" != "$(value output_digest plain.json)" ] || fail "the windows have no effect"
}

# Layers of different windows have blocks of their own: 5 of 6 with a window leave 1/6 of the cache, and a model of both
# kinds gives the blocks of one kind back.
layer_groups() {
    small_model
    local peak whole peaks
    sed 's/^layers:.*/layers: 6/' model.yaml >six.yaml
    echo 'layer_windows: 1024 1024 1024 1024 1024 0' >>six.yaml
    run 1 --dry-run --model six.yaml --requests 1 --input-len 131000 --output-len 64 --result-json six.json
    expect_code 0 "a dry run of 128K tokens"
    peak=$(value peak_bytes six.json)
    whole=$(($(value peak six.json | tail -1) * $(value block_bytes six.json | tail -1)))
    [ $((100 * peak)) -lt $((20 * whole)) ] || fail "the cache has $peak of $whole bytes at its peak"
    cp -r "$MODELS/tiny-qwen3" alternating
    sed -i 's/"use_sliding_window": false/"use_sliding_window": true/; s/"sliding_window": null/"sliding_window": 32/
        0,/"full_attention"/s//"sliding_attention"/' alternating/config.json
    run 2 generate --model-dir alternating --prompt-ids "$(seq -s, 5 100),$(seq -s, 5 100),$(seq -s, 5 100)" \
        --max-tokens 8 --temperature 0 --max-num-batched-tokens 32 --check-logits 8 --result-json alternating.json
    expect_code 0 "a model of two kinds of layers"
    grep -q 'compared with a plain forward, 0 violations' out || fail "the logits are not compared"
    mapfile -t peaks < <(value peak alternating.json) # of the group without a window, of the other, of the first
    [ "${#peaks[@]}" = 3 ] && [ "${peaks[0]}" = "${peaks[2]}" ] && [ $((2 * peaks[1])) -lt "${peaks[0]}" ] ||
        fail "the groups have ${peaks[*]} blocks at their peaks"
}

preemption() {
    small_model
    for i in 1 2 3 4 5 6 7 8 9 10 11 12; do trace_line 0 $((14 + i)) 120 "$i"; done >decode_heavy.jsonl
    run 4 --model model.yaml --trace decode_heavy.jsonl --block-size 16 --num-blocks 10 --verify 0.05 \
        --result-json r.json
    expect_code 0 "a cache that holds a third of the requests"
    expect_value completed 12 r.json
    expect_value violations 0 r.json
    expect_value blocks 10 r.json
    [ "$(value preemptions r.json)" -gt 0 ] || fail "no preemption"
    # Fewer give way where chunks follow what is free.
    local chunks=(--dry-run --model model.yaml --trace prefill_heavy.jsonl --num-blocks 50 --max-num-batched-tokens 256)
    for i in 1 2 3 4 5 6 7 8 9 10 11 12; do trace_line 0 $((100 + 30 * i)) 60 "$i"; done >prefill_heavy.jsonl
    run 1 "${chunks[@]}" --result-json fixed.json
    run 1 "${chunks[@]}" --adaptive-chunks --log-level debug --result-json adaptive.json
    expect_code 0 "adaptive chunks"
    expect_value cut_chunks 0 fixed.json
    expect_value held_back 0 fixed.json
    [ "$(value cut_chunks adaptive.json)" -gt 0 ] || fail "no chunk that was cut is counted"
    [ "$(value held_back adaptive.json)" -gt 0 ] || fail "no request that was held back is counted"
    local cut held
    cut=$(value cut_chunks adaptive.json) held=$(value held_back adaptive.json)
    grep -q "^ *$cut prefill chunks cut to what was free, $held requests held back" out || fail "the report does not say so"
    [ "$(value preemptions adaptive.json)" -lt "$(value preemptions fixed.json)" ] || fail "as many give way"
    grep -q 'request [0-9]* is not begun: its [0-9]* tokens do not fit' err || fail "no word of why: $(head -3 err)"
}

# Requests that begin alike, samples of one prompt, and a tenant of its own.
shared_trace() {
    local i extra
    for i in 0 1 2 3 4 5 6 7 8 9 10 11; do
        extra=""
        [ $((i % 4)) = 0 ] && extra=', "n": 3'
        [ $((i % 5)) = 4 ] && extra="$extra"', "salt": "x"'
        trace_line 0 $((700 + i % 3 * 37)) 40 1 $((2 + i % 2)) | sed "s/}$/$extra}/"
    done
}

# Results are bit-equal with the cache and without it; with it most of the prompts is found.
prefix() {
    small_model
    shared_trace >trace.jsonl
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --no-enable-prefix-caching --result-json off.json
    expect_code 0 "without the prefix cache"
    expect_value completed 18 off.json
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --result-json on.json
    expect_code 0 "with the prefix cache"
    expect_value completed 18 on.json
    expect_value violations 0 on.json
    expect_digest_of on.json off.json
    [ "$(value prefix_hits on.json)" -gt 600 ] || fail "only $(value prefix_hits on.json) blocks are found"
    [ "$(value cow_copies on.json)" -gt 0 ] || fail "samples of a prompt copy no block"
    run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --verify 0.02 --result-json tight.json
    expect_code 0 "a cache that holds a few requests"
    expect_value violations 0 tight.json
    expect_digest_of tight.json off.json
    [ "$(value evictions tight.json)" -gt 0 ] || fail "nothing is evicted"
    [ "$(value preemptions tight.json)" -gt 0 ] || fail "nobody is preempted"
    run 2 --model model.yaml --trace trace.jsonl --window 100 --sinks 4 --verify 0.05 --result-json window.json
    expect_code 0 "a sliding window"
    expect_value violations 0 window.json
    run 2 --model model.yaml --trace trace.jsonl --window 100 --sinks 4 --no-enable-prefix-caching \
        --num-blocks $((60 / $(few 2))) \
        --preemption-mode swap --swap-space 0.1 --verify 0.05 --result-json narrow.json
    expect_code 0 "a sliding window in a small cache"
    expect_value violations 0 narrow.json
    expect_digest_of window.json narrow.json
}

# Runs shorter than a block: prompts share blocks of all ranks, and tokens are those of any other interleave.
interleave() {
    small_model
    shared_trace | head -7 >trace.jsonl
    expect_bad '--cp-kv-cache-interleave-size: found 24, expected a divisor or a multiple of the block size 16' \
        --interleave 24
    local options=(--model model.yaml --trace trace.jsonl --verify 0.02)
    run 2 "${options[@]}" --interleave 2 --no-enable-prefix-caching --result-json off.json
    expect_code 0 "runs of 2"
    expect_value violations 0 off.json
    grep -q 'interleave 2$' out || fail "another interleave"
    run 2 "${options[@]}" --interleave 2 --num-blocks 50 --preemption-mode swap --swap-space 0.1 --result-json tight.json
    expect_code 0 "a cache that holds a few requests"
    expect_value violations 0 tight.json
    expect_digest_of tight.json off.json
    [ "$(value prefix_hits tight.json)" -gt 100 ] || fail "only $(value prefix_hits tight.json) blocks are found"
    [ "$(value cow_copies tight.json)" -gt 0 ] || fail "samples of a prompt copy no block"
    [ "$(value evictions tight.json)" -gt 0 ] || fail "nothing is evicted"
    [ "$(value swapped_in tight.json)" -gt 0 ] || fail "nothing is swapped"
    run 4 "${options[@]}" --cp-kv-cache-interleave-size=1 --result-json four.json
    expect_code 0 "runs of 1 on 4 ranks"
    expect_value violations 0 four.json
    [ "$(value prefix_hits four.json)" -gt 100 ] || fail "only $(value prefix_hits four.json) blocks are found"
    prompt_ids tiny-qwen3 2 >prompt
    run 3 generate --model-dir "$MODELS/tiny-qwen3" --prompt-ids @prompt --interleave 1 --json --dtype fp32
    expect_code 0 "generate with runs of 1"
    grep -qF "\"ids\": [$(expected_ids tiny-qwen3 2 | sed 's/ /, /g')]" out || fail "other tokens: $(cat out)"
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=uneven-unit run 2 --model model.yaml --trace trace.jsonl --verify 0.2 --interleave 1
    expect_code 1 "a rank that shares another block than the others"
    expect_line 'check failed: request'
}

# forked_trace RANKS SAMPLES: two prompts that part after 2,048 tokens of a rank.
forked_trace() {
    local last
    for last in 1 2; do
        trace_line 0 $((7 * 512 * $1)) 60 $(seq 1 $((4 * $1))) $(seq ${last}01 $((${last}00 + 3 * $1))) |
            sed "s/}$/, \"n\": $2}/"
    done
}

# Results are bit-equal whether requests read what they share once or each by itself.
cascade() {
    small_model
    forked_trace 2 2 >trace.jsonl
    run 2 --model model.yaml --trace trace.jsonl --verify 0 --cascade-attention off --result-json off.json
    expect_code 0 "every request reads its own keys"
    expect_value keys_read "$(value keys_attended off.json)" off.json
    run 2 --model model.yaml --trace trace.jsonl --verify 0.01 --result-json on.json
    expect_code 0 "requests read what they share once"
    expect_value violations 0 on.json
    expect_digest_of on.json off.json
    # Four requests have 2,048 of their some 3,600 keys of a rank in common.
    [ "$((2 * $(value keys_read on.json)))" -lt "$(value keys_attended on.json)" ] || fail "too little is shared"
    forked_trace 1 1 >trace.jsonl
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=deep-prefix run 1 --model model.yaml --trace trace.jsonl --verify 0.05
    expect_code 1 "requests that read each other's keys"
}

# Results are bit-equal with swapping and without, also where swapped blocks come back damaged.
swap() {
    small_model
    shared_trace >trace.jsonl
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --result-json ample.json
    expect_code 0 "an ample cache"
    run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --preemption-mode swap --swap-space 0.1 --verify 0.02 \
        --result-json swap.json
    expect_code 0 "a cache that swaps"
    expect_value violations 0 swap.json
    expect_value swap_failures 0 swap.json
    expect_digest_of swap.json ample.json
    [ "$(value swapped_in swap.json)" -gt 0 ] || fail "nothing comes back"
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=damaged-swap run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --preemption-mode swap \
        --swap-space 0.1 --verify 0.02 --result-json damaged.json
    expect_code 0 "damaged blocks"
    expect_value violations 0 damaged.json
    expect_digest_of damaged.json ample.json
    [ "$(value swap_failures damaged.json)" -gt 0 ] || fail "damage is not noticed"
    said 'came back with checksum .* the request is computed again' || fail "damage is not said"
}

# Three prompts in turn, each twice, one at a time: a cache for one of them computes each once, with what was evicted in
# host memory and in a folder, and the job after it none. A folder of another job is refused in a line.
evicted() {
    local text options=(--model model.yaml --trace trace.jsonl --max-num-seqs 1 --num-blocks 32)
    local folder=(--swap-space 0.001 --swap-folder kept --swap-folder-size 0.01)
    small_model
    mkdir kept
    for text in 1 2 3 1 2 3; do trace_line 0 700 4 ${text}1 ${text}2; done >trace.jsonl
    run 2 "${options[@]}" --result-json off.json
    expect_code 0 "what is evicted is gone"
    expect_value prefix_hits 0 off.json
    run 2 "${options[@]}" --swap-space 0.01 --keep-evicted --verify 0.05 --result-json host.json
    expect_code 0 "what is evicted stays in host memory"
    expect_value violations 0 host.json
    expect_value prefix_hits 129 host.json
    expect_value damaged_blocks 0 host.json
    expect_digest_of host.json off.json
    grep -q ' evicted blocks kept in host memory, ' out || fail "no word of what was kept: $(cat out)"
    run 2 "${options[@]}" "${folder[@]}" --result-json first.json
    expect_code 0 "a job with a folder"
    expect_value restored_blocks 0 first.json
    expect_value stored_blocks 129 first.json
    run 2 "${options[@]}" "${folder[@]}" --verify 0.05 --metrics-file metrics --result-json second.json
    expect_code 0 "the job after it"
    expect_value violations 0 second.json
    expect_value restored_blocks 129 second.json
    expect_value prefix_hits 258 second.json
    expect_value loaded_blocks 129 second.json
    expect_value damaged_blocks 0 second.json
    expect_digest_of second.json off.json
    grep -q '^cpattn_evicted_blocks_in_folder{.*} 129$' metrics || fail "no metrics: $(grep folder metrics)"
    printf damaged | dd of=kept/rank-1-group-0.blocks bs=1 seek=9000 conv=notrunc status=none
    run 2 "${options[@]}" "${folder[@]}" --log-level warn --result-json damaged.json
    expect_code 0 "a damaged block"
    expect_value damaged_blocks 1 damaged.json
    expect_digest_of damaged.json off.json
    said 'has other bytes than were written; its tokens are computed again' || fail "damage is not said"
    CP_ATTN=$CP_ATTN_FAULTS CPATTN_FAULT=damaged-swap run 2 "${options[@]}" --swap-space 0.01 --keep-evicted \
        --result-json swapped.json
    expect_code 0 "blocks damaged in host memory"
    expect_digest_of swapped.json off.json
    [ "$(value damaged_blocks swapped.json)" -gt 0 ] || fail "damage in host memory is not noticed"
    rm kept/*
    CP_ATTN=$CP_ATTN_FAULTS CPATTN_FAULT=damaged-swap run 2 "${options[@]}" "${folder[@]}" --result-json swapped.json
    expect_code 0 "blocks damaged on their way to the folder"
    expect_digest_of swapped.json off.json
    run 2 "${options[@]}" "${folder[@]}" --result-json after.json
    expect_code 0 "the job after that"
    expect_digest_of after.json off.json
    run 2 "${options[@]}" "${folder[@]}" --seed 9
    expect_code 2 "a folder of another model"
    expect_line '--swap-folder: rank 0: swap_folder kept: rank-0.index is of another job, of seed 0; expected seed 9'
    run 2 "${options[@]}" "${folder[@]}" --cache-salt pepper
    expect_code 2 "a folder of another salt"
    said 'is of another job, of salt .*; expected salt' || fail "the salt is not said to differ: $(cat out)"
    ! grep -q pepper out || fail "the salt is told"
}

# A salt is a secret: results do not tell it.
salt() {
    small_model
    run 1 --model model.yaml --requests 1 --input-len 20 --output-len 2 --cache-salt pepper --result-json r.json
    expect_code 0 "a run with a salt"
    ! grep -q pepper r.json out || fail "the salt is told"
    expect_value cache-salt '(not shown)' r.json
    run 1 --cache-salt pepper --print-config
    grep -q '^# cache-salt: .*(not shown).* command line' out || fail "no word of the salt: $(grep salt out)"
    ! grep -q pepper out || fail "the salt is told by --print-config"
}

# --local-context: what stays on one rank is not sent, and has the digest of a run on one rank.
local_context() {
    small_model
    run 1 --model model.yaml --requests 5 --input-len 90 --output-len 6 --result-json alone.json
    run 3 --model model.yaml --requests 5 --input-len 90 --output-len 6 --verify 0.5 --local-context 95 \
        --result-json local.json
    expect_code 0 "requests that stay on one rank"
    expect_value violations 0 local.json
    expect_value bytes_sent 0 local.json
    expect_value rank_local 5 local.json
    expect_digest_of alone.json local.json
    run 3 --model model.yaml --requests 5 --input-len 90 --output-len 6 --local-context 94 --result-json sharded.json
    expect_value rank_local 0 sharded.json
    expect_bad 'local-context' --local-context -1
}

# --block-store: what one job has computed of prompts another goes on with, whatever its ranks and the form of its cache,
# and computes what was changed on the way; with a model and its weights it gives the same answer.
block_store() {
    small_model
    mkdir store
    local requests="--model model.yaml --requests 3 --input-len 90" prompt
    # shellcheck disable=SC2086
    run 3 $requests --output-len 1 --interleave 1 --block-store store --block-transfer export --result-json out.json
    expect_code 0 "a job that exports"
    expect_value exported_tokens 270 out.json
    # shellcheck disable=SC2086
    run 2 $requests --output-len 5 --kv-layout vllm-x --result-json alone.json
    # shellcheck disable=SC2086
    run 2 $requests --output-len 5 --kv-layout vllm-x --verify 0.5 --block-store store --block-transfer import \
        --result-json in.json
    expect_code 0 "a job that imports"
    expect_value violations 0 in.json
    expect_value imported_tokens 267 in.json
    expect_value import_failures 0 in.json
    expect_digest_of in.json alone.json
    for file in store/*; do printf x | dd of="$file" bs=1 seek=300 conv=notrunc status=none; done
    # shellcheck disable=SC2086
    run 2 $requests --output-len 5 --kv-layout vllm-x --block-store store --block-transfer import --log-level warn \
        --result-json changed.json
    expect_code 0 "blocks that were changed"
    expect_value imported_tokens 0 changed.json
    expect_digest_of changed.json alone.json
    said 'is refused, and they are computed: its SHA-256 begins with' || fail "damage is not said"
    rm -r store
    mkdir store
    prompt=$(seq -s, 3 70)
    run 2 generate --model-dir "$MODELS/tiny-llama" --prompt-ids "$prompt" --max-tokens 12 --json
    mv out alone
    run 3 generate --model-dir "$MODELS/tiny-llama" --prompt-ids "$prompt" --max-tokens 1 --block-store store \
        --block-transfer export
    run 2 generate --model-dir "$MODELS/tiny-llama" --prompt-ids "$prompt" --max-tokens 12 --json --block-store store \
        --block-transfer import --result-json in.json
    expect_value imported_tokens 67 in.json
    ids() { grep -o '"ids": \[[0-9, ]*\]' "$1" || fail "no answer: $(cat "$1")"; }
    [ "$(ids alone)" = "$(ids out)" ] || fail "the answer is another one"
    # Jobs with a layer that drafts and without it have rows of other lengths, and do not write over each other's.
    rm -r store
    mkdir store
    local drafting="generate --model-dir $MODELS/tiny-deepseek-mtp --prompt-ids $(seq -s, 3 50) --block-store store" way
    for way in "" "--speculative mtp:1"; do
        # shellcheck disable=SC2086
        run 1 $drafting $way --max-tokens 1 --block-transfer export
    done
    for way in "" "--speculative mtp:1"; do
        # shellcheck disable=SC2086
        run 1 $drafting $way --max-tokens 3 --block-transfer import --result-json in.json
        expect_value imported_tokens 47 in.json
    done
    expect_bad 'expected with it' --block-transfer import
    expect_bad 'expected a folder' --block-store nowhere
}

# The same over NIXL, from the memory of a server that computes prompts, and over Mooncake; their libraries are
# stand-ins, in the folder STAND_INS. What is changed on the way is refused, and what is missing told in a line.
block_store_carried() {
    local tokens folder=$PWD mooncake
    tokens="--prompt-ids $(seq -s, 3 70) --max-tokens 12 --json"
    export LD_LIBRARY_PATH=$STAND_INS${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    ids() { grep -o '"ids": \[[0-9, ]*\]' "$1" || fail "no answer: $(cat "$1")"; }
    # shellcheck disable=SC2086
    run 1 generate --model-dir "$MODELS/tiny-llama" $tokens
    mv out alone
    mkdir meeting objects
    start_server 2 --model-dir "$MODELS/tiny-llama" --block-store "nixl:$folder/meeting" --block-store-size 0.01 \
        --block-transfer export
    ask /v1/completions "{\"prompt\": [$(seq -s, 3 70)], \"max_tokens\": 1}"
    expect_http 200 "a prompt that is exported"
    mkdir decode
    cd decode || return
    # shellcheck disable=SC2086
    run 3 generate --model-dir "$MODELS/tiny-llama" $tokens --block-store "nixl:$folder/meeting" \
        --block-transfer import --result-json in.json
    expect_code 0 "a job that imports over NIXL"
    expect_value imported_tokens 67 in.json
    [ "$(ids ../alone)" = "$(ids out)" ] || fail "the answer is another one"
    cd .. || return
    end_server 0 TERM
    [ -z "$(ls meeting)" ] || fail "the server has left $(ls meeting)"
    printf '{"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
        "master_server_address": "%s", "global_segment_size": 1048576}' "$folder/objects" >mooncake.json
    mooncake="--block-store mooncake:mooncake.json"
    # shellcheck disable=SC2086
    run 2 generate --model-dir "$MODELS/tiny-llama" $tokens $mooncake --block-transfer export
    expect_code 0 "a job that exports to Mooncake"
    # shellcheck disable=SC2086
    run 3 generate --model-dir "$MODELS/tiny-llama" $tokens $mooncake --block-transfer import --result-json in.json
    expect_value imported_tokens 67 in.json
    [ "$(ids alone)" = "$(ids out)" ] || fail "the answer is another one"
    for file in objects/*; do printf x | dd of="$file" bs=1 seek=300 conv=notrunc status=none; done
    # shellcheck disable=SC2086
    run 2 generate --model-dir "$MODELS/tiny-llama" $tokens $mooncake --block-transfer import --log-level warn \
        --result-json in.json
    expect_value imported_tokens 0 in.json
    [ "$(ids alone)" = "$(ids out)" ] || fail "the answer is another one, from changed blocks"
    said 'is refused, and they are computed: its SHA-256 begins with' || fail "damage is not said"
    sed -i 's/"tcp"/7/' mooncake.json
    # shellcheck disable=SC2086
    run 2 generate --model-dir "$MODELS/tiny-llama" $tokens $mooncake
    expect_code 2 "a protocol that is a number"
    expect_line 'mooncake.json: protocol: found 7'
    run 2 --requests 1 --input-len 8 --output-len 2 --block-store mooncake:nothing.json
    expect_code 3 "no file of that name"
    expect_line '--block-store: nothing.json: No such file or directory'
    expect_bad 'expected a folder' --block-store nixl:nowhere
    LD_LIBRARY_PATH=/nowhere
    run 2 --requests 1 --input-len 8 --output-len 2 --block-store nixl:meeting
    expect_code 2 "no NIXL"
    expect_line 'nixl store: cannot load its library (libnixl_capi.so: '
}

# A cache on the host, larger than what of it is on the device at a time: the bits of one on the device. Decode, prompts
# that share blocks, windows, and several ranks.
host_cache() {
    small_model
    shared_trace >trace.jsonl
    expect_bad '--device-ring: found without --host-cache, expected with it' --device-ring 1
    expect_bad '--swap-space: found with --host-cache, expected one of the two' --host-cache 1 --swap-space 1
    expect_bad 'context: ring_bytes: found 1073, expected at least' --host-cache 1 --device-ring 0.000001
    expect_bad 'which need' --input-len 100000 --host-cache 0.01
    local ranks options=(--model model.yaml --trace trace.jsonl --verify 0.02) ring=(--host-cache 0.1 --device-ring 0.0005)
    for ranks in 1 2; do
        run $ranks "${options[@]}" --result-json device.json
        expect_code 0 "a cache on the device"
        run $ranks "${options[@]}" "${ring[@]}" --result-json host.json
        expect_code 0 "a cache on the host"
        expect_value violations 0 host.json
        expect_value ring_bytes_read 0 device.json
        expect_digest_of host.json device.json
        grep -q 'on the host: .* read through .* of device memory' out || fail "the report says nothing: $(cat out)"
    done
    run 2 --model model.yaml --requests 1 --input-len 9000 --output-len 8 --verify 0.01 --result-json device.json
    expect_code 0 "a long prompt on the device"
    run 2 --model model.yaml --requests 1 --input-len 9000 --output-len 8 --verify 0.01 "${ring[@]}" \
        --result-json host.json
    expect_code 0 "a long prompt on the host"
    expect_value violations 0 host.json
    expect_digest_of host.json device.json
    [ "$(value bytes host.json | head -1)" -gt "$((2 * $(value ring_device_bytes host.json) / $(few 2)))" ] ||
        fail "the ring has room for half of the cache"
    run 2 "${options[@]}" --window 100 --sinks 4 --result-json device.json
    expect_code 0 "a window on the device"
    run 2 "${options[@]}" --window 100 --sinks 4 "${ring[@]}" --result-json host.json
    expect_code 0 "a window on the host"
    expect_value violations 0 host.json
    expect_digest_of host.json device.json
    local algorithm
    options=(--requests 1 --input-len 3000 --output-len 2 --sparse xattn:0.9 --verify 0.01 --skip-self-test)
    for ranks in 1 2 3; do
        for algorithm in pass-kv pass-q; do
            [ "$ranks $algorithm" != "1 pass-q" ] || continue # one rank has no peers to pass to
            run $ranks "${options[@]}" --algorithm $algorithm --result-json device.json
            expect_code 0 "a sparse prompt on the device, $algorithm"
            run $ranks "${options[@]}" --algorithm $algorithm --host-cache 0.3 --device-ring 0.006 --result-json host.json
            expect_code 0 "a sparse prompt on the host, $algorithm"
            expect_value sparse_host_bytes 0 device.json
            grep -q 'on the host: .* of keys read to choose blocks' out || fail "the report says nothing: $(cat out)"
            expect_value violations 0 host.json
            expect_digest_of host.json device.json
        done
    done
}
