/* What `make train` hands to kvlab: the settings of experiments/shipped.txt for a policy and budget, names as data and never as code. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The command that would run; `variables` as on make's command line. */
static const char *train_command(const char *variables) {
    static char text[1 << 16];
    char command[512];
    snprintf(command, sizeof command,
             "env -u MAKEFLAGS -u MAKELEVEL make -n train TRAIN_TRACES=1 %s 2>&1", variables);
    FILE *f = popen(command, "r");
    cr_assert_not_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    pclose(f);
    const char *found = strstr(text, "./kvlab train");
    cr_assert_not_null(found, "%s: %s", variables, text);
    return found;
}

Test(make, shipped_settings_belong_to_policy_and_budget) {
    const char *said = train_command("POLICY=kvpop BUDGET=2048 SET=kvpop.steps=7");
    const char *listed = strstr(said, "--set kvpop.steps=300"),
               *own = strstr(said, "--set 'kvpop.steps=7'");
    cr_expect(listed && own && listed < own, "SET comes last and wins: %s", said);
    cr_expect_null(strstr(train_command("POLICY=kvpop BUDGET=2049"), "--set"));
    cr_expect_null(strstr(train_command("POLICY=kvpop,kvpop_mlp BUDGET=2048"), "--set"));
}

Test(make, names_are_not_run_as_programs) {
    char made[] = "/tmp/kvlab_make_XXXXXX", variables[256];
    const int fd = mkstemp(made);
    cr_assert(fd >= 0);
    close(fd);
    snprintf(variables, sizeof variables,
             "'POLICY=x\"; system(\"rm %s\"); \"' 'BUDGET=1\"; system(\"rm %s\"); \"'", made, made);
    const char *said = train_command(variables);
    cr_expect_eq(access(made, F_OK), 0, "the name of a policy was run");
    cr_expect_null(strstr(said, "awk"), "%s", said);
    unlink(made);
}

/* One line of experiments/shipped.txt against the manifest beside the weights. */
static void check_manifest(char *line) {
    char path[256], *rest = NULL;
    const char *policy = strtok_r(line, " \n", &rest), *budget = strtok_r(NULL, " \n", &rest),
               *traces = strtok_r(NULL, " \n", &rest);
    cr_assert(policy && budget && traces);
    snprintf(path, sizeof path, "policies/weights/%s-b%s.manifest.json", policy, budget);
    json_t *manifest = json_load_file(path, 0, NULL);
    cr_assert_not_null(manifest, "%s", path);
    const json_t *config = json_object_get(manifest, "config"),
                 *params = json_object_get(config, "params");
    cr_expect_eq(json_array_size(json_object_get(config, "trace_xxh3")), strtoul(traces, NULL, 10),
                 "%s: number of traces", path);
    for (char *set; (set = strtok_r(NULL, " \n", &rest));) {
        char *value = strchr(set, '=');
        *value++ = '\0';
        const char *made = json_string_value(json_object_get(params, set));
        cr_expect(made && strcmp(made, value) == 0, "%s: %s is %s, shipped.txt says %s", path, set,
                  made ? made : "missing", value);
    }
    json_decref(manifest);
}

Test(make, weights_were_made_by_their_line) {
    char line[512];
    int n = 0;
    FILE *f = fopen("experiments/shipped.txt", "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f))
        if (line[0] != '#') check_manifest(line), n++;
    fclose(f);
    cr_expect_eq(n, 7);
}
