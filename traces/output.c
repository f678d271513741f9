/* What an output file may replace. */
#include "traces/output.h"

#include <sys/stat.h>

kv_status kv_output_check(const char *path) {
    struct stat found;
    if (path[0] == '\0')
        return KV_FAIL(KV_E_CANTCREATE, "the name of the output file is empty; give one");
    if (stat(path, &found) == 0 && !S_ISREG(found.st_mode))
        return KV_FAIL(KV_E_CANTCREATE,
                       "%s: is a %s, expected a file or a new name; choose another", path,
                       S_ISDIR(found.st_mode) ? "folder" : "device or pipe");
    return KV_OK;
}
