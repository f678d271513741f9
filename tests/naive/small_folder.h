/* Set-up of a test suite on one small trace in a temporary folder. */
#ifndef KV_NAIVE_SMALL_FOLDER_H
#define KV_NAIVE_SMALL_FOLDER_H

#include "tests/naive/small_trace.h"

extern small_trace *small; /* of the running test */

void small_folder_enter(void);
void small_folder_leave(void);
void small_folder_write(const char *path); /* asserts success */

#endif
