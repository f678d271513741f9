/* Progress lines with an ETA. */
#define _POSIX_C_SOURCE 200809L
#include "reference/core/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/log.h"

static int quiet_everywhere;

void kv_progress_set_quiet(int quiet) { quiet_everywhere = quiet; }

void kv_progress_begin(kv_progress *p, const char *title, double total) {
    memset(p, 0, sizeof *p);
    p->title = title;
    p->total = total > 0 ? total : 1;
    p->start = p->last_draw = kv_now();
    p->on_terminal = isatty(STDERR_FILENO);
    p->quiet = quiet_everywhere;
}

void kv_progress_update(kv_progress *p, double done) {
    if (p->quiet) return;
    double now = kv_now(), elapsed = now - p->start, share = done / p->total;
    if (p->on_terminal ? now - p->last_draw < 0.1 : elapsed < 5) return;
    int tenth = (int)(share * 10);
    if (!p->on_terminal && tenth == p->last_tenth && now - p->last_draw < 30) return;
    p->last_tenth = tenth;
    p->last_draw = now;
    double eta = share > 0 ? elapsed * (1 - share) / share : 0;
    fprintf(stderr, "%s%s %3.0f %%  %.0f s, %.0f s left  %s%s", p->on_terminal ? "\r" : "",
            p->title, 100 * share, elapsed, eta, p->note, p->on_terminal ? "\x1b[K" : "\n");
    fflush(stderr);
}

void kv_progress_end(kv_progress *p) {
    if (!p->quiet && p->on_terminal) fprintf(stderr, "\r\x1b[K");
}
