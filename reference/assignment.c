/* Rows enter one by one; each is matched along the shortest augmenting path under reduced costs cost - row price - column price,
 * which the prices keep nonnegative (R. Jonker, A. Volgenant, "A shortest augmenting path algorithm for dense and sparse linear
 * assignment problems", Computing 38, 1987). */
#include "reference/assignment.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/mem.h"

typedef struct matcher {
    const double *cost;
    int32_t n_column;
    double *row_price, *column_price;
    int32_t *row_of;    /* [n_column] matched row, -1: free */
    double *distance;   /* [n_column] of the shortest path found so far */
    int32_t *previous;  /* [n_column] column before it on that path, -1: the entering row */
    char *settled;      /* [n_column] */
    int32_t *column_of; /* [n_row] */
} matcher;

/* Dijkstra from `row` to the nearest free column; returns it, or -1. *length is its distance. */
static int32_t nearest_free(matcher *m, int32_t row, double *length) {
    for (int32_t j = 0; j < m->n_column; j++) {
        m->distance[j] = INFINITY;
        m->previous[j] = -1;
        m->settled[j] = 0;
    }
    int32_t from = -1;
    double so_far = 0;
    for (;;) {
        int32_t i = from < 0 ? row : m->row_of[from], best = -1;
        const double *cost = m->cost + (int64_t)i * m->n_column;
        for (int32_t j = 0; j < m->n_column; j++) {
            if (m->settled[j]) continue;
            double x = so_far + (cost[j] - m->row_price[i] - m->column_price[j]);
            if (x < m->distance[j]) {
                m->distance[j] = x;
                m->previous[j] = from;
            }
            if (best < 0 || m->distance[j] < m->distance[best]) best = j;
        }
        if (best < 0 || isinf(m->distance[best])) return -1;
        so_far = m->distance[best];
        if (m->row_of[best] < 0) {
            *length = so_far;
            return best;
        }
        m->settled[best] = 1;
        from = best;
    }
}

static void augment(matcher *m, int32_t row, int32_t end, double length) {
    m->row_price[row] += length;
    for (int32_t j = 0; j < m->n_column; j++) {
        if (!m->settled[j]) continue;
        m->row_price[m->row_of[j]] += length - m->distance[j];
        m->column_price[j] -= length - m->distance[j];
    }
    while (end >= 0) {
        int32_t before = m->previous[end], owner = before < 0 ? row : m->row_of[before];
        m->row_of[end] = owner;
        m->column_of[owner] = end;
        end = before;
    }
}

kv_status kv_assign(const double *cost, int32_t n_row, int32_t n_column, int32_t *column_of) {
    kv_status st = KV_OK;
    matcher m = {.cost = cost, .n_column = n_column, .column_of = column_of};
    KV_NEW(m.row_price, n_row);
    KV_NEW(m.column_price, n_column);
    KV_NEW(m.row_of, n_column);
    KV_NEW(m.distance, n_column);
    KV_NEW(m.previous, n_column);
    KV_NEW(m.settled, n_column);
    for (int32_t j = 0; j < n_column; j++) m.row_of[j] = -1;
    for (int32_t row = 0; row < n_row; row++) {
        double length = 0;
        int32_t end = nearest_free(&m, row, &length);
        if (end < 0)
            KV_RAISE(KV_E_INTERNAL, "no assignment serves row %d of %d with %d columns", row, n_row,
                     n_column);
        augment(&m, row, end, length);
    }
out:
    free(m.row_price);
    free(m.column_price);
    free(m.row_of);
    free(m.distance);
    free(m.previous);
    free(m.settled);
    return st;
}
