/* Files and folders of results: everything appears whole or not at all. */
#ifndef KV_EXPERIMENTS_FILES_H
#define KV_EXPERIMENTS_FILES_H

#include <limits.h>
#include <stdbool.h>

#include "reference/core/status.h"

kv_status kv_make_folders(const char *path); /* mkdir -p; KV_E_CANTCREATE */

/* A new empty file of its own name in `folder`, or where TMPDIR says or in /tmp when that is NULL; open as *fd. KV_E_CANTCREATE */
kv_status kv_temporary_file(const char *folder, char path[PATH_MAX], int *fd);

/* A folder under construction beside `target`, moved there when complete. */
typedef struct kv_staging {
    char target[PATH_MAX - 64], folder[PATH_MAX];
} kv_staging;

/* Creates the empty folder. KV_E_CANTCREATE when it cannot be, or when `target` holds something that is no kvlab result,
 * or a result and something beside it. */
kv_status kv_staging_open(kv_staging *s, const char *target);
/* Moves it to `target`, replacing an older result there. KV_E_IO, the folder is removed then. */
kv_status kv_staging_commit(kv_staging *s);
void kv_staging_drop(kv_staging *s); /* removes it; harmless after a commit */

/* Makes the symbolic link `link` point to `folder` (both below one parent folder); a link that cannot be made is no error. */
void kv_link(const char *folder, const char *link);

#endif
