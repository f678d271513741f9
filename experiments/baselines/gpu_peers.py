#!/usr/bin/env python3
"""kvlab's GPU kernels beside PyTorch's and Triton's, in the same call and on the same shapes: `kvlab bench --device gpu` is run
first (or read from a file), then the peers; one line per pair says kvlab ms, peer ms, how many times slower the peer is.

    gpu_peers.py [--bench FILE] [--csv FILE] [--length 16384] [--deadline 170] [--skip NAME,NAME]

Shapes of Qwen3-8B: 32 query heads, 8 KV heads, d 128, bf16, sinks 4, window 256, B = 2048; random data; medians of 7 by CUDA events.
Peers, each the fastest of the settings listed in its function:
  SDPA        torch scaled_dot_product_attention, cuDNN and FlashAttention-2 backends
  flex        FlexAttention, compiled: causal block mask with the log-sum-exp, and evict_at as mask_mod (q < evict_at[k]); every
              128-key block holds a visible key, so a block mask has nothing to skip beyond causality
  Triton      own kernels (triton_sums.py): log-sum-exp and column sums of q.k without a value product
  torch       sort with ranks (the first half of a selection), an MLP in bf16 with the gradients of its weights, the closed loop as
              batched steps (timed over 256 steps of a full cache, and scaled)
Needs the GPU machine's PyTorch 2.11 and Triton 3.6. A peer that fails or finds no time is printed as such."""
import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # before 2.9
    AuxRequest = None

import triton_sums

N_Q, N_KV, D, SINKS, WINDOW, BUDGET, HEADS = 32, 8, 128, 4, 256, 2048, 288
BLOCK = 128
START = time.time()


def median_ms(run, warm=2, times=7):
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    spent = []
    for _ in range(times):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        spent.append(a.elapsed_time(b))
    return statistics.median(spent)


def random(seed, *shape, dtype=torch.bfloat16):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=g).to(dtype)


class Data:
    def __init__(self, n):
        self.n = n
        self.q = random(1, 1, N_Q, n, D)
        self.k, self.v = random(2, 1, N_KV, n, D), random(3, 1, N_KV, n, D)
        self.lse = None


def decisions(n):
    """evict_at [N_KV][n] of uniform random priorities: a token leaves at the arrival that pushes it below the k best."""
    import heapq
    import random as host
    k, out = BUDGET - SINKS - WINDOW, []
    for h in range(N_KV):
        source, kept, evict_at = host.Random(h), [], [n] * n
        for q in range(SINKS + WINDOW, n):
            t = q - WINDOW
            item = (source.random(), t)
            if len(kept) < k:
                heapq.heappush(kept, item)
            else:
                evict_at[heapq.heappushpop(kept, item)[1]] = q
        out.append(evict_at)
    return torch.tensor(out, dtype=torch.int32, device="cuda")


def sdpa(data, backend):
    with sdpa_kernel(backend):
        return median_ms(lambda: F.scaled_dot_product_attention(data.q, data.k, data.v, is_causal=True,
                                                                enable_gqa=True))


def causal_blocks(n, mask_mod, all_partial):
    """BlockMask of the causal triangle; all_partial: mask_mod is asked in every block."""
    blocks = n // BLOCK
    i = torch.arange(blocks, device="cuda")
    lower = i[None, :] < i[:, None]
    diagonal = i[None, :] == i[:, None]

    def pack(mask):
        count = mask.sum(-1).to(torch.int32)[None, None]
        order = torch.argsort(mask.to(torch.int8), dim=-1, descending=True, stable=True)
        return count.contiguous(), order.to(torch.int32)[None, None].contiguous()

    part = pack(lower | diagonal) if all_partial else pack(diagonal)
    full = (None, None) if all_partial else pack(lower)
    return BlockMask.from_kv_blocks(*part, *full, BLOCK_SIZE=BLOCK, mask_mod=mask_mod)


def flex_log_sum(q, k, v, **options):
    """Log-sum-exp of flex, whichever way this torch spells it."""
    if AuxRequest is None:
        return flex_attention(q, k, v, return_lse=True, **options)[1]
    return flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)[1].lse


def flex_lse(data):
    """The value operand of flex must have 16 columns at least."""
    v = torch.zeros(1, N_KV, data.n, 16, device="cuda", dtype=torch.bfloat16)
    mask = causal_blocks(data.n, lambda b, h, i, j: j <= i, False)
    run = torch.compile(lambda q, k, x, m: flex_log_sum(q, k, x, block_mask=m, enable_gqa=True),
                        dynamic=False)
    got = run(data.q, data.k, v, mask)
    if data.lse is not None:
        worst = (got[0] - data.lse).abs().max().item()
        assert worst < 1e-2, f"flex log-sum-exp is off by {worst}"
    return median_ms(lambda: run(data.q, data.k, v, mask))


def flex_columns(data):
    """Queries and keys change places: every key is a query of flex, and the log-sum-exp over later queries is its answer."""
    blocks = data.n // BLOCK
    keys = data.k.repeat_interleave(N_Q // N_KV, 1)
    v = torch.zeros(1, N_Q, data.n, 16, device="cuda", dtype=torch.bfloat16)
    lse = data.lse[None].contiguous()
    i = torch.arange(blocks, device="cuda")
    part = i[None, :] * BLOCK + BLOCK - 1 >= i[:, None] * BLOCK + WINDOW
    full = i[None, :] * BLOCK >= i[:, None] * BLOCK + BLOCK - 1 + WINDOW

    def pack(mask):
        order = torch.argsort(mask.to(torch.int8), dim=-1, descending=True, stable=True)
        return (mask.sum(-1).to(torch.int32)[None, None].contiguous(),
                order.to(torch.int32)[None, None].contiguous())

    mask = BlockMask.from_kv_blocks(*pack(part & ~full), *pack(full), BLOCK_SIZE=BLOCK,
                                    mask_mod=lambda b, h, t, u: u >= t + WINDOW)

    def sums(x, y, z, log_sum, m):
        def minus(score, b, h, t, u):
            return score - log_sum[b, h, u]
        return flex_log_sum(x, y, z, score_mod=minus, block_mask=m)

    run = torch.compile(sums, dynamic=False)
    return median_ms(lambda: run(keys, data.q, v, lse, mask))


def flex_evict(data):
    evict_at = decisions(data.n)
    group = N_Q // N_KV
    mask = causal_blocks(data.n, lambda b, h, i, j: (j <= i) & (i < evict_at[h // group, j]), True)
    run = torch.compile(lambda q, k, v, m: flex_attention(q, k, v, block_mask=m, enable_gqa=True),
                        dynamic=False)
    o = run(data.q, data.k, data.v, mask)
    for u in (0, data.n // 3, data.n - 1):  # against float64
        seen = (torch.arange(data.n, device="cuda") <= u) & (evict_at[1] > u)
        logits = data.k[0, 1].double() @ data.q[0, group, u].double() * D ** -0.5
        p = torch.softmax(logits.masked_fill(~seen, -float("inf")), 0)
        worst = (p @ data.v[0, 1].double() - o[0, group, u].double()).abs().max().item()
        assert worst < 2e-2, f"flex attention under evict_at is off by {worst} at query {u}"
    return median_ms(lambda: run(data.q, data.k, data.v, mask))


def triton_lse(data):
    best = None
    for setting in triton_sums.LSE_SETTINGS:
        try:
            ms = median_ms(lambda s=setting: triton_sums.lse(data.q[0], data.k[0], s))
        except Exception:  # a setting that does not fit the card
            continue
        if best is None or ms < best[0]:
            best = (ms, setting)
    data.lse = triton_sums.lse(data.q[0], data.k[0], best[1])
    return best[0]


def triton_columns(data):
    best = None
    for setting in triton_sums.COLUMN_SETTINGS:
        try:
            ms = median_ms(lambda s=setting: triton_sums.columns(data.q[0], data.k[0], data.lse, WINDOW, s))
        except Exception:  # a setting that does not fit the card
            continue
        best = ms if best is None else min(best, ms)
    return best


def torch_sort(data):
    priority = torch.rand(HEADS, data.n, device="cuda")
    at = torch.arange(data.n, device="cuda").expand(HEADS, -1)

    def run():
        order = torch.sort(priority, dim=-1, descending=True, stable=True).indices
        return torch.empty_like(order).scatter_(-1, order, at)
    return median_ms(run)


def torch_mlp(data, compiled):
    x = random(5, N_KV, data.n, 2 * D)
    w1 = (0.05 * random(6, N_KV, 2 * D, 256)).requires_grad_()
    b1 = (0.05 * random(7, N_KV, 1, 256)).requires_grad_()
    w2 = (0.05 * random(8, N_KV, 256, 1)).requires_grad_()
    e = random(9, N_KV, data.n, 1)

    def forward(a, b, c, d):
        return torch.bmm(F.silu(torch.baddbmm(c, a, b)), d)
    net = torch.compile(forward, dynamic=False) if compiled else forward

    def run():
        return torch.autograd.grad(net(x, w1, b1, w2), (w1, b1, w2), e)
    return median_ms(run)


def torch_loop(data, reduce_sum):
    """Steps of a full cache of BUDGET + 1 slots, all heads at once, replayed as a CUDA graph of one step; reduce_sum: h2o, else tova
    per head. Scaled to all steps in which something leaves."""
    group, steps = N_Q // N_KV, 256
    keys = random(11, HEADS, BUDGET + 1, D)
    q, fresh = random(12, HEADS, group, D), random(13, HEADS, D)
    total = torch.rand(HEADS, BUDGET + 1, device="cuda")
    row = torch.arange(HEADS, device="cuda")

    def step():
        p = torch.softmax(torch.bmm(q, keys.transpose(1, 2)).float() * D ** -0.5, -1)
        if reduce_sum:
            total.add_(p.sum(1))
            at = total[:, :BUDGET // 2].argmin(-1)
            total.scatter_(1, at[:, None], 0.0)
        else:
            at = p.mean(1).argmin(-1)
        keys[row, at] = fresh

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def run():
        for _ in range(steps):
            graph.replay()
    return median_ms(run, 1, 3) / steps * (data.n - BUDGET)


# kvlab's name in the table of `bench`, peer, function
PAIRS = [  # those that compile last
    ("lse", "Triton, q.k only", triton_lse),
    ("column sums", "Triton, q.k only", triton_columns),
    ("dense attention", "SDPA cuDNN", lambda d: sdpa(d, SDPBackend.CUDNN_ATTENTION)),
    ("dense attention", "SDPA FlashAttention-2", lambda d: sdpa(d, SDPBackend.FLASH_ATTENTION)),
    ("masked attention", "SDPA cuDNN, dense", lambda d: sdpa(d, SDPBackend.CUDNN_ATTENTION)),
    ("select, 288 heads", "torch.sort and ranks alone", torch_sort),
    ("mlp 256, with gradients", "torch bf16, eager", lambda d: torch_mlp(d, False)),
    ("closed loop, tova:reduce=head", "torch steps in a CUDA graph", lambda d: torch_loop(d, False)),
    ("closed loop, h2o", "torch steps in a CUDA graph", lambda d: torch_loop(d, True)),
    ("masked attention", "flex, mask_mod q < evict_at", flex_evict),
    ("lse", "flex, V of 16 columns", flex_lse),
    ("column sums", "flex, V of 16 columns", flex_columns),
    ("mlp 256, with gradients", "torch bf16, compiled", lambda d: torch_mlp(d, True)),
]


def bench_times(text):
    """Name -> median ms of the table that `kvlab bench --device gpu` prints; of two paths the first (wgmma) counts."""
    times = {}
    for line in text.splitlines():
        found = re.match(r"(\S.*?)\s{2,}(?:wgmma\s+|mma\.sync\s+)?(\d+\.\d{3})\s", line) or re.match(
            r"(\S.*?)\s+(?:wgmma|mma\.sync)\s+(\d+\.\d{3})\s", line)
        if found:
            times.setdefault(found.group(1).strip(), float(found.group(2)))
    return times


def main():
    parser = argparse.ArgumentParser(description="kvlab's GPU kernels beside PyTorch and Triton")
    parser.add_argument("--bench", help="output of `kvlab bench --device gpu`; without it the command is run")
    parser.add_argument("--csv", help="also write the table here")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--deadline", type=float, default=170, help="seconds after which no peer is started")
    parser.add_argument("--skip", default="", help="names of kvlab's operations, by comma")
    a = parser.parse_args()
    if a.bench:
        text = open(a.bench).read()
    else:
        here = os.path.dirname(os.path.abspath(__file__))
        kvlab = os.path.join(here, "..", "..", "kvlab")
        text = subprocess.run([kvlab, "bench", "--device", "gpu", "--length", str(a.length), "--repeats", "7"],
                              check=True, capture_output=True, text=True).stdout
        print(text, flush=True)
    times = bench_times(text)
    card = torch.cuda.get_device_properties(0)
    print(f"{card.name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; {a.length} tokens")
    print(f"{'operation':32s} {'kvlab ms':>10s}  {'peer':30s} {'peer ms':>10s} {'times':>7s}", flush=True)
    worst = triton_sums.check(WINDOW)
    rows, data, known = [], Data(a.length), {}
    for name, peer, run in PAIRS:
        if name in a.skip.split(","):
            continue
        ms, why = known.get(peer), ""
        try:
            if ms is None and time.time() - START > a.deadline:
                why = "no time left"
            elif ms is None:
                with torch.set_grad_enabled("gradients" in name):
                    ms = run(data)
        except Exception as e:  # a peer that cannot run here is part of the answer
            why = f"{type(e).__name__}: {str(e).splitlines()[0][:60] if str(e) else ''}"
        if peer.startswith("SDPA cuDNN") and ms:
            known["SDPA cuDNN, dense"] = ms
        mine = times.get(name)
        rows.append((name, mine, peer, ms, ms / mine if ms and mine else None))
        shown = f"{ms:10.3f}" if ms else f"{'-':>10s}"
        print(f"{name:32s} {mine if mine is not None else float('nan'):10.3f}  {peer:30s} {shown} "
              f"{f'{ms / mine:7.2f}' if ms and mine else '':7s} {why}", flush=True)
    print(f"Triton kernels against float64 at 1024 tokens: log-sum-exp {worst[0]:.1e}, column sums {worst[1]:.1e}")
    if a.csv:
        with open(a.csv, "w", newline="") as f:
            out = csv.writer(f)
            out.writerow(["operation", "kvlab_ms", "peer", "peer_ms", "times"])
            out.writerows(rows)
    return 0 if all(times.get(r[0]) is not None for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
