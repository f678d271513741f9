/* The training loop on a toy objective: exact resume, early stop, frozen group, bad numbers, parameters that lie elsewhere. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "experiments/train.h"
#include "reference/core/log.h"
#include "reference/core/progress.h"
#include "tests/naive/test_folder.h"
#include "traces/safetensors.h"

static void setup(void) {
    test_folder_enter();
    kv_progress_set_quiet(1);
    kv_log_set_level(KV_LOG_ERROR);
}

TestSuite(train_loop, .init = setup, .fini = test_folder_leave);

/* Pulls every parameter of a lane towards the trace's number; can stop once in the middle. */
typedef struct pull {
    int64_t interrupt_at, bad_at;
    double checks[64];
    int n_check;
} pull;

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    pull *p = context;
    if (train && step == p->interrupt_at) {
        p->interrupt_at = -1;
        return KV_FAIL(KV_E_INTERRUPTED, "now");
    }
    double loss = 0;
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        for (int64_t i = 0; i < s->n_param; i++) {
            double d = (double)s->param[lane * s->n_param + i] - trace - lane;
            s->grad[lane * s->n_param + i] = (float)d;
            loss += d * d / 2;
        }
        s->d_theta[lane] = s->theta[lane] - 1;
    }
    if (!train) { /* best in the middle */
        loss = p->n_check == 2 ? -1 : p->n_check;
        p->checks[p->n_check++] = s->param[0];
    }
    *out = (kv_train_figures){.loss = step == p->bad_at ? NAN : loss, .right = .5, .keep = .5};
    return KV_OK;
}

static kv_train_plan small_plan(const char *checkpoint) {
    kv_adamw group = {.rate = .05, .beta1 = .9, .beta2 = .95, .eps = 1e-8};
    return (kv_train_plan){.steps = 24,
                           .warmup = 4,
                           .scorer = group,
                           .theta = group,
                           .clip = 1,
                           .seed = 7,
                           .n_trace = 5,
                           .held_out = -1,
                           .check = 3,
                           .checkpoint = checkpoint,
                           .identity = "abc"};
}

Test(train_loop, loop) {
    kv_train_state whole, cut;
    kv_train_figures last;
    pull p = {.interrupt_at = -1, .bad_at = -1};
    kv_train_objective o = {.context = &p, .evaluate = evaluate};
    kv_train_plan plan = small_plan("whole.checkpoint");
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &whole), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &whole, &last), KV_OK, "%s", kv_error_message());
    cr_expect_eq(whole.step, 24);
    cr_expect_neq(whole.theta[0], 0);
    /* interrupted after 11 steps, in another process for all that the loop knows */
    plan.checkpoint = "cut.checkpoint";
    p.interrupt_at = 11;
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_INTERRUPTED);
    kv_train_state_free(&cut);
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    strcpy(plan.identity, "other");
    cr_expect_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_USAGE, "a foreign checkpoint is used");
    strcpy(plan.identity, "abc");
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_OK, "%s", kv_error_message());
    cr_expect_eq(memcmp(whole.param, cut.param, 12 * sizeof(float)), 0, "resumed: other bytes");
    cr_expect_eq(memcmp(whole.theta, cut.theta, 3 * sizeof(float)), 0, "resumed: other decay");
    kv_train_state_free(&cut);
    /* frozen decay; early stop puts back the best: third check, after 9 steps; patience 2 ends at 15 */
    plan = small_plan("stop.checkpoint");
    plan.theta.rate = 0;
    plan.held_out = 4;
    plan.patience = 2;
    cr_assert_eq(kv_train_state_open(3, 4, true, true, &cut), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_OK);
    cr_expect_eq(cut.step, 15, "stopped after %ld", (long)cut.step);
    cr_expect_eq(cut.best_step, 9);
    cr_expect_eq((double)cut.param[0], p.checks[2], "not the best parameters");
    cr_expect_eq(cut.theta[0], 0, "the frozen group moved");
    kv_train_state_free(&cut);
    /* a loss that is no number */
    plan = small_plan("bad.checkpoint");
    p.bad_at = 6;
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    cr_expect_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "step 6"), "%s", kv_error_message());
    kv_train_state_free(&cut);
    kv_train_state_free(&whole);
}

Test(train_loop, a_checkpoint_without_a_sound_step_is_refused) {
    static const char *const bad[][3] = {
        {"-3", "inf", "0"}, {"abc", "inf", "0"}, {"3.7", "inf", "0"}, {"25", "inf", "0"},
        {"", "inf", "0"},   {"5", "nan", "0"},   {"5", "x", "0"},     {"5", "inf", "6"}};
    float one[1] = {1};
    const kv_tensor_out tensor = {.name = "param", .n_dim = 1, .shape = {1}, .data = one};
    kv_train_plan plan = small_plan("odd.checkpoint");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *meta[] = {"identity", "abc",       "step",    bad[i][0], "best",
                              bad[i][1],  "best_step", bad[i][2], NULL};
        kv_train_state s;
        bool found = false;
        cr_assert_eq(kv_safetensors_write(plan.checkpoint, &tensor, 1, meta), KV_OK);
        cr_assert_eq(kv_train_state_open(3, 4, true, false, &s), KV_OK);
        cr_expect_eq(kv_train_restore(&plan, &s, &found), KV_E_DATA, "row %zu", i);
        cr_expect(strstr(kv_error_message(), "odd.checkpoint: damaged"), "row %zu: %s", i,
                  kv_error_message());
        kv_train_state_free(&s);
    }
    const char *none[] = {"identity", "abc", NULL};
    kv_train_state s;
    bool found = false;
    cr_assert_eq(kv_safetensors_write(plan.checkpoint, &tensor, 1, none), KV_OK);
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &s), KV_OK);
    cr_expect_eq(kv_train_restore(&plan, &s, &found), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "step is 'missing'"), "%s", kv_error_message());
    kv_train_state_free(&s);
}

/* The same objective with parameters of its own, as on a device. */
typedef struct elsewhere {
    pull pull;
    kv_train_state own;
    int fetched;
} elsewhere;

static kv_status evaluate_there(void *context, kv_train_state *s, int32_t trace, int64_t step,
                                bool train, kv_train_figures *out) {
    elsewhere *o = context;
    float *d_theta = o->own.d_theta, *theta = o->own.theta;
    o->own.theta = s->theta;
    o->own.d_theta = s->d_theta;
    kv_status st = evaluate(&o->pull, &o->own, trace, step, train, out);
    o->own.theta = theta;
    o->own.d_theta = d_theta;
    return st;
}

static void copy_state(const kv_train_state *from, kv_train_state *to) {
    size_t bytes = (size_t)(from->n_lane * from->n_param) * sizeof(float);
    memcpy(to->param, from->param, bytes);
    memcpy(to->m1, from->m1, bytes);
    memcpy(to->m2, from->m2, bytes);
}

static kv_status load_there(void *context, const kv_train_state *s) {
    elsewhere *o = context;
    copy_state(s, &o->own);
    return KV_OK;
}

static kv_status fetch_there(void *context, kv_train_state *s) {
    elsewhere *o = context;
    o->fetched++;
    copy_state(&o->own, s);
    return KV_OK;
}

static kv_status update_there(void *context, const kv_adamw *group, int64_t step, double clip,
                              double *sum) {
    kv_train_state *s = &((elsewhere *)context)->own;
    *sum = 0;
    for (int32_t lane = 0; lane < s->n_lane; lane++)
        *sum += kv_sum_of_squares(s->n_param, s->grad + lane * s->n_param);
    kv_adamw_step(group, step, s->n_lane * s->n_param, s->grad, kv_clip_factor(sqrt(*sum), clip),
                  s->param, s->m1, s->m2);
    return KV_OK;
}

/* A training whose parameters live elsewhere gives the same bytes, also when it is interrupted or keeps the best of its checks. */
Test(train_loop, parameters_elsewhere) {
    for (int held_out = 0; held_out < 2; held_out++) {
        kv_train_state here, there;
        kv_train_figures last;
        pull p = {.interrupt_at = -1, .bad_at = -1};
        elsewhere e = {.pull = {.interrupt_at = 10, .bad_at = -1}};
        kv_train_objective o = {.context = &p, .evaluate = evaluate},
                           away = {.context = &e,
                                   .evaluate = evaluate_there,
                                   .load = load_there,
                                   .fetch = fetch_there,
                                   .update = update_there};
        kv_train_plan plan = small_plan("here.checkpoint");
        plan.held_out = held_out ? 4 : -1;
        cr_assert_eq(kv_train_state_open(3, 4, true, held_out, &here), KV_OK);
        cr_assert_eq(kv_train_run(&plan, &o, &here, &last), KV_OK, "%s", kv_error_message());
        plan.checkpoint = held_out ? "away1.checkpoint" : "away0.checkpoint";
        for (int attempt = 0; attempt < 2; attempt++) {
            cr_assert_eq(kv_train_state_open(3, 4, true, held_out, &there), KV_OK);
            cr_assert_eq(kv_train_state_open(3, 4, true, false, &e.own), KV_OK);
            cr_expect_eq(kv_train_run(&plan, &away, &there, &last),
                         attempt ? KV_OK : KV_E_INTERRUPTED, "%s", kv_error_message());
            if (attempt) break;
            kv_train_state_free(&there);
            kv_train_state_free(&e.own);
        }
        cr_expect_gt(e.fetched, 1);
        cr_expect_eq(memcmp(here.param, there.param, 12 * sizeof(float)), 0, "other parameters");
        cr_expect_eq(memcmp(here.m2, there.m2, 12 * sizeof(float)), 0, "other moments");
        cr_expect_eq(memcmp(here.theta, there.theta, 3 * sizeof(float)), 0, "other decays");
        kv_train_state_free(&here);
        kv_train_state_free(&there);
        kv_train_state_free(&e.own);
    }
}
