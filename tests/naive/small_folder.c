/* Set-up of a test suite on one small trace in a temporary folder. */
#include "tests/naive/small_folder.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#include "tests/naive/test_folder.h"

small_trace *small;

void small_folder_enter(void) {
    test_folder_enter();
    small = malloc(sizeof *small);
    small_trace_make(small);
}

void small_folder_leave(void) {
    free(small);
    test_folder_leave();
}

void small_folder_write(const char *path) {
    kv_status st = small_trace_write(small, path);
    cr_assert_eq(st, KV_OK, "%s: %d %s", path, st, kv_error_message());
}
