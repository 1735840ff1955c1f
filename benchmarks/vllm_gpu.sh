#!/bin/sh
# On a machine with a CUDA GPU and vLLM 0.32: the plugin's checks with FlashAttention and with Triton attention.
#   sh benchmarks/vllm_gpu.sh MODEL      (a directory or hub id; default: the demo model)
# Some minutes for a small model. Needs `pip install -e ".[vllm,gguf]"`. bfloat16 rounds, so equal means within 0.05 here.
set -e
MODEL=${1:-demo}
OUT=benchmarks/results
for BACKEND in FLASH_ATTN TRITON_ATTN; do
  python benchmarks/vllm_equal.py --model "$MODEL" --device cuda --dtype bfloat16 --tolerance 0.05 \
    --attention "$BACKEND" --json "$OUT/vllm-equal-$BACKEND.json"
done
python -m pytest tests/vllm
gsm eval "$MODEL" --engine vllm --device cuda --dtype bfloat16 --config sparse --prompt-tokens 7680 \
  --windows-per-prefill 4 --json $OUT/vllm-eval-cuda.json
gsm bench "$MODEL" --engine vllm --device cuda --dtype bfloat16 --arms sparse --prompt-tokens 7680 --new-tokens 128 \
  --json $OUT/vllm-bench-cuda.json
