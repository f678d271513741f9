/* What `make train` hands to kvlab: the settings of experiments/shipped.txt for a policy and budget, names as data and never as code. */
#include <criterion/criterion.h>
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
