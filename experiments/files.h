/* Files and folders of results: everything appears whole or not at all. */
#ifndef KV_EXPERIMENTS_FILES_H
#define KV_EXPERIMENTS_FILES_H

#include <limits.h>
#include <stdbool.h>

#include "reference/core/status.h"

kv_status kv_make_folders(const char *path); /* mkdir -p; KV_E_CANTCREATE */

/* A folder under construction beside `target`, moved there when complete. */
typedef struct kv_staging {
    char target[PATH_MAX - 64], folder[PATH_MAX];
} kv_staging;

/* Creates the empty folder. KV_E_CANTCREATE when it cannot be, or when `target` holds something that is no kvlab result. */
kv_status kv_staging_open(kv_staging *s, const char *target);
/* Moves it to `target`, replacing an older result there. KV_E_IO, the folder is removed then. */
kv_status kv_staging_commit(kv_staging *s);
void kv_staging_drop(kv_staging *s); /* removes it; harmless after a commit */

/* Writes `bytes` of text to folder/name. KV_E_IO names the file and the reason. */
kv_status kv_write_text(const char *folder, const char *name, const char *text);

#endif
