/* Layers read ahead on a thread: the same as one by one, faults in their place, and an early end. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "experiments/layer_reader.h"
#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/small_folder.h"

TestSuite(layer_reader, .init = small_folder_enter, .fini = small_folder_leave);

static kv_trace *open_trace(const char *path) {
    kv_trace *t = NULL;
    cr_assert_eq(kv_trace_open(path, &t), KV_OK, "%s", kv_error_message());
    return t;
}

Test(layer_reader, gives_the_layers_in_order) {
    small_folder_write("a.h5");
    for (int32_t ahead = 1; ahead <= 3; ahead++) {
        kv_trace *t = open_trace("a.h5");
        kv_layer_reader *r = NULL;
        cr_assert_eq(kv_layer_reader_open(t, true, ahead, &r), KV_OK, "%s", kv_error_message());
        for (int l = 0; l < FX_LAYER; l++) {
            kv_trace_layer x = {0};
            cr_assert_eq(kv_layer_reader_next(r, &x), KV_OK, "%s", kv_error_message());
            cr_expect(memcmp(x.q, small->q[l], sizeof small->q[l]) == 0, "q of layer %d", l);
            cr_expect(memcmp(x.v, small->v[l], sizeof small->v[l]) == 0, "v of layer %d", l);
            cr_expect(memcmp(x.hidden, small->hidden[l], sizeof small->hidden[l]) == 0);
            kv_trace_layer_free(&x);
        }
        kv_layer_reader_close(r);
        kv_trace_close(t);
    }
}

Test(layer_reader, names_the_fault_of_a_layer_after_the_sound_ones) {
    small->spec.type = KV_F32;
    small_folder_write("a.h5");
    const int64_t q_of_layer_1 = sizeof small->q[0] / sizeof(float);
    const mutation damage = {.kind = WRITE,
                             .object = "/requests/r00000/q",
                             .index = q_of_layer_1 + 3 * small->spec.head_dim + 2,
                             .number = NAN};
    cr_assert_eq(mutate("a.h5", &damage), 0);
    kv_trace *t = open_trace("a.h5");
    kv_layer_reader *r = NULL;
    kv_trace_layer x = {0};
    cr_assert_eq(kv_layer_reader_open(t, false, 2, &r), KV_OK);
    cr_expect_eq(kv_layer_reader_next(r, &x), KV_OK);
    kv_trace_layer_free(&x);
    for (int again = 0; again < 2; again++) {
        cr_expect_eq(kv_layer_reader_next(r, &x), KV_E_DATA);
        cr_expect(strstr(kv_error_message(), "a.h5") && strstr(kv_error_message(), "token 3"), "%s",
                  kv_error_message());
    }
    kv_layer_reader_close(r);
    kv_trace_close(t);
}

Test(layer_reader, may_be_closed_before_the_last_layer) {
    small_folder_write("a.h5");
    for (int taken = 0; taken < FX_LAYER; taken++) {
        kv_trace *t = open_trace("a.h5");
        kv_layer_reader *r = NULL;
        cr_assert_eq(kv_layer_reader_open(t, true, 1, &r), KV_OK);
        for (int l = 0; l < taken; l++) {
            kv_trace_layer x = {0};
            cr_assert_eq(kv_layer_reader_next(r, &x), KV_OK);
            kv_trace_layer_free(&x);
        }
        kv_layer_reader_close(r);
        kv_trace_close(t);
    }
    kv_layer_reader_close(NULL);
}
