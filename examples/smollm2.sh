#!/usr/bin/env bash
# Trains and measures the drafter of model_cards/retrace-smollm2-135m, as it was, on a CPU. Each command goes on where
# it was stopped, so the script can be run in sittings.
#
#     examples/smollm2.sh              # stage 1, the SFT control, ReTrace and its ablations, then results.json
#     SEED=1 RUNS=runs/seed1 examples/smollm2.sh
set -euo pipefail
cd "$(dirname "$0")/.."
RUNS=${RUNS:-runs/smollm2}
FEATURES=${FEATURES:-$RUNS/features}
SEED=${SEED:-0}
PYTHON=${PYTHON:-.venv/bin/python}
# Large tensors come and go every step. Without these glibc gives their pages back each time, and the step takes three
# times as long.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184

common=(--responses examples/data/responses_0.jsonl.gz --loss_type dpace --weight_decay 0.01 --loss_chunk_size 512
    --bf16 True --use_cpu True --logging_steps 25 --save_total_limit 2 --report_to none --disable_tqdm True
    --seed "$SEED")

train() { # NAME ARGUMENTS...: does nothing where the run has ended
    local name=$1
    shift
    if [ ! -f "$RUNS/$name/model.safetensors" ]; then
        mkdir -p "$RUNS"
        "$PYTHON" examples/train_retrace.py "${common[@]}" "$@" --output_dir "$RUNS/$name" 2>&1 |
            tee -a "$RUNS/$name.log"
    fi
}

arm() { # NAME CONDITIONING: from the stage-1 drafter, all with the same blocks and steps
    local features=(--features_dir "$FEATURES")
    if [ "$2" = corrected ]; then features=(); fi # it reads the target's states on its own drafts
    train "$1" --init_from "$RUNS/stage1" --conditioning "$2" --num_carried_rounds 2 "${features[@]}" \
        --learning_rate 5e-4 --trajectory_learning_rate 1e-3 --max_steps 400 --per_device_train_batch_size 2 \
        --num_anchors 32 --save_steps 100
}

train stage1 --conditioning none --num_carried_rounds 0 --features_dir "$FEATURES" --target_layer_ids 1 8 14 20 27 \
    --num_draft_layers 3 --block_size 8 --loss_on_seen_tokens True --learning_rate 1.5e-3 --max_steps 1900 \
    --per_device_train_batch_size 4 --num_anchors 64 --save_steps 300
arm corrected corrected
arm sft none
arm gated gated
arm overwrite overwrite

"$PYTHON" examples/evaluate_drafters.py --output "$RUNS/results.json" --answers "$RUNS/answers.jsonl" \
    --arm stage1="$RUNS/stage1" --arm sft="$RUNS/sft" --arm overwrite="$RUNS/overwrite" --arm gated="$RUNS/gated" \
    --arm corrected="$RUNS/corrected" --generate corrected
