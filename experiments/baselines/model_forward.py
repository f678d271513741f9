#!/usr/bin/env python3
"""PyTorch peer of `make bench`'s model line: prefill of the embedded model with SDPA in fp32 on the CPU.

    model_forward.py [MODEL_DIR] [TOKENS] [REPEATS]          (default: traces/model 16384 3)

Optional. Needs torch, transformers, safetensors: python3 -m venv V && V/bin/pip install torch transformers. Threads: those of
OMP_NUM_THREADS or all cores. Work is counted as kvlab counts it: 4*head_dim per causal pair and query head, 2 per weight and
token, logits included. Run it on an idle machine, right before or after `make bench`."""
import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else "traces/model"
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 16384
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    c = json.load(open(folder + "/config.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                 attn_implementation="sdpa").eval()
    token = torch.randint(0, c["vocab_size"], (1, n), generator=torch.Generator().manual_seed(1))
    layers, d, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim", d // heads)
    q, kv = heads * head, c["num_key_value_heads"] * head
    weights = 2.0 * n * (layers * d * (2 * q + 2 * kv + 3 * c["intermediate_size"]) + d * c["vocab_size"])
    flops = weights + 4.0 * head * heads * layers * n * (n + 1) / 2
    seconds = []
    with torch.inference_mode():
        model(token[:, :256], use_cache=False)
        for _ in range(repeats):
            start = time.perf_counter()
            model(token, use_cache=False)
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    print("torch %s SDPA forward, %d tokens, %d threads: median of %d %.3f s (%.3f..%.3f), %.1f GFLOP/s"
          % (torch.__version__, n, torch.get_num_threads(), repeats, median, min(seconds), max(seconds),
             flops / median * 1e-9))


main()
