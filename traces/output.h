/* What an output file may replace. */
#ifndef KV_TRACES_OUTPUT_H
#define KV_TRACES_OUTPUT_H

#include "reference/core/status.h"

/* Outputs appear by rename, which would replace a device or pipe by a file (`--output /dev/null` as root), and fail on a folder only
 * after the work is done. KV_E_CANTCREATE unless `path` is a regular file or names nothing. */
kv_status kv_output_check(const char *path);

#endif
