/* What an output may replace, and the files and folders that stand for it until it is complete. */
#ifndef KV_TRACES_OUTPUT_H
#define KV_TRACES_OUTPUT_H

#include "reference/core/status.h"

/* Outputs appear by rename, which would replace a device or pipe by a file (`--output /dev/null` as root) and a symbolic link instead
 * of what it points to, and fail on a folder only after the work is done. KV_E_CANTCREATE unless `path` is a regular file or names
 * nothing. */
kv_status kv_output_check(const char *path);

/* kv_output_check, and where the file grows until it is renamed to `path`: *temporary, owned, "<path>.<process>.part". */
kv_status kv_output_begin(const char *path, char **temporary);

/* Calls `drop` for what stands beside `path` under the name "<path><before><process><after>...", if that process is gone (it was killed)
 * and nothing was written there for ten minutes (processes of another container cannot be asked). */
void kv_output_sweep(const char *path, const char *before, const char *after,
                     void (*drop)(const char *));

#endif
