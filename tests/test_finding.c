/* The tables of the finding: means and spread over held-out seeds, against numbers worked out by hand; missing runs stay visible. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char folder[] = "/tmp/kvlab_finding_XXXXXX";

static void setup(void) { cr_assert_not_null(mkdtemp(folder)); }

static void teardown(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    cr_expect_eq(system(command), 0);
}

TestSuite(finding, .init = setup, .fini = teardown);

static void write_text(const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    fclose(f);
}

static void make_folder(const char *name) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cr_assert_eq(mkdir(path, 0777), 0, "%s", path);
}

static const char *read_text(const char *name) {
    static char text[1 << 16];
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

#define COLUMNS "trace,layer,kv_head,policy,variant,budget,seed,metric,value,n\n"
#define MLP "t.h5,all,all,kvpop_mlp,,512,1,"
#define ORACLE "t.h5,all,all,oracle,power=2,512,1,"

Test(finding, tables) {
    static const char *const folders[] = {"evaluations",           "evaluations/a-s1",
                                          "evaluations/a-s2",      "evaluations/a-s3",
                                          "evaluations/memory-s1", "evaluations/memory-s2",
                                          "evaluations/immed-s1",  "evaluations/reference-s1"};
    char command[256];
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) make_folder(folders[i]);
    write_text("runs.txt", "# a comment\n= First part\na kvpop_mlp power=4\n= Second part\n"
                           "memory kvpop power=1\nimmed  kvpop  power=1 delay=off\n"
                           "missing kvpop_mlp sample=64\n");
    /* Values 1, 2, 6: mean 3, sd sqrt(14 / 2). Lines of single heads and other policies do not count. */
    write_text("evaluations/a-s1/metrics.csv",
               COLUMNS "t.h5,0,0,kvpop_mlp,,512,1,recall_own,9,5\n" MLP "recall_own,1,5\n" MLP
                       "token_accuracy_recall,.5,5\n");
    write_text("evaluations/a-s2/metrics.csv",
               COLUMNS MLP "recall_own,2,5\n" MLP "token_accuracy_recall,.75,5\n");
    write_text("evaluations/a-s3/metrics.csv",
               COLUMNS MLP "recall_own,6,5\n" MLP "token_accuracy_recall,,0\n");
    write_text("evaluations/reference-s1/metrics.csv",
               COLUMNS "t.h5,all,all,oracle,,512,1,retrieval_hit,.1,5\n" ORACLE
                       "retrieval_hit,.9,5\n" ORACLE "token_accuracy_recall,.96,5\n");
    write_text("evaluations/memory-s1/metrics.csv",
               COLUMNS "t.h5,all,all,kvpop,,512,1,recall_own,.4,5\n");
    write_text("evaluations/memory-s1/delay.csv",
               "policy,variant,budget,delay,measure,value\nkvpop,,512,256,next_token,.5\n"
               "kvpop,,512,256,decision_balanced,.75\n");
    write_text("evaluations/memory-s2/delay.csv",
               "policy,variant,budget,delay,measure,value\nkvpop,,512,256,next_token,.25\n");
    write_text("evaluations/immed-s1/delay.csv",
               "policy,variant,budget,delay,measure,value\nkvpop,,512,0,decision_balanced,.5\n");
    snprintf(command, sizeof command,
             "RUNS=%s/runs.txt HELD_OUT='1 2 3' experiments/finding/table.sh %s", folder, folder);
    cr_assert_eq(system(command), 0);
    const char *text = read_text("table.csv");
    static const char *const lines[] = {
        "\na,kvpop_mlp,power=4,recall_own,3.000000,2.645751,3\n",
        "\na,kvpop_mlp,power=4,token_accuracy_recall,0.625000,0.176777,2\n",
        "\noracle:power=2,oracle:power=2,,retrieval_hit,0.900000,,1\n",
        "\nmemory,kvpop,power=1,decision_balanced,0.750000,,1\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        cr_expect(strstr(text, lines[i]), "table.csv lacks%s in%s", lines[i], text);
    cr_expect(!strstr(text, "missing"));
    text = read_text("table.md");
    cr_expect(strstr(text, "| a | power=4 | 3.000 ± 2.646 | – | – | 0.625 ± 0.177 | – | – |\n"),
              "%s", text);
    cr_expect(strstr(text, "| missing | sample=64 | – | – | – | – | – | – |\n"), "%s", text);
    cr_expect(strstr(text, "| **Second part** |"), "%s", text);
    text = read_text("power.csv");
    cr_expect_str_eq(text, "label,power,budget,accuracy\noracle,2,512,0.960000\n"
                           "kvpop_mlp,4,512,0.625000\n");
    text = read_text("delay.csv");
    cr_expect_str_eq(text, "policy,variant,budget,delay,measure,value\n"
                           "kvpop,power=1,512,256,next_token,0.375000\n"
                           "kvpop,power=1,512,256,decision_balanced,0.750000\n"
                           "kvpop,power=1,512,0,decision_balanced,0.500000\n");
    text = read_text("results.csv");
    cr_expect(strstr(text, "\na,kvpop_mlp,power=4,3,recall_own,6\n"), "%s", text);
}
