/* Temporary working folders. */
#include "tests/naive/test_folder.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[] = "/tmp/kvlab-test-XXXXXX", before[PATH_MAX];

void test_folder_enter(void) {
    if (!getcwd(before, sizeof before) || !mkdtemp(folder) || chdir(folder) != 0) abort();
}

void test_folder_leave(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (chdir(before) != 0 || system(command) != 0) fprintf(stderr, "%s stays\n", folder);
}
