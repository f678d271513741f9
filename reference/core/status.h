/* Status codes and the error record.
 *
 * Every library function that can fail returns a kv_status; the text of the failure (what was found, what was expected, what to
 * do) lies in a thread-local record. Library code never prints, exits or aborts. Codes are the negated exit codes of the command
 * line (contract.md), so `main` only negates. */
#ifndef KV_CORE_STATUS_H
#define KV_CORE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv_status {
    KV_OK = 0,
    KV_E_MISMATCH = -1,      /* a comparison or verification failed: numbers differ */
    KV_E_USAGE = -64,        /* the caller's or user's arguments are wrong */
    KV_E_DATA = -65,         /* a trace, weights file or config is malformed or does not fit */
    KV_E_NOINPUT = -66,      /* an input file is missing or unreadable */
    KV_E_UNAVAILABLE = -69,  /* no GPU, or a feature that this build lacks */
    KV_E_INTERNAL = -70,     /* out of memory, broken invariant */
    KV_E_CANTCREATE = -73,   /* the output cannot be created */
    KV_E_IO = -74,           /* reading or writing failed half-way (disk full, device error) */
    KV_E_INTERRUPTED = -130, /* Ctrl-C: unwound in order */
} kv_status;

#ifdef __cplusplus
extern "C" {
#endif

/* Records a failure and returns `code`. The message is one sentence that names file, object, found and expected value. */
kv_status kv_fail_at(const char *file, int line, kv_status code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define KV_FAIL(code, ...) kv_fail_at(__FILE__, __LINE__, (code), __VA_ARGS__)

/* Puts "context: " before the recorded message (for example the file name, known one level up). Returns `code` unchanged. */
kv_status kv_error_context(kv_status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

const char *kv_error_message(void); /* last recorded message of this thread, "" if none */
const char *kv_error_where(void);   /* "file:line" of the recording, for -vv */
void kv_error_clear(void);

#ifdef __cplusplus
}
#endif

/* Inside a function with `kv_status st = KV_OK;` and one `out:` label. */
#define KV_TRY(expression) \
    do { \
        st = (expression); \
        if (st != KV_OK) goto out; \
    } while (0)
#define KV_RAISE(code, ...) \
    do { \
        st = KV_FAIL((code), __VA_ARGS__); \
        goto out; \
    } while (0)

/* Ctrl-C: the command line's handler sets the flag; long loops poll it once per unit of work. */
void kv_interrupt_request(void); /* async-signal-safe */
kv_status kv_interrupt_poll(void);

#ifdef __cplusplus
}
#endif

#endif
