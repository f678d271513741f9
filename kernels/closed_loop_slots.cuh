// What a block of the closed loop holds, and the logits of its slots for a batch of queries.
//
// A slot keeps the position of its key; the key itself is read where the document has it, once per batch. Columns of values are
// (row, query of the batch), a row being a query head of the set; places 0 .. n_slot - 1 of a column are the slots, those from `fresh`
// on the keys that arrive in the batch: whichever slot such a key will take, its logits are there. Behind the slots that are held, up to
// a multiple of 4, the logits are -inf.
#ifndef KV_KERNELS_CLOSED_LOOP_SLOTS_CUH
#define KV_KERNELS_CLOSED_LOOP_SLOTS_CUH

#include "kernels/closed_loop.cuh"

namespace closed_loop {

constexpr int SHARE = 8; // threads that share an fp32 key: 16 bytes each of 128

// Sums x[0..ROWS) over the eight threads that share a key. Each gets the total of one row; returns which.
template <int ROWS> __device__ __forceinline__ int share_sum(float (&x)[ROWS], float *total) {
    const int lane = (int)threadIdx.x % 32;
    int row = 0, width = ROWS;
#pragma unroll
    for (int d = SHARE / 2; d > 0; d /= 2) {
        if (width > 1) {
            width /= 2;
            const bool upper = lane & d;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                if (i >= width) break;
                const float mine = upper ? x[width + i] : x[i], other = upper ? x[i] : x[width + i];
                x[i] = mine + __shfl_xor_sync(~0u, other, d);
            }
            row += upper ? width : 0;
        } else {
            x[0] += __shfl_xor_sync(~0u, x[0], d);
        }
    }
    *total = x[0];
    return row;
}

// FAR: slot arrays lie in device memory.
template <class T, int D, bool FAR> struct slots {
    static constexpr int VECTOR = 16 / (int)sizeof(T);
    static constexpr int Q_STRIDE = D + 64 / (int)sizeof(T); // of staged queries: no bank conflicts
    const loop_args &a;
    char *shared, *far;
    int block, set, rows;

    __device__ T *q() const { return reinterpret_cast<T *>(shared + a.at.q); } // [column][Q_STRIDE]
    __device__ char *arrays() const { return FAR ? far : shared + a.at.bytes; }
    __device__ float *column(int i) const {
        return reinterpret_cast<float *>(arrays() + a.at.value) + i * a.pitch;
    }
    __device__ double *statistic() const { return reinterpret_cast<double *>(arrays() + a.at.a); }
    __device__ int *time() const { return reinterpret_cast<int *>(arrays() + a.at.time); }
    __device__ column_total *total() const {
        return reinterpret_cast<column_total *>(shared + a.at.total);
    }
    // Of global slots 0 .. n - 1, which are dealt out in turn, those of this block.
    __device__ int share_of(int n) const { return (n - block + a.n_block - 1) / a.n_block; }
    __device__ const T *document_key(int member, int t) const {
        const size_t head = (size_t)(set * a.members + member);
        return static_cast<const T *>(a.k) + (head * (size_t)a.n_token + (size_t)t) * D;
    }
    // Position of the key at a place of a column; some position where there is none.
    __device__ int position(const query_batch &b, int place) const {
        return place < b.held ? time()[place] : b.first + min(max(place - a.fresh, 0), b.n - 1);
    }
    // Of `width` neighbouring places, whether any is looked at.
    __device__ bool used(const query_batch &b, int first, int width) const {
        return first < b.held || first + width > a.fresh;
    }
    // place < fresh + b.n. The product counts unless the slot is empty.
    __device__ float logit(const query_batch &b, int place, float product) const {
        const bool empty = place < a.fresh && (place >= b.held || place == b.hole);
        return empty ? -INFINITY : product * a.scale;
    }

    // Brings the queries of positions u .. u + batch - 1 on their way.
    __device__ void fetch(int u) const {
        constexpr int per_row = D / VECTOR;
        const int n = min(a.batch, a.n_token - u);
        for (int i = (int)threadIdx.x; i < rows * a.batch * per_row; i += THREADS) {
            const int c = i % per_row * VECTOR, at = i / per_row, r = at / a.batch,
                      j = at - r * a.batch;
            const size_t from = (size_t)(set * rows + r) * (size_t)a.n_token + (size_t)(u + j);
            if (j < n)
                portable::copy16(q() + at * Q_STRIDE + c,
                                 static_cast<const T *>(a.q) + from * D + c, true);
        }
        portable::copy_commit();
    }

    // fp32: eight threads share two keys.
    __device__ void logits_fma(const query_batch &b) const {
        constexpr int LOADS = D / SHARE / 4, COLUMNS = 4, KEYS = 2, STEP = KEYS * 32 / SHARE;
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, part = lane % SHARE;
        const int places = a.fresh + b.n, steps = (places + STEP - 1) / STEP,
                  columns = a.group * a.batch;
        for (int item = warp; item < a.members * steps; item += WARPS) {
            const int member = item / steps, first = item % steps * STEP;
            if (!used(b, first, STEP)) continue;
            float4 y[KEYS][LOADS];
            int place[KEYS];
#pragma unroll
            for (int k = 0; k < KEYS; k++) {
                place[k] = first + k * (32 / SHARE) + lane / SHARE;
                const float4 *key =
                    reinterpret_cast<const float4 *>(document_key(member, position(b, place[k])));
#pragma unroll
                for (int c = 0; c < LOADS; c++) y[k][c] = __ldcg(key + c * SHARE + part);
            }
            for (int column0 = 0; column0 < columns; column0 += COLUMNS) {
                const T *x0 = q() + (member * columns + column0) * Q_STRIDE;
                float sum[KEYS][COLUMNS] = {};
#pragma unroll
                for (int c = 0; c < LOADS; c++)
#pragma unroll
                    for (int r = 0; r < COLUMNS; r++) {
                        const float4 x =
                            reinterpret_cast<const float4 *>(x0 + r * Q_STRIDE)[c * SHARE + part];
#pragma unroll
                        for (int k = 0; k < KEYS; k++) {
                            sum[k][r] = fmaf(x.x, y[k][c].x, sum[k][r]);
                            sum[k][r] = fmaf(x.y, y[k][c].y, sum[k][r]);
                            sum[k][r] = fmaf(x.z, y[k][c].z, sum[k][r]);
                            sum[k][r] = fmaf(x.w, y[k][c].w, sum[k][r]);
                        }
                    }
#pragma unroll
                for (int k = 0; k < KEYS; k++) {
                    float product;
                    const int r = column0 + share_sum<COLUMNS>(sum[k], &product);
                    if (part % (SHARE / COLUMNS) == 0 && r < columns && place[k] < places)
                        column(member * columns + r)[place[k]] = logit(b, place[k], product);
                }
            }
        }
    }

    // Half and bfloat16: matrix products, 16 places by 8 columns. A thread holds, of places lane/4 and lane/4 + 8 and of one column, 8
    // neighbours of every 32 elements: they act as elements 2t, 2t+1, 2t+8, 2t+9 of two 16-wide steps, in keys and queries alike.
    __device__ void logits_tensor(const query_batch &b) const {
        constexpr int BLOCKS = D / 32;
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = lane / 4,
                  t = lane % 4;
        const int places = a.fresh + b.n, tiles = (places + 15) / 16, columns = a.group * a.batch;
        struct {
            int member, tile;
            __device__ void settle(int tiles) {
                for (; tile >= tiles; tile -= tiles) member++;
            }
        } now = {0, warp}, next;
        const auto load = [&](int member, int tile, uint4(&y)[2][BLOCKS]) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const T *key = document_key(member, position(b, 16 * tile + row + 8 * r)) + 8 * t;
#pragma unroll
                for (int c = 0; c < BLOCKS; c++)
                    y[r][c] = __ldcg(reinterpret_cast<const uint4 *>(key + 32 * c));
            }
        };
        uint4 y[2][BLOCKS], ahead[2][BLOCKS];
        now.settle(tiles);
        if (now.member < a.members) load(now.member, now.tile, ahead);
        for (; now.member < a.members; now = next) {
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < BLOCKS; c++) y[r][c] = ahead[r][c];
            next = {now.member, now.tile + WARPS};
            next.settle(tiles);
            if (next.member < a.members) load(next.member, next.tile, ahead);
            const int place = 16 * now.tile + row;
            if (!used(b, 16 * now.tile, 16)) continue;
            const T *x0 = q() + (now.member * columns + row) * Q_STRIDE + 8 * t;
            float *value = column(now.member * columns + 2 * t) + place;
#pragma unroll 1
            for (int r = 2 * t; r - 2 * t < columns; r += 8) {
                float sum[2][4] = {};
#pragma unroll
                for (int c = 0; c < BLOCKS; c++) {
                    const uint4 x = pack(x0 + 32 * c);
                    const uint32_t even[4] = {y[0][c].x, y[1][c].x, y[0][c].y, y[1][c].y};
                    const uint32_t odd[4] = {y[0][c].z, y[1][c].z, y[0][c].w, y[1][c].w};
                    portable::mma16(sum[0], even, x.x, x.y, T());
                    portable::mma16(sum[1], odd, x.z, x.w, T());
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (r + i % 2 < columns && place + i / 2 * 8 < places)
                        value[i % 2 * a.pitch + i / 2 * 8] =
                            logit(b, place + i / 2 * 8, sum[0][i] + sum[1][i]);
                x0 += 8 * Q_STRIDE;
                value += 8 * a.pitch;
            }
        }
    }

    // Ends with the threads of the block together.
    __device__ void logits(const query_batch &b) const {
        if constexpr (sizeof(T) == 2)
            logits_tensor(b);
        else
            logits_fma(b);
        __syncthreads();
        if (a.softcap > 0) {
            const int places = a.fresh + b.n;
            for (int i = (int)threadIdx.x; i < rows * a.batch * places; i += THREADS) {
                float *x = column(i / places) + i % places;
                if (*x != -INFINITY) *x = a.softcap * tanhf(*x / a.softcap);
            }
            __syncthreads();
        }
    }
};

} // namespace closed_loop

#endif
