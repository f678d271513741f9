/* Logging to stderr (never stdout): "[  12.345] module level: text". Level from -q/-v/-vv or KV_LOG=error|warn|info|debug. */
#ifndef KV_CORE_LOG_H
#define KV_CORE_LOG_H

typedef enum kv_log_level { KV_LOG_ERROR, KV_LOG_WARN, KV_LOG_INFO, KV_LOG_DEBUG } kv_log_level;

void kv_log_set_level(kv_log_level level);
kv_log_level kv_log_get_level(void);
void kv_log(kv_log_level level, const char *module, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Tests capture lines with a sink; NULL restores stderr. */
typedef void kv_log_sink(void *context, kv_log_level level, const char *line);
void kv_log_set_sink(kv_log_sink *sink, void *context);

double kv_now(void); /* monotonic seconds */

#endif
