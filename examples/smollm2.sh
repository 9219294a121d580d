#!/usr/bin/env bash
# Trains and measures a drafter for SmolLM2-135M-Instruct on a CPU: the recipe of the one in model_cards (whose stage 1
# was stopped at step 700 of 1,000). Each command goes on where it was stopped, so the script can be run in sittings.
#
#     examples/smollm2.sh              # data, stage 1, the SFT control, ReTrace and its ablations, then results.json
#     SEED=1 RUNS=runs/seed1 examples/smollm2.sh     # another seed of stage 2; the one shipped is SEED=11
set -euo pipefail
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/smollm2}
SEED=${SEED:-0}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
CARD=${CARD:-$RUNS/card} # CARD=model_cards/retrace-smollm2-135m ships it
# Large tensors come and go every step. Without these glibc gives their pages back each time, and the step takes three
# times as long.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184

common=(--loss_type dpace --bf16 True --use_cpu True --logging_steps 25 --save_total_limit 2 --report_to none
    --disable_tqdm True)

train() { # NAME ARGUMENTS...: the script itself leaves a run alone that has ended
    local name=$1
    shift
    mkdir -p "$RUNS"
    "$PYTHON" examples/train_retrace.py "${common[@]}" "$@" --output_dir "$RUNS/$name" 2>&1 | tee -a "$RUNS/$name.log"
}

# -- data: the target's answers to prompts, and chats of it with itself ------------------------------------------------
answers=(--responses examples/data/responses_0.jsonl.gz)
all=(--responses examples/data/responses_0.jsonl.gz examples/data/self_chat_0.jsonl.gz)
fresh=(--responses examples/data/self_chat_1.jsonl.gz)

# -- stage 1, DFlash: hard labels first, then Muon, soft targets and more varied text; last with whole blocks ----------
train stage1a "${answers[@]}" --features_dir "$RUNS/features" --conditioning none --num_carried_rounds 0 \
    --target_layer_ids 1 8 14 20 27 --num_draft_layers 3 --block_size 8 --loss_on_seen_tokens True \
    --learning_rate 1.5e-3 --weight_decay 0.01 --max_steps 1900 --per_device_train_batch_size 4 --num_anchors 64 \
    --loss_chunk_size 512 --save_steps 300 --seed 0
soft=(--target_dtype bfloat16 --soft_share 0.5 --muon True --weight_decay 0.1 --warmup_steps 20)
features=(--features_dir "$RUNS/features_soft")
blocks=("${all[@]}" "${soft[@]}" "${features[@]}" --conditioning none --num_carried_rounds 0 --loss_on_seen_tokens True
    --per_device_train_batch_size 8 --num_anchors 64 --loss_chunk_size 256 --save_steps 100)
train stage1b "${blocks[@]}" --init_from "$RUNS/stage1a" --block_size 5 --max_steps 1100 --learning_rate 1.2e-3 \
    --lr_scheduler_type constant_with_warmup --seed 1
train stage1c "${blocks[@]}" --init_from "$RUNS/stage1b" --block_size 8 --max_steps 240 --learning_rate 1e-3 --seed 2
train stage1 "${blocks[@]}" --init_from "$RUNS/stage1c" --block_size 8 --max_steps 1000 --learning_rate 1e-3 --seed 3

# -- stage 2: every arm from the same stage-1 drafter, once over text that stage 1 has not seen, in the same order and
# with the same fresh blocks. A signal is of no use on text that the drafter knows by heart.
arm() { # NAME CONDITIONING
    local read=(--features_dir "$RUNS/features_fresh")
    if [ "$2" = corrected ]; then read=(); fi # it runs the target anyway, for its states on the drafts
    train "$1" "${fresh[@]}" "${soft[@]}" "${read[@]}" --init_from "$RUNS/stage1" --conditioning "$2" --num_carried_rounds 2 \
        --learning_rate 3e-4 --trajectory_learning_rate 6e-4 --warmup_steps 10 --beta_warmup_steps 20 --max_steps 170 \
        --per_device_train_batch_size 6 --num_anchors 24 --loss_chunk_size 512 --save_steps 50 --seed "$SEED"
}
arm corrected corrected
arm sft none
arm gated gated
arm overwrite overwrite

# -- ship, then measure what is shipped --------------------------------------------------------------------------------
"$PYTHON" examples/ship_drafter.py "$RUNS/corrected" "$CARD" --proposal sample
"$PYTHON" examples/evaluate_drafters.py --output "$RUNS/results.json" --arm stage1="$RUNS/stage1" \
    --arm sft="$RUNS/sft" --arm overwrite="$RUNS/overwrite" --arm gated="$RUNS/gated" --arm corrected="$CARD" \
    --generate corrected --generate-limit 16 --generate-rest
"$PYTHON" examples/ship_drafter.py --results "$RUNS/results.json" --license apache-2.0 "$CARD"
