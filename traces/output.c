/* Outputs under construction (output.h). */
#include "traces/output.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "reference/core/mem.h"

enum { QUIET_SECONDS = 600 };

static const char *kind_of(mode_t mode) {
    return S_ISDIR(mode) ? "folder" : S_ISLNK(mode) ? "symbolic link" : "device or pipe";
}

kv_status kv_output_check(const char *path) {
    struct stat found;
    if (path[0] == '\0')
        return KV_FAIL(KV_E_CANTCREATE, "the name of the output file is empty; give one");
    if (lstat(path, &found) == 0 && !S_ISREG(found.st_mode))
        return KV_FAIL(KV_E_CANTCREATE,
                       "%s: is a %s, expected a file or a new name; choose another", path,
                       kind_of(found.st_mode));
    return KV_OK;
}

static void drop_file(const char *path) { (void)unlink(path); }

kv_status kv_output_begin(const char *path, char **temporary) {
    kv_status st = KV_OK;
    const size_t size = strlen(path) + 32;
    *temporary = NULL;
    KV_TRY(kv_output_check(path));
    kv_output_sweep(path, ".", ".part", drop_file);
    KV_NEW(*temporary, size);
    snprintf(*temporary, size, "%s.%ld.part", path, (long)getpid());
out:
    return st;
}

/* The process in "<stem><process><after>...", 0: the name is another. */
static pid_t maker_of(const char *name, const char *stem, const char *after) {
    char *end;
    const size_t n = strlen(stem);
    if (strncmp(name, stem, n) != 0 || name[n] < '1' || name[n] > '9') return 0;
    const long pid = strtol(name + n, &end, 10);
    return pid <= INT_MAX && strncmp(end, after, strlen(after)) == 0 ? (pid_t)pid : 0;
}

void kv_output_sweep(const char *path, const char *before, const char *after,
                     void (*drop)(const char *)) {
    char folder[PATH_MAX], stem[PATH_MAX], whole[2 * PATH_MAX];
    const char *slash = strrchr(path, '/');
    const int length = slash ? (int)(slash - path) : 1;
    struct stat found;
    if (length >= PATH_MAX || strlen(path) + strlen(before) >= sizeof stem) return;
    snprintf(folder, sizeof folder, "%.*s", length ? length : 1, slash ? path : ".");
    snprintf(stem, sizeof stem, "%s%s", slash ? slash + 1 : path, before);
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        const pid_t maker = maker_of(e->d_name, stem, after);
        if (!maker || kill(maker, 0) == 0 || errno != ESRCH) continue;
        snprintf(whole, sizeof whole, "%s/%s", folder, e->d_name);
        if (lstat(whole, &found) == 0 && time(NULL) - found.st_mtime > QUIET_SECONDS) drop(whole);
    }
    if (dir) closedir(dir);
}
