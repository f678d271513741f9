"""Triton peers of kvlab's dense passes: log-sum-exp by query and column sums by key of causal attention logits, without a value
product. Blocks are loaded by pointers, products are bf16 with fp32 accumulation, exponentials exp2. Used by gpu_peers.py."""
import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# stationary rows, streamed rows, warps, stages
LSE_SETTINGS = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)]
COLUMN_SETTINGS = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3)]


@triton.jit
def lse_kernel(Q, K, OUT, unit, n, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
               KEYS: tl.constexpr):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    key = tl.arange(0, KEYS)
    q = tl.load(Q + (head * n + row[:, None]) * DIM + dim[None, :])
    keys = K + head // GROUP * n * DIM
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, block * ROWS, KEYS):
        k = tl.load(keys + (first + key)[:, None] * DIM + dim[None, :])
        x = tl.dot(q, tl.trans(k)) * unit
        new = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new[:, None]), 1)
        top = new
    for first in range(block * ROWS, block * ROWS + ROWS, KEYS):
        k = tl.load(keys + (first + key)[:, None] * DIM + dim[None, :])
        x = tl.dot(q, tl.trans(k)) * unit
        x = tl.where((first + key)[None, :] <= row[:, None], x, -float("inf"))
        new = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new[:, None]), 1)
        top = new
    tl.store(OUT + head * n + row, (top + tl.log2(total)) * 0.6931471805599453)


@triton.jit
def column_kernel(Q, K, LSE, OUT, unit, n, window, GROUP: tl.constexpr, DIM: tl.constexpr,
                  KEYS: tl.constexpr, ROWS: tl.constexpr):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    key = block * KEYS + tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    row = tl.arange(0, ROWS)
    k = tl.load(K + (head // GROUP * n + key[:, None]) * DIM + dim[None, :])
    queries = Q + head * n * DIM
    total = tl.zeros((KEYS,), tl.float32)
    first_row = (block * KEYS + window) // ROWS * ROWS
    unmasked = tl.minimum((block * KEYS + KEYS - 1 + window + ROWS - 1) // ROWS * ROWS, n)
    for first in range(first_row, unmasked, ROWS):
        u = first + row
        q = tl.load(queries + u[:, None] * DIM + dim[None, :], mask=u[:, None] < n, other=0.0)
        lse = tl.load(LSE + head * n + u, mask=u < n, other=0.0) * 1.4426950408889634
        p = tl.exp2(tl.dot(k, tl.trans(q)) * unit - lse[None, :])
        later = (u[None, :] >= key[:, None] + window) & (u[None, :] < n)
        total += tl.sum(tl.where(later, p, 0.0), 1)
    for first in range(unmasked, n, ROWS):
        u = first + row
        q = tl.load(queries + u[:, None] * DIM + dim[None, :])
        lse = tl.load(LSE + head * n + u) * 1.4426950408889634
        total += tl.sum(tl.exp2(tl.dot(k, tl.trans(q)) * unit - lse[None, :]), 1)
    tl.store(OUT + head * n + key, total)


def lse(q, k, setting):
    """q [heads][n][d], k [kv heads][n][d], n a multiple of 128 -> natural log-sum-exp [heads][n]"""
    heads, n, d = q.shape
    rows, keys, warps, stages = setting
    out = torch.empty(heads, n, device=q.device)
    lse_kernel[(n // rows, heads)](q, k, out, d ** -0.5 * LOG2E, n, heads // k.shape[0], d, rows, keys,
                                   num_warps=warps, num_stages=stages)
    return out


def columns(q, k, log_sum, window, setting):
    """Sums over u >= t + window of p(u -> t): [heads][n]"""
    heads, n, d = q.shape
    keys, rows, warps, stages = setting
    out = torch.empty(heads, n, device=q.device)
    column_kernel[(n // keys, heads)](q, k, log_sum, out, d ** -0.5 * LOG2E, n, window,
                                      heads // k.shape[0], d, keys, rows, num_warps=warps,
                                      num_stages=stages)
    return out


def check(window, n=1024):
    """Largest errors against float64: log-sum-exp (absolute), column sums (relative to the largest)."""
    g = torch.Generator(device="cuda").manual_seed(3)
    q = torch.randn(4, n, 128, device="cuda", generator=g).bfloat16()
    k = torch.randn(1, n, 128, device="cuda", generator=g).bfloat16()
    u = torch.arange(n, device="cuda")
    logits = q.double() @ k.double().transpose(1, 2) * 128 ** -0.5
    logits.masked_fill_(u[None, None, :] > u[None, :, None], -float("inf"))
    want = torch.logsumexp(logits, 2)
    p = torch.exp(logits - want[:, :, None])
    p.masked_fill_(u[None, :, None] < u[None, None, :] + window, 0)
    got = lse(q, k, LSE_SETTINGS[1])
    sums = columns(q, k, got, window, COLUMN_SETTINGS[1])
    worst = ((got - want).abs().max().item(),
             ((sums - p.sum(1)).abs().max() / p.sum(1).max()).item())
    assert worst[0] < 1e-3 and worst[1] < 1e-3, f"the Triton kernels are wrong: {worst}"
    return worst
