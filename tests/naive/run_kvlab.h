/* Runs the built kvlab in a folder of its own and collects what it says. */
#ifndef KV_NAIVE_RUN_KVLAB_H
#define KV_NAIVE_RUN_KVLAB_H

#include <jansson.h>
#include <sys/types.h>

typedef struct kv_said {
    int code; /* exit code; 128 + signal when a signal ended it */
    char out[1 << 16], err[1 << 14];
} kv_said;

/* A fresh temporary folder, removed by kv_playground_close. Becomes the folder that kvlab runs in. */
const char *kv_playground_open(void);
void kv_playground_close(void);

/* `arguments`: separated by blanks, '...' keeps blanks. */
kv_said kv_run_command(const char *arguments);
pid_t kv_start_command(const char *arguments); /* and kv_wait_command collects it */
kv_said kv_wait_command(pid_t pid);

/* JSON file below the playground; NULL when it is missing or malformed. */
json_t *kv_load_json(const char *path);

#endif
