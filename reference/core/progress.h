/* Progress of long work, on stderr: one redrawn line with ETA on a terminal; in a log one line per 10 % or 30 s, and none at all
 * for work shorter than 5 s. */
#ifndef KV_CORE_PROGRESS_H
#define KV_CORE_PROGRESS_H

typedef struct kv_progress {
    const char *title;
    double total, start, last_draw;
    int last_tenth, on_terminal, quiet;
    char note[96]; /* free text after the ETA, for example the loss */
} kv_progress;

void kv_progress_begin(kv_progress *p, const char *title, double total);
void kv_progress_update(
    kv_progress *p, double done); /* cheap: draws at most 10 times a second; call from one thread */
void kv_progress_end(kv_progress *p);
void kv_progress_set_quiet(int quiet); /* -q, and tests */

#endif
