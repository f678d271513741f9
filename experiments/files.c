/* Folders by rename. */
#include "experiments/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "traces/output.h"

kv_status kv_make_folders(const char *path) {
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = part + 1; *slash; slash++) {
        if (*slash != '/') continue;
        *slash = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return KV_FAIL(KV_E_CANTCREATE, "cannot create folder %s: %s", part, strerror(errno));
        *slash = '/';
    }
    struct stat info;
    if (mkdir(part, 0777) != 0 && errno != EEXIST)
        return KV_FAIL(KV_E_CANTCREATE, "cannot create folder %s: %s", part, strerror(errno));
    if (stat(part, &info) != 0 || !S_ISDIR(info.st_mode))
        return KV_FAIL(KV_E_CANTCREATE, "cannot create folder %s: a file of that name is there",
                       part);
    return KV_OK;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at) {
    (void)info;
    (void)kind;
    (void)at;
    return remove(path);
}

static void remove_tree(const char *path) { nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* An older result has all three, or lost one of them; one alone is no sign of kvlab, and the folder is about to be deleted. */
static bool is_result(const char *target) {
    static const char *const file[] = {"manifest.json", "summary.json", "metrics.csv"};
    char path[PATH_MAX + 32];
    int found = 0;
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) {
        snprintf(path, sizeof path, "%s/%s", target, file[i]);
        found += access(path, F_OK) == 0;
    }
    return found >= 2;
}

/* What runs and `make plots` leave in a folder. */
static bool is_ours(const char *name) {
    static const char *const file[] = {
        ".",         "..",           "manifest.json", "summary.json",   "metrics.csv",
        "evict.h5",  "curve.csv",    "points.csv",    "power.csv",      "correlation.csv",
        "delay.csv", "timeline.csv", "pattern.csv",   "evict_kind.csv", "evict_ratio.csv",
        "plots"};
    for (size_t i = 0; i < sizeof file / sizeof *file; i++)
        if (strcmp(name, file[i]) == 0) return true;
    return false;
}

/* The older result goes as a whole: nothing of somebody else may be in it. */
static kv_status check_strangers(const char *target) {
    kv_status st = KV_OK;
    DIR *dir = opendir(target);
    for (struct dirent *e; st == KV_OK && dir && (e = readdir(dir));)
        if (!is_ours(e->d_name))
            st = KV_FAIL(KV_E_CANTCREATE,
                         "cannot replace the earlier results in %s: %s is there too, which no run "
                         "wrote; move it away or name a new folder",
                         target, e->d_name);
    if (dir) closedir(dir);
    return st;
}

/* Nothing there, an empty folder, or an older result. */
static kv_status check_target(const char *target) {
    struct stat info;
    if (lstat(target, &info) != 0) {
        if (errno == ENOENT) return KV_OK;
        return KV_FAIL(KV_E_CANTCREATE, "cannot write results to %s: %s", target, strerror(errno));
    }
    if (S_ISLNK(info.st_mode)) /* the exchange would replace the link, not the folder */
        return KV_FAIL(KV_E_CANTCREATE,
                       "cannot write results to %s: it is a symbolic link; name the folder that it "
                       "points to",
                       target);
    if (is_result(target)) return check_strangers(target);
    if (S_ISDIR(info.st_mode) && rmdir(target) == 0) return KV_OK;
    return KV_FAIL(KV_E_CANTCREATE,
                   "cannot write results to %s: something else is there (not the manifest.json, "
                   "summary.json and metrics.csv of an earlier run); name a new folder",
                   target);
}

/* Process ids come again, above all in containers, and a killed run leaves its folder: hence the number. */
static kv_status make_temporary(kv_staging *s) {
    enum { TRIES = 1000 };
    kv_output_sweep(s->target, ".tmp-", "-", remove_tree);
    for (int i = 0; i < TRIES; i++) {
        snprintf(s->folder, sizeof s->folder, "%s.tmp-%d-%d", s->target, (int)getpid(), i);
        if (mkdir(s->folder, 0777) == 0) return KV_OK;
        if (errno != EEXIST) break;
    }
    kv_status st =
        KV_FAIL(KV_E_CANTCREATE, "cannot create results folder %s: %s", s->folder, strerror(errno));
    s->folder[0] = '\0';
    return st;
}

kv_status kv_staging_open(kv_staging *s, const char *target) {
    kv_status st = KV_OK;
    char parent[PATH_MAX];
    size_t n = strlen(target);
    memset(s, 0, sizeof *s);
    while (n > 1 && target[n - 1] == '/') n--;
    if (n == 0 || n >= sizeof s->target)
        return KV_FAIL(KV_E_CANTCREATE, "'%s' cannot name a results folder", target);
    snprintf(s->target, sizeof s->target, "%.*s", (int)n, target);
    KV_TRY(check_target(s->target));
    snprintf(parent, sizeof parent, "%s", s->target);
    char *slash = strrchr(parent, '/');
    if (slash && slash != parent) {
        *slash = '\0';
        KV_TRY(kv_make_folders(parent));
    }
    KV_TRY(make_temporary(s));
out:
    return st;
}

kv_status kv_staging_commit(kv_staging *s) {
    kv_status st = KV_OK;
    if (rename(s->folder, s->target) == 0) {
        s->folder[0] = '\0';
        return KV_OK;
    }
    /* An older result is there: exchange the two in one step, then the temporary name holds the old one. */
    if (renameat2(AT_FDCWD, s->folder, AT_FDCWD, s->target, RENAME_EXCHANGE) != 0) {
        if (errno == EINVAL || errno == ENOSYS) { /* file system without exchange */
            remove_tree(s->target);
            if (rename(s->folder, s->target) == 0) {
                s->folder[0] = '\0';
                return KV_OK;
            }
        }
        st = KV_FAIL(KV_E_IO, "cannot move results to %s: %s", s->target, strerror(errno));
    }
    kv_staging_drop(s);
    return st;
}

void kv_staging_drop(kv_staging *s) {
    if (s->folder[0]) remove_tree(s->folder);
    s->folder[0] = '\0';
}

void kv_link(const char *folder, const char *link) {
    char temporary[PATH_MAX];
    size_t parent = 0;
    for (size_t i = 0; link[i] && link[i] == folder[i]; i++)
        if (link[i] == '/') parent = i + 1;
    snprintf(temporary, sizeof temporary, "%s.%d", link, (int)getpid());
    if (symlink(folder + parent, temporary) == 0 && rename(temporary, link) != 0) unlink(temporary);
}

kv_status kv_temporary_file(const char *folder, char path[PATH_MAX], int *fd) {
    const char *set = getenv("TMPDIR"), *where = folder ? folder : set && *set ? set : "/tmp";
    if (snprintf(path, PATH_MAX, "%s/kvlab-XXXXXX", where) >= PATH_MAX)
        return KV_FAIL(KV_E_CANTCREATE, "%s: the path is too long", where);
    *fd = mkstemp(path);
    if (*fd >= 0) return KV_OK;
    return KV_FAIL(KV_E_CANTCREATE,
                   "%s: no temporary file can be created there: %s; set TMPDIR to a folder where "
                   "files can be written",
                   where, strerror(errno));
}
