/* Levelled log lines on stderr. */
#define _POSIX_C_SOURCE 200809L
#include "reference/core/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const level_name[] = {"error", "warn", "info", "debug"};
static int current = -1; /* -1: not yet read from KV_LOG */
static kv_log_sink *sink;
static void *sink_context;

double kv_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

kv_log_level kv_log_get_level(void) {
    if (current < 0) {
        current = KV_LOG_WARN;
        const char *wanted = getenv("KV_LOG");
        for (int i = 0; wanted && i < 4; i++)
            if (strcmp(wanted, level_name[i]) == 0) current = i;
    }
    return (kv_log_level)current;
}

void kv_log_set_level(kv_log_level level) { current = (int)level; }

void kv_log_set_sink(kv_log_sink *new_sink, void *context) {
    sink = new_sink;
    sink_context = context;
}

void kv_log(kv_log_level level, const char *module, const char *format, ...) {
    static double start;
    if (start == 0) start = kv_now();
    if (level > kv_log_get_level()) return;
    char text[1536], line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(line, sizeof line, "[%8.3f] %s %s: %s", kv_now() - start, module, level_name[level],
             text);
    if (sink)
        sink(sink_context, level, line);
    else
        fprintf(stderr, "%s\n", line);
}
