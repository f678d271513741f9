/* kvlab policies: every policy with its parameters, from the descriptors themselves. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "experiments/cli.h"
#include "experiments/plan.h"
#include "policies/registry.h"
#include "reference/core/log.h"

static void print_param(const kv_param *p) {
    char bounds[96], value[64], least[32], most[32];
    kv_format_real(p->default_value, value, sizeof value);
    kv_format_real(p->min, least, sizeof least);
    kv_format_real(p->max, most, sizeof most);
    switch (p->type) {
    case KV_PARAM_CHOICE:
        snprintf(value, sizeof value, "%.*s", (int)strcspn(p->choices, "|"), p->choices);
        snprintf(bounds, sizeof bounds, "%s", p->choices);
        break;
    case KV_PARAM_TEXT:
        snprintf(value, sizeof value, "%s", p->default_text ? p->default_text : "");
        snprintf(bounds, sizeof bounds, "text");
        break;
    default:
        if (isinf(p->default_value)) snprintf(value, sizeof value, "max");
        snprintf(bounds, sizeof bounds, "%c%s, %s]%s%s", p->min_open ? '(' : '[', least, most,
                 p->choices ? " or " : "", p->choices ? p->choices : "");
    }
    printf("      %s=%s  (%s)  %s\n", p->name, value, bounds, p->help ? p->help : "");
}

static void print_policy(const kv_policy *p) {
    static const char *const kind[] = {"priority", "gate", "attention"};
    printf("%-13s %s\n              %s%s%s; %s\n", p->name, p->summary, kind[p->kind],
           p->non_causal ? ", sees the future" : "", p->learned ? ", learned" : "", p->source);
    for (const kv_param *q = p->params; q && q->name; q++) print_param(q);
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    if (key != ARGP_KEY_ARG) return ARGP_ERR_UNKNOWN;
    *(const char **)state->input = arg;
    return state->arg_num == 0 ? 0 : ARGP_ERR_UNKNOWN;
}

/* The policies of a list, checked as --policy is; with --quiet nothing is printed: `make experiment` asks before it records. */
static kv_status print_list(const char *list) {
    kv_config config = {0};
    kv_plan plan = {0};
    kv_status st = KV_OK;
    KV_TRY(kv_config_init(&config));
    KV_TRY(kv_config_set(&config, "sweep", "policies", list));
    KV_TRY(kv_config_set(&config, "sweep", "budgets", "1000000"));
    KV_TRY(kv_plan_check(&config));
    if (kv_log_get_level() == KV_LOG_ERROR) goto out;
    KV_TRY(kv_plan_make(&config, 1, &plan));
    for (size_t i = 0; i < plan.n_row; i++) print_policy(plan.row[i].policy);
out:
    kv_plan_free(&plan);
    kv_config_free(&config);
    return st;
}

kv_status kv_cmd_policies(int argc, char **argv) {
    const char *list = NULL;
    static const struct argp argp = {
        .parser = parse,
        .args_doc = "[LIST]",
        .doc =
            "Lists the policies, one a line. With a LIST as for --policy, checks it and shows "
            "these "
            "policies with their parameters (default value first); -v shows all of them so.\v"
            "Example:\n"
            "  kvlab policies h2o,tova\n"
            "A policy is used as NAME or NAME:key=value, for example h2o:recent_share=0.25. Kinds: "
            "priority (a fixed score per token), gate (keep or leave, decided once), attention (a "
            "statistic of the attention over the tokens still kept)."};
    kv_status st = kv_cli_parse(&argp, argc, argv, &list);
    if (st != KV_OK) return st;
    if (list) return print_list(list);
    for (int i = 0; kv_policy_at(i); i++)
        if (kv_log_get_level() > KV_LOG_WARN)
            print_policy(kv_policy_at(i));
        else
            printf("%-13s %s%s\n", kv_policy_at(i)->name, kv_policy_at(i)->summary,
                   kv_policy_at(i)->non_causal ? " (sees the future)" : "");
    return KV_OK;
}
