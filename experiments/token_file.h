/* Token ids from a file: text (one id per line), NumPy .npy (one dimension, any integer type), or HDF5 (/token, or the tokens of a trace
 * of one request). The content decides, not the name. */
#ifndef KV_TOKEN_FILE_H
#define KV_TOKEN_FILE_H

#include <stdint.h>

#include "reference/core/status.h"

/* *token [*n] is owned by the caller; ids are >= 0. KV_E_NOINPUT when the file cannot be read; KV_E_DATA names line (or index) and
 * value of what is no id. */
kv_status kv_token_file_read(const char *path, int32_t **token, int32_t *n);

#endif
