#include "tests/naive/run_kvlab.h"

#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char playground[64], program[PATH_MAX];

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *at) {
    (void)info, (void)kind, (void)at;
    return remove(path);
}

const char *kv_playground_open(void) {
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 16);
    program[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(program, '/'); /* kvlab lies beside the test program */
    if (slash) memcpy(slash, "/kvlab", 7);
    snprintf(playground, sizeof playground, "/tmp/kvlab-test-XXXXXX");
    return mkdtemp(playground);
}

void kv_playground_close(void) { nftw(playground, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

static void path_of(const char *name, char *out, size_t size) {
    snprintf(out, size, "%s/%s", playground, name);
}

pid_t kv_start_command(const char *arguments) {
    char text[16384], out[128], err[128], *argv[256];
    int n = 0;
    pid_t pid = -1;
    posix_spawn_file_actions_t actions;
    snprintf(text, sizeof text, "%s", arguments);
    argv[n++] = program;
    for (char *c = text; *c && n < 255;) {
        c += strspn(c, " ");
        if (!*c) break;
        char end = *c == '\'' ? '\'' : ' ';
        if (end == '\'') c++;
        argv[n++] = c;
        c += strcspn(c, end == '\'' ? "'" : " ");
        if (*c) *c++ = '\0';
    }
    argv[n] = NULL;
    path_of("said.out", out, sizeof out);
    path_of("said.err", err, sizeof err);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, out, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_addopen(&actions, 2, err, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_addchdir_np(&actions, playground);
    if (posix_spawn(&pid, program, &actions, NULL, argv, environ) != 0) pid = -1;
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

static void slurp(const char *name, char *out, size_t size) {
    char path[128];
    path_of(name, path, sizeof path);
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(out, 1, size - 1, f) : 0;
    out[n] = '\0';
    if (f) fclose(f);
}

kv_said kv_wait_command(pid_t pid) {
    kv_said said = {.code = -1};
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return said;
    said.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    slurp("said.out", said.out, sizeof said.out);
    slurp("said.err", said.err, sizeof said.err);
    return said;
}

kv_said kv_run_command(const char *arguments) {
    return kv_wait_command(kv_start_command(arguments));
}

json_t *kv_load_json(const char *path) {
    char full[256];
    json_error_t error;
    path_of(path, full, sizeof full);
    return json_load_file(full, JSON_REJECT_DUPLICATES, &error);
}
