/* Core library: status record, numeric formats, random numbers, typed parameters, strict number parsing. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/param.h"
#include "reference/core/rand.h"
#include "reference/core/status.h"

Test(core, error_record_keeps_context) {
    kv_status st = KV_FAIL(KV_E_DATA, "found %d, expected %d", 3, 4);
    cr_assert_eq(st, KV_E_DATA);
    cr_assert_eq(kv_error_context(st, "a.h5: /model"), KV_E_DATA);
    cr_assert_str_eq(kv_error_message(), "a.h5: /model: found 3, expected 4");
    cr_assert(strstr(kv_error_where(), "test_core.c:"));
    kv_error_clear();
    cr_assert_str_empty(kv_error_message());
}

Test(core, interrupt_is_reported_once_requested) {
    cr_assert_eq(kv_interrupt_poll(), KV_OK);
    kv_interrupt_request();
    cr_assert_eq(kv_interrupt_poll(), KV_E_INTERRUPTED);
}

Test(core, allocation_is_aligned_zeroed_and_refuses_overflow) {
    unsigned char *p = kv_mem_new(1000, 3);
    cr_assert_not_null(p);
    cr_assert_eq((uintptr_t)p % 64, 0);
    for (int i = 0; i < 3000; i++) cr_assert_eq(p[i], 0, "byte %d", i);
    free(p);
    cr_assert_null(kv_mem_new(SIZE_MAX / 2, 4));
    cr_assert(strstr(kv_error_message(), "overflows"));
    void *empty = kv_mem_new(0, 8);
    cr_assert_not_null(empty);
    free(empty);
}

/* Every half value survives the round trip, and the scalar path agrees with the bulk path on every kind of value. */
Test(core, half_round_trip_of_all_values) {
    for (uint32_t h = 0; h < 0x10000u; h++) {
        float x = kv_f16_to_f32((uint16_t)h);
        if (isnan(x)) {
            cr_assert(isnan(kv_f16_to_f32(kv_f32_to_f16(x))), "h=%04x", h);
            continue;
        }
        cr_assert_eq(kv_f32_to_f16(x), h, "h=%04x x=%g back=%04x", h, x, kv_f32_to_f16(x));
        float b = kv_bf16_to_f32((uint16_t)h);
        if (!isnan(b)) cr_assert_eq(kv_f32_to_bf16(b), h, "bf16 h=%04x", h);
    }
    cr_assert(isnan(kv_bf16_to_f32(kv_f32_to_bf16(NAN))));
}

Test(core, half_rounding_matches_the_bulk_conversion) {
    enum { N = 4099 };
    float x[N], wide[N];
    uint16_t bulk[N];
    kv_rng r = kv_rng_make(7, 0);
    for (int i = 0; i < N; i++)
        x[i] = (float)ldexp(kv_rng_uniform(&r) - 0.5, (int)kv_rng_below(&r, 48) - 30);
    x[0] = 65519.9f;   /* largest that rounds to a finite half */
    x[1] = 65520.0f;   /* first that overflows */
    x[2] = 0x1p-25f;   /* tie with zero: even */
    x[3] = 0x1.8p-25f; /* above the tie */
    x[4] = -0.0f;
    kv_narrow(KV_F16, x, bulk, N);
    for (int i = 0; i < N; i++)
        cr_assert_eq(bulk[i], kv_f32_to_f16(x[i]), "x=%a bulk=%04x scalar=%04x", x[i], bulk[i],
                     kv_f32_to_f16(x[i]));
    cr_assert_eq(kv_f32_to_f16(x[0]), 0x7bff);
    cr_assert_eq(kv_f32_to_f16(x[1]), 0x7c00);
    cr_assert_eq(kv_f32_to_f16(x[2]), 0);
    cr_assert_eq(kv_f32_to_f16(x[3]), 1);
    kv_widen(KV_F16, bulk, wide, N);
    for (int i = 0; i < N; i++) cr_assert_eq(wide[i], kv_f16_to_f32(bulk[i]), "i=%d", i);
    cr_assert_eq(kv_f32_to_bf16(1.00390625f), 0x3f80); /* tie to even */
    cr_assert_eq(kv_f32_to_bf16(1.01171875f), 0x3f82);
}

Test(core, ordered_image_keeps_the_order) {
    const float x[] = {-INFINITY, -FLT_MAX, -1, -FLT_MIN, -1e-45f, 0,
                       1e-45f,    FLT_MIN,  1,  FLT_MAX,  INFINITY};
    for (size_t i = 1; i < sizeof x / sizeof *x; i++)
        cr_assert_lt(kv_ordered(x[i - 1]), kv_ordered(x[i]), "%g %g", x[i - 1], x[i]);
    cr_assert_eq(kv_ordered(-0.0f), kv_ordered(0.0f));
}

/* Known answers of Philox4x32-10 from the Random123 distribution (kat_vectors). */
Test(core, philox_known_answers) {
    kv_rand4 zero = kv_rand(0, 0, 0, 0, 0);
    const uint32_t want_zero[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
    kv_rand4 ones = kv_rand(UINT64_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX);
    const uint32_t want_ones[] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(zero.v[i], want_zero[i], "word %d: %08x", i, zero.v[i]);
        cr_assert_eq(ones.v[i], want_ones[i], "word %d: %08x", i, ones.v[i]);
    }
}

Test(core, random_moments) {
    enum { N = 200000 };
    double sum = 0, square = 0, normal = 0, normal_square = 0;
    kv_rng r = kv_rng_make(11, 3);
    uint32_t seen[7] = {0};
    for (uint32_t i = 0; i < N; i++) {
        double u = kv_rand_uniform(5, i, 0, 0, 0), z = kv_rand_normal(5, i, 1, 0, 0);
        sum += u;
        square += u * u;
        normal += z;
        normal_square += z * z;
        seen[kv_rng_below(&r, 7)]++;
    }
    cr_assert_float_eq(sum / N, 0.5, 0.004);
    cr_assert_float_eq(square / N, 1.0 / 3, 0.004);
    cr_assert_float_eq(normal / N, 0, 0.012);
    cr_assert_float_eq(normal_square / N, 1, 0.017);
    for (int i = 0; i < 7; i++)
        cr_assert_float_eq(seen[i] / (double)N, 1.0 / 7, 0.004, "digit %d", i);
}

static const kv_param table[] = {
    {.name = "share",
     .help = "a share",
     .type = KV_PARAM_REAL,
     .default_value = 0.5,
     .min = 0,
     .max = 1},
    {.name = "power",
     .help = "p",
     .type = KV_PARAM_REAL,
     .default_value = 1,
     .min = 0,
     .max = 16,
     .min_open = 1,
     .choices = "max"},
    {.name = "mode", .help = "m", .type = KV_PARAM_CHOICE, .choices = "layer|head"},
    {.name = "n", .help = "count", .type = KV_PARAM_INT, .default_value = 3, .min = 1, .max = 9},
    {.name = "path", .help = "file", .type = KV_PARAM_TEXT, .default_text = ""},
    {0},
};

Test(core, parameters_parse_format_and_name_variants) {
    kv_params p, copy;
    char text[128];
    cr_assert_eq(kv_params_init(&p, table), KV_OK);
    kv_params_variant(&p, text, sizeof text);
    cr_assert_str_empty(text);
    const char *const good[][2] = {
        {"share", "0.1"}, {"power", "max"}, {"mode", "head"}, {"n", "9"}, {"path", "x.h5"}};
    for (int i = 0; i < 5; i++)
        cr_assert_eq(kv_params_set(&p, "test", good[i][0], good[i][1]), KV_OK, "%s",
                     kv_error_message());
    kv_params_variant(&p, text, sizeof text);
    cr_assert_str_eq(text, "mode=head:n=9:path=x.h5:power=max:share=0.1");
    cr_assert(isinf(kv_params_real(&p, "power")));
    cr_assert_eq(kv_params_int(&p, "mode"), 1);
    cr_assert_eq(kv_params_copy(&copy, &p), KV_OK);
    kv_params_free(&p);
    cr_assert_str_eq(kv_params_text(&copy, "path"), "x.h5");
    kv_params_set(&copy, "test", "power", "2.0");
    kv_params_set(&copy, "test", "path", "");
    kv_params_variant(&copy, text, sizeof text);
    cr_assert_str_eq(text, "mode=head:n=9:power=2:share=0.1");
    kv_params_free(&copy);
}

Test(core, parameters_refuse_bad_values_by_name) {
    const char *const bad[][2] = {{"share", "1.5"}, {"share", "-0.1"},    {"share", "nan"},
                                  {"share", ""},    {"share", "0x1"},     {"power", "0"},
                                  {"power", "17"},  {"power", "inf"},     {"mode", "both"},
                                  {"n", "0"},       {"n", "2.5"},         {"n", "+2"},
                                  {"n", " 2"},      {"n", "99999999999"}, {"nope", "1"}};
    kv_params p;
    cr_assert_eq(kv_params_init(&p, table), KV_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kv_error_clear();
        cr_assert_eq(kv_params_set(&p, "owner", bad[i][0], bad[i][1]), KV_E_USAGE, "%s=%s",
                     bad[i][0], bad[i][1]);
        cr_assert(strstr(kv_error_message(), bad[i][0]), "message '%s'", kv_error_message());
        cr_assert(strstr(kv_error_message(), "owner"), "message '%s'", kv_error_message());
    }
    kv_params_free(&p);
}

Test(core, reals_print_in_their_shortest_form) {
    const struct {
        double x;
        const char *text;
    } cases[] = {{0.1, "0.1"},
                 {2, "2"},
                 {400, "400"},
                 {1e-8, "1e-08"},
                 {2e-5, "2e-05"},
                 {0.125, "0.125"},
                 {1.0 / 3, "0.3333333333333333"}};
    char text[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kv_format_real(cases[i].x, text, sizeof text);
        cr_assert_str_eq(text, cases[i].text);
    }
}

/* The priority is rounded once: at position 131072 two steps of rounding would differ in the last place. */
Test(core, static_priority_is_a_single_rounding) {
    for (int32_t t = 0; t < 200000; t += 997) {
        float r = -7.25f + (float)(t % 13) * 0.37f;
        double log_gamma = log1p(-1.9e-5);
        float want = (float)((long double)r - (long double)t * (long double)log_gamma);
        cr_assert_eq(kv_static_priority(r, t, log_gamma), want, "t=%d", t);
    }
}
