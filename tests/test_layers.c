/* The layers of the house (design.md): a file includes only its own level and lower. Reads the #include lines of the project;
 * run from its top folder. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* First match wins. A prefix is a folder or a file; levels of equal number may include each other. */
static const struct {
    const char *prefix;
    int level;
} house[] = {
    {"reference/core/", 1}, {"policies/policy.h", 2}, {"reference/", 3},   {"policies/", 4},
    {"traces/", 4},         {"kernels/", 5},          {"experiments/", 6}, {"plots/", 6},
    {"tests/", 7},
};
static const char generated[] = "kv_build.h"; /* by experiments/version.sh, holds no includes */

static int level_of(const char *path) {
    for (size_t i = 0; i < sizeof house / sizeof *house; i++)
        if (strncmp(path, house[i].prefix, strlen(house[i].prefix)) == 0) return house[i].level;
    return 0;
}

static bool is_source(const char *name) {
    static const char *const ending[] = {".c", ".h", ".cu", ".cuh", ".def"};
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot && i < sizeof ending / sizeof *ending; i++)
        if (strcmp(dot, ending[i]) == 0) return true;
    return false;
}

static int n_file, n_include;

static void read_source(const char *path) {
    FILE *f = fopen(path, "r");
    char line[512], name[256];
    cr_assert_not_null(f, "%s cannot be read", path);
    n_file++;
    for (int at = 1; fgets(line, sizeof line, f); at++) {
        if (sscanf(line, " # include \"%255[^\"]\"", name) != 1) continue;
        if (strcmp(name, generated) == 0) continue;
        n_include++;
        FILE *found = fopen(name, "r");
        cr_expect_not_null(found, "%s:%d: \"%s\" is not a path from the project's top", path, at,
                           name);
        if (found) fclose(found);
        cr_expect(level_of(name) > 0, "%s:%d: \"%s\" belongs to no level", path, at, name);
        cr_expect(level_of(name) <= level_of(path), "%s:%d: level %d includes \"%s\" of level %d",
                  path, at, level_of(path), name, level_of(name));
    }
    fclose(f);
}

static void read_folder(const char *folder) {
    DIR *d = opendir(folder);
    char path[512];
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (is_source(e->d_name))
            read_source(path);
        else if (e->d_type == DT_DIR)
            read_folder(path);
    }
    if (d) closedir(d);
}

Test(layers, a_file_includes_its_own_level_and_lower) {
    static const char *const folder[] = {"reference", "policies",    "traces",
                                         "kernels",   "experiments", "tests"};
    for (size_t i = 0; i < sizeof folder / sizeof *folder; i++) read_folder(folder[i]);
    cr_assert(n_file > 50 && n_include > 150, "only %d files and %d includes were read", n_file,
              n_include);
}

Test(layers, the_rule_can_fail) {
    cr_assert_eq(level_of("reference/core/num.h"), 1);
    cr_assert_eq(level_of("policies/policy.h"), 2);
    cr_assert_eq(level_of("reference/select.c"), 3);
    cr_assert_eq(level_of("policies/policies.def"), 4);
    cr_assert_eq(level_of("somewhere/else.h"), 0);
}
