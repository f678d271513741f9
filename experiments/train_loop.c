/* Training loop. */
#include "experiments/train_loop.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "reference/core/rand.h"

static const double save_seconds = 60;

kv_status kv_train_state_open(int32_t n_lane, int64_t n_param, bool theta, bool best,
                              kv_train_state *out) {
    kv_status st = KV_OK;
    int64_t n = n_lane * n_param, t = theta ? n_lane : 0;
    memset(out, 0, sizeof *out);
    out->n_lane = n_lane;
    out->n_param = n_param;
    out->best = INFINITY;
    KV_NEW(out->param, n);
    KV_NEW(out->grad, n);
    KV_NEW(out->m1, n);
    KV_NEW(out->m2, n);
    KV_NEW(out->theta, t);
    KV_NEW(out->d_theta, t);
    KV_NEW(out->t1, t);
    KV_NEW(out->t2, t);
    KV_NEW(out->best_param, best ? n : 0);
    KV_NEW(out->best_theta, best ? t : 0);
out:
    if (st != KV_OK) kv_train_state_free(out);
    return st;
}

void kv_train_state_free(kv_train_state *s) {
    float *owned[] = {s->param, s->grad,    s->m1, s->m2, s->best_param,
                      s->theta, s->d_theta, s->t1, s->t2, s->best_theta};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    memset(s, 0, sizeof *s);
}

/* Trace of step `step`: every epoch runs through all traces in an order of its own. */
static int32_t trace_of(const kv_train_plan *plan, int64_t step) {
    int32_t n = plan->n_trace, at = (int32_t)(step % n);
    uint32_t epoch = (uint32_t)(step / n);
    double own = kv_rand_uniform(plan->seed, epoch, (uint32_t)at, 0, 1);
    /* the at-th trace takes the place of its draw among all draws of the epoch */
    int32_t place = 0;
    for (int32_t i = 0; i < n; i++) {
        double other = kv_rand_uniform(plan->seed, epoch, (uint32_t)i, 0, 1);
        place += other < own || (other == own && i < at);
    }
    return place;
}

static kv_status check_sum(double sum, int64_t step) {
    if (isfinite(sum)) return KV_OK;
    return KV_FAIL(KV_E_DATA, "step %lld: the gradient is no longer finite; lower the rate",
                   (long long)step);
}

static kv_adamw group_at(const kv_adamw *group, const kv_train_plan *plan, int64_t step) {
    kv_adamw now = *group;
    now.rate *= kv_rate_factor(step, plan->steps, plan->warmup);
    return now;
}

/* One step of one group; the norm is summed lane by lane, so threads do not change it. */
static kv_status update(const kv_adamw *group, const kv_train_plan *plan, int64_t step,
                        int32_t n_lane, int64_t n, const float *grad, float *param, float *m1,
                        float *m2) {
    double sum = 0;
    const kv_adamw now = group_at(group, plan, step);
    for (int32_t lane = 0; lane < n_lane; lane++) sum += kv_sum_of_squares(n, grad + lane * n);
    kv_status st = check_sum(sum, step);
    if (st != KV_OK) return st;
    double scale = kv_clip_factor(sqrt(sum), plan->clip);
#pragma omp parallel for schedule(dynamic)
    for (int32_t lane = 0; lane < n_lane; lane++)
        kv_adamw_step(&now, step + 1, n, grad + lane * n, scale, param + lane * n, m1 + lane * n,
                      m2 + lane * n);
    return KV_OK;
}

static kv_status update_scorer(const kv_train_plan *plan, const kv_train_objective *o,
                               kv_train_state *s) {
    double sum;
    if (!o->update)
        return update(&plan->scorer, plan, s->step, s->n_lane, s->n_param, s->grad, s->param, s->m1,
                      s->m2);
    const kv_adamw now = group_at(&plan->scorer, plan, s->step);
    kv_status st = o->update(o->context, &now, s->step + 1, plan->clip, &sum);
    return st == KV_OK ? check_sum(sum, s->step) : st;
}

/* Brings what the objective keeps itself into the state. */
static kv_status fetch(const kv_train_objective *o, kv_train_state *s) {
    return o->fetch ? o->fetch(o->context, s) : KV_OK;
}

static kv_status save(const kv_train_plan *plan, const kv_train_objective *o, kv_train_state *s) {
    kv_status st = fetch(o, s);
    return st == KV_OK ? kv_train_save(plan, s) : st;
}

static kv_status one_step(const kv_train_plan *plan, const kv_train_objective *o, kv_train_state *s,
                          kv_train_figures *figures) {
    kv_status st = o->evaluate(o->context, s, trace_of(plan, s->step), s->step, true, figures);
    if (st != KV_OK) return st;
    if (!isfinite(figures->loss))
        return KV_FAIL(KV_E_DATA,
                       "step %lld: the loss is %g; lower the rate, or look for damaged inputs with "
                       "`kvlab inspect --deep`",
                       (long long)s->step, figures->loss);
    st = update_scorer(plan, o, s);
    if (st == KV_OK && s->theta && plan->theta.rate > 0)
        st = update(&plan->theta, plan, s->step, s->n_lane, 1, s->d_theta, s->theta, s->t1, s->t2);
    s->step++;
    return st;
}

static size_t lanes_bytes(const kv_train_state *s) {
    return (size_t)(s->n_lane * s->n_param) * sizeof(float);
}

/* Loss on the held-out trace; keeps the best parameters. True when patience is exhausted. */
static kv_status check(const kv_train_plan *plan, const kv_train_objective *o, kv_train_state *s,
                       bool *stop) {
    kv_train_figures f;
    kv_status st = o->evaluate(o->context, s, plan->held_out, s->step, false, &f);
    if (st != KV_OK) return st;
    kv_log(KV_LOG_INFO, "train", "step %lld: held-out loss %.4f, decisions %.3f",
           (long long)s->step, f.loss, f.right);
    if (f.loss < s->best) {
        st = fetch(o, s);
        if (st != KV_OK) return st;
        s->best = f.loss;
        s->best_step = s->step;
        memcpy(s->best_param, s->param, lanes_bytes(s));
        if (s->theta) memcpy(s->best_theta, s->theta, (size_t)s->n_lane * sizeof *s->theta);
    }
    *stop = plan->patience > 0 && s->step - s->best_step >= plan->patience * plan->check;
    return KV_OK;
}

static void blend(kv_train_figures *mean, const kv_train_figures *now, int64_t step) {
    double share = fmax(1.0 / 16, 1.0 / (double)(step + 1));
    mean->loss += share * (now->loss - mean->loss);
    mean->right += share * (now->right - mean->right);
    mean->keep += share * (now->keep - mean->keep);
}

kv_status kv_train_run(const kv_train_plan *plan, const kv_train_objective *o, kv_train_state *s,
                       kv_train_figures *last) {
    kv_status st = KV_OK;
    kv_progress progress;
    bool found = false, stop = false;
    int64_t resumed;
    double saved = kv_now();
    *last = (kv_train_figures){0};
    KV_TRY(kv_train_restore(plan, s, &found));
    if (found)
        kv_log(KV_LOG_WARN, "train", "continuing from step %lld of %s", (long long)s->step,
               plan->checkpoint);
    if (o->load) KV_TRY(o->load(o->context, s));
    resumed = s->step;
    kv_progress_begin(&progress, "training", (double)(plan->steps - resumed));
    while (s->step < plan->steps && !stop) {
        kv_train_figures now;
        st = kv_interrupt_poll();
        if (st == KV_OK) st = one_step(plan, o, s, &now);
        if (st == KV_E_INTERRUPTED) {
            KV_TRY(save(plan, o, s));
            KV_RAISE(KV_E_INTERRUPTED, "interrupted after step %lld; the same command continues",
                     (long long)s->step);
        }
        if (st != KV_OK) goto out;
        blend(last, &now, s->step - 1 - resumed);
        snprintf(progress.note, sizeof progress.note, "loss %.4f %s %.3f", last->loss,
                 isnan(last->right) ? "keep" : "decisions",
                 isnan(last->right) ? last->keep : last->right);
        if (plan->held_out >= 0 && (s->step % plan->check == 0 || s->step == plan->steps))
            KV_TRY(check(plan, o, s, &stop));
        if (kv_now() - saved > save_seconds && s->step < plan->steps) {
            KV_TRY(save(plan, o, s));
            saved = kv_now();
        }
        kv_progress_update(&progress, (double)(s->step - resumed));
    }
    kv_progress_end(&progress);
    KV_TRY(fetch(o, s));
    if (plan->held_out >= 0) {
        memcpy(s->param, s->best_param, lanes_bytes(s));
        if (s->theta) memcpy(s->theta, s->best_theta, (size_t)s->n_lane * sizeof *s->theta);
        kv_log(KV_LOG_INFO, "train", "best held-out loss %.4f at step %lld", s->best,
               (long long)s->best_step);
    }
out:
    return st;
}
