/* The thread-local error record and the interrupt flag. */
#include "reference/core/status.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_MAX = 2048, WHERE_MAX = 256 };

static _Thread_local char message[MESSAGE_MAX];
static _Thread_local char where[WHERE_MAX];
static volatile sig_atomic_t interrupted;

kv_status kv_fail_at(const char *file, int line, kv_status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    snprintf(where, sizeof where, "%s:%d", file, line);
    return code;
}

kv_status kv_error_context(kv_status code, const char *format, ...) {
    char head[MESSAGE_MAX], joined[MESSAGE_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(head, sizeof head, format, args);
    va_end(args);
    snprintf(joined, sizeof joined, "%.1000s: %.1000s", head, message);
    memcpy(message, joined, sizeof message);
    return code;
}

const char *kv_error_message(void) { return message; }
const char *kv_error_where(void) { return where; }

void kv_error_clear(void) {
    message[0] = '\0';
    where[0] = '\0';
}

void kv_interrupt_request(void) { interrupted = 1; }

kv_status kv_interrupt_poll(void) {
    if (!interrupted) return KV_OK;
    return KV_FAIL(KV_E_INTERRUPTED, "interrupted: nothing was written");
}
