/* The recurrent memory of the scorer network, chunk by chunk (maths.md 6.5-6.7, with the denominator's gradient; the norm: 6.11).
 * Part of scorer_net_impl.h, which defines the tape. Equations are named by their left side there; `y` of row p is the query of
 * token p - window (delay) or p. */

static void list_chunks(const kv_net_spec *spec, const NAME(kv_net_input) * in,
                        struct NAME(kv_net_tape) * t) {
    int64_t delay = spec->delay ? spec->window : 0;
    t->n_chunk = 0;
    for (int32_t doc = 0; doc < in->n_doc; doc++) {
        int64_t begin = in->doc_first[doc], end = in->doc_first[doc + 1];
        for (int64_t at = begin; at < end; at += in->chunk) {
            int64_t n = end - at < in->chunk ? end - at : in->chunk, skip = begin + delay - at;
            skip = skip < 0 ? 0 : skip > n ? n : skip;
            t->list[t->n_chunk++] =
                (chunk){at, (int32_t)n, (int32_t)skip, at == begin, at + n == end};
        }
    }
}

/* b_j, mu_j, a_j - M_c of one chunk that starts at log scale `level`; returns M_c. */
static double chunk_levels(struct NAME(kv_net_tape) * t, const chunk *c, double level) {
    double b = 0, best = level, end = 0, sum_top;
    for (int32_t j = 0; j < c->n; j++) {
        const double *g = t->gate + (c->first + j) * 4;
        b += g[1];
        best = fmax(best, g[0] - b);
        t->sum[j] = b;
        t->top[j] = b + best;
    }
    sum_top = b + best;                       /* max(g + M_{c-1}, max a_j) is mu of the last row */
    for (int32_t j = c->n - 1; j >= 0; j--) { /* g - b_j as a suffix sum */
        const double *g = t->gate + (c->first + j) * 4;
        t->fresh[j] = end + g[0] - sum_top;
        end += g[1];
    }
    return sum_top;
}

/* weight[j][j'] = sc D_jj' for the rows that read; 0 above the diagonal. */
static void chunk_weights(const kv_net_spec *spec, struct NAME(kv_net_tape) * t, const chunk *c) {
    const double log_scale = -0.5 * log((double)spec->n_key);
    for (int32_t j = c->skip; j < c->n; j++) {
        REAL *row = t->weight + (int64_t)j * c->n;
        double from = t->sum[j] - t->top[j] + log_scale;
        for (int32_t i = 0; i <= j; i++)
            row[i] = (REAL)(from - t->sum[i] + t->gate[(c->first + i) * 4]);
        NAME(kv_exp)(j + 1, row, row);
        memset(row + j + 1, 0, (size_t)(c->n - j - 1) * sizeof *row);
    }
}

/* sc bb_j */
static REAL carried(const kv_net_spec *spec, const struct NAME(kv_net_tape) * t, int32_t j,
                    double level) {
    return (REAL)(exp(t->sum[j] + level - t->top[j]) / sqrt((double)spec->n_key));
}

static void copy_scaled(int32_t n, const REAL *in, REAL by, REAL *out) {
    for (int32_t i = 0; i < n; i++) out[i] = by * in[i];
}

/* num of one row -> h, divisor, den of its token. */
static void read_row(const kv_net_spec *spec, struct NAME(kv_net_tape) * t, const REAL *num,
                     double top, int64_t token) {
    double by = exp(-top);
    if (spec->norm) {
        double size = 0;
        for (int32_t i = 0; i < spec->n_value; i++) size += (double)num[i] * (double)num[i];
        by = sqrt(size / spec->n_value + 1e-6 * by * by);
    } else {
        double den = (double)num[spec->n_value];
        t->den[token] = fabs(den) > by ? (den > 0 ? 1 : -1) : 0;
        by = fmax(fabs(den), by);
    }
    t->divisor[token] = (REAL)by;
    copy_scaled(spec->n_value, num, (REAL)(1 / by), t->h + token * spec->n_value);
}

static void forward_memory(const kv_net_spec *spec, struct NAME(kv_net_tape) * t) {
    int32_t nk = spec->n_key, na = t->n_augmented, np = n_project(spec);
    int64_t size = (int64_t)nk * na, delay = spec->delay ? spec->window : 0;
    memset(t->h, 0, (size_t)(t->n_token * spec->n_value) * sizeof *t->h);
    memset(t->divisor, 0, (size_t)t->n_token * sizeof *t->divisor);
    for (int32_t i = 0; i < t->n_chunk; i++) {
        const chunk *c = &t->list[i];
        REAL *state = t->state + i * size, *next = state + size;
        if (c->opens) {
            memset(state, 0, (size_t)size * sizeof *state);
            t->level[i] = 0;
        }
        double end = chunk_levels(t, c, t->level[i]);
        chunk_weights(spec, t, c);
        int32_t skip = c->skip, rows = c->n - skip;
        const REAL *own = t->project + c->first * np, *key = own + nk, *value = own + 2 * nk;
        int64_t back =
            rows ? skip - delay : 0; /* from the chunk's first token to the first read for */
        const REAL *query = own + back * np;
        REAL *num = t->rows, *weight = t->weight + (int64_t)skip * c->n;
        NAME(kv_gemm)(KV_NN, rows, na, nk, query, np, state, na, false, num, na);
        for (int32_t j = 0; j < rows; j++)
            copy_scaled(na, num + j * na, carried(spec, t, skip + j, t->level[i]), num + j * na);
        NAME(kv_gemm)(KV_NT, rows, c->n, nk, query, np, key, np, false, t->product, c->n);
        for (int32_t j = 0; j < rows * c->n; j++) t->product[j] *= weight[j];
        NAME(kv_gemm)(KV_NN, rows, na, c->n, t->product, c->n, value, np, true, num, na);
        for (int32_t j = 0; j < rows; j++)
            read_row(spec, t, num + j * na, t->top[skip + j], c->first + skip + j - delay);
        for (int32_t j = 0; j < c->n; j++)
            copy_scaled(nk, key + j * np, (REAL)exp(t->fresh[j]), t->scaled + j * nk);
        copy_scaled((int32_t)size, state, (REAL)exp(t->sum[c->n - 1] + t->level[i] - end), next);
        NAME(kv_gemm)(KV_TN, nk, na, c->n, t->scaled, nk, value, np, true, next, na);
        t->level[i + 1] = end;
    }
}

static double dot(int32_t n, const REAL *a, const REAL *b) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Gradients of q~, k~, v~ and of the gates (maths.md 6.7). */
static void backward_memory(const kv_net_spec *spec, struct NAME(kv_net_tape) * t) {
    int32_t nk = spec->n_key, na = t->n_augmented, np = n_project(spec), nv = spec->n_value;
    int64_t size = (int64_t)nk * na, delay = spec->delay ? spec->window : 0;
    memset(t->d_project, 0, (size_t)(t->n_token * np) * sizeof *t->d_project);
    double later = 0; /* sum of y.dy - k~.dk~ over the positions behind, within the document */
    for (int32_t i = t->n_chunk - 1; i >= 0; i--) {
        const chunk *c = &t->list[i];
        const REAL *state = t->state + i * size;
        if (c->closes) {
            memset(t->d_state, 0, (size_t)size * sizeof *t->d_state);
            later = 0;
        }
        double end = chunk_levels(t, c, t->level[i]);
        chunk_weights(spec, t, c);
        int32_t skip = c->skip, rows = c->n - skip;
        const REAL *own = t->project + c->first * np, *key = own + nk, *value = own + 2 * nk;
        int64_t back =
            rows ? skip - delay : 0; /* from the chunk's first token to the first read for */
        const REAL *query = own + back * np, *delta = t->delta + (c->first + back) * na;
        REAL *d_own = t->d_project + c->first * np, *d_query = d_own + back * np;
        REAL *weight = t->weight + (int64_t)skip * c->n;
        /* product = sc S D, mix = sc P D */
        NAME(kv_gemm)(KV_NT, rows, c->n, nk, query, np, key, np, false, t->product, c->n);
        NAME(kv_gemm)(KV_NT, rows, c->n, na, delta, na, value, np, false, t->mix, c->n);
        for (int32_t j = 0; j < rows * c->n; j++) {
            t->product[j] *= weight[j];
            t->mix[j] *= weight[j];
        }
        /* dy */
        NAME(kv_gemm)(KV_NT, rows, nk, na, delta, na, state, na, false, t->rows, nk);
        for (int32_t j = 0; j < rows; j++)
            copy_scaled(nk, t->rows + j * nk, carried(spec, t, skip + j, t->level[i]),
                        d_query + j * np);
        NAME(kv_gemm)(KV_NN, rows, nk, c->n, t->mix, c->n, key, np, true, d_query, np);
        /* dk~, dv~ from later chunks, then from this one */
        NAME(kv_gemm)(KV_NT, c->n, nk, na, value, np, t->d_state, na, false, t->rows, nk);
        for (int32_t j = 0; j < c->n; j++)
            copy_scaled(nk, t->rows + j * nk, (REAL)exp(t->fresh[j]), d_own + nk + j * np);
        NAME(kv_gemm)(KV_TN, c->n, nk, rows, t->mix, c->n, query, np, true, d_own + nk, np);
        NAME(kv_gemm)(KV_NN, c->n, nv, nk, key, np, t->d_state, na, false, t->rows, nv);
        for (int32_t j = 0; j < c->n; j++)
            copy_scaled(nv, t->rows + j * nv, (REAL)exp(t->fresh[j]), d_own + 2 * nk + j * np);
        NAME(kv_gemm)(KV_TN, c->n, nv, rows, t->product, c->n, delta, na, true, d_own + 2 * nk, np);
        /* dC of the chunk before */
        copy_scaled((int32_t)size, t->d_state, (REAL)exp(t->sum[c->n - 1] + t->level[i] - end),
                    t->d_state);
        for (int32_t j = 0; j < rows; j++)
            copy_scaled(nk, query + j * np, carried(spec, t, skip + j, t->level[i]),
                        t->scaled + j * nk);
        NAME(kv_gemm)(KV_TN, nk, na, rows, t->scaled, nk, delta, na, true, t->d_state, na);
        /* gates */
        for (int32_t j = c->n - 1; j >= 0; j--) {
            const double *g = t->gate + (c->first + j) * 4;
            double of_key = dot(nk, key + j * np, d_own + nk + j * np);
            int32_t row = j - skip;
            if (row >= 0) later += dot(nk, query + row * np, d_query + row * np);
            later -= of_key;
            t->d_gate[(c->first + j) * 2] = (REAL)(of_key * g[2]);
            t->d_gate[(c->first + j) * 2 + 1] = (REAL)(later * g[3]);
        }
    }
}
