/* Comma lists of policies and budgets -> rows. */
#include "experiments/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policies/registry.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/replay.h"

kv_status kv_budget_parse(const char *text, int32_t longest, int32_t *out) {
    static const char rule[] = "a budget is a whole number of entries (2048) or, with '.' or an "
                               "exponent, a fraction in (0,1] of the longest document (0.125)";
    bool fraction = strpbrk(text, ".eE") != NULL;
    long long count = 0;
    double share = 0;
    if (text[0] == '\0' ||
        strspn(text, fraction ? "0123456789.eE+-" : "0123456789") != strlen(text) ||
        text[0] == '-' || text[0] == '+')
        return KV_FAIL(KV_E_USAGE, "--budget: '%s': %s", text, rule);
    if (!fraction) {
        if (kv_parse_int(text, 1, KV_MOST_ENTRIES, &count) != KV_OK)
            return KV_FAIL(KV_E_USAGE, "--budget: '%s' is outside [1, %d]: %s", text,
                           KV_MOST_ENTRIES, rule);
        *out = (int32_t)count;
        return KV_OK;
    }
    if (kv_parse_real(text, &share) != KV_OK || !(share > 0 && share <= 1))
        return KV_FAIL(KV_E_USAGE, "--budget: '%s' is not a fraction in (0,1]: %s", text, rule);
    *out = (int32_t)fmax(1, floor(share * longest + .5));
    return KV_OK;
}

/* Cuts the next item off a list, in place. NULL at the end. Blanks count: a budget has none (contract.md 4). */
static char *next_item(char **rest, char separator) {
    if (!*rest) return NULL;
    char *item = *rest, *end = strchr(item, separator);
    *rest = end ? end + 1 : NULL;
    if (end) *end = '\0';
    return item;
}

static const kv_param *find_param(const kv_policy *policy, const char *part) {
    for (const kv_param *p = policy->params; p && p->name; p++)
        if (strncmp(p->name, part, strlen(p->name)) == 0 && part[strlen(p->name)] == '=') return p;
    return NULL;
}

/* The next key=value of a policy item. A free text may hold colons of its own (file:item=oracle:power=2): parts that are no
 * parameter of the policy belong to the text before them. */
static char *next_setting(const kv_policy *policy, char **rest) {
    char *part = next_item(rest, ':');
    const kv_param *param = part ? find_param(policy, part) : NULL;
    while (param && param->type == KV_PARAM_TEXT && *rest && !find_param(policy, *rest)) {
        (*rest)[-1] = ':';
        next_item(rest, ':');
    }
    return part;
}

static kv_status unknown_policy(const char *name) {
    char list[2048] = "";
    for (int i = 0; kv_policy_at(i); i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "\n  %-14s %s", kv_policy_at(i)->name,
                 kv_policy_at(i)->summary);
    }
    return KV_FAIL(KV_E_USAGE, "there is no policy '%s'. Policies:%s", name, list);
}

/* --set and the file give the defaults of a policy, the item's own key=value parts win over them. */
static kv_status parse_policy(const kv_config *config, char *item, kv_row *row) {
    kv_status st = KV_OK;
    char *rest = item, *name = next_item(&rest, ':'), *part;
    row->policy = kv_policy_find(name);
    if (!row->policy) return unknown_policy(name);
    KV_TRY(kv_params_init(&row->params, row->policy->params));
    for (size_t i = 0; i < config->n_setting; i++) {
        const kv_setting *s = &config->setting[i];
        if (strcmp(s->policy, name) == 0 && strcmp(s->key, "weights") != 0)
            KV_TRY(kv_params_set(&row->params, name, s->key, s->value));
    }
    while ((part = next_setting(row->policy, &rest))) {
        char *equals = strchr(part, '=');
        if (!equals)
            KV_RAISE(KV_E_USAGE, "--policy %s: '%s' is not key=value, as in oracle:power=2", name,
                     part);
        *equals = '\0';
        KV_TRY(kv_params_set(&row->params, name, part, equals + 1));
    }
    kv_params_variant(&row->params, row->variant, sizeof row->variant);
out:
    return st;
}

static bool same_row(const kv_row *a, const kv_row *b) {
    if (a->policy != b->policy || a->run.budget != b->run.budget) return false;
    for (size_t i = 0; i < a->params.n; i++) /* a variant is cut where a text is long */
        if (a->params.text[i] && strcmp(a->params.text[i], b->params.text[i]) != 0) return false;
    return strcmp(a->variant, b->variant) == 0;
}

static kv_status add_row(kv_plan *plan, const kv_row *model, const kv_run *run, int32_t budget) {
    kv_status st = KV_OK;
    kv_row row = *model;
    row.run = *run;
    row.run.budget = budget;
    KV_TRY(kv_run_check(&row.run));
    for (size_t i = 0; i < plan->n_row; i++)
        if (same_row(&plan->row[i], &row)) return KV_OK;
    kv_row *grown = realloc(plan->row, (plan->n_row + 1) * sizeof *grown);
    if (!grown) KV_RAISE(KV_E_INTERNAL, "out of memory");
    plan->row = grown;
    KV_TRY(kv_params_copy(&row.params, &model->params));
    plan->row[plan->n_row++] = row;
out:
    return st;
}

static kv_status add_policy(kv_plan *plan, const kv_config *config, char *item, const kv_run *run,
                            int32_t longest) {
    kv_status st = KV_OK;
    kv_row model = {0};
    char *budgets = NULL, *rest, *text;
    KV_TRY(parse_policy(config, item, &model));
    if (model.policy->max_token > 0 && longest > model.policy->max_token)
        KV_RAISE(KV_E_USAGE, "%s accepts documents of at most %d tokens, the longest here has %d",
                 model.policy->name, model.policy->max_token, longest);
    if (!(budgets = rest = kv_strdup(kv_config_text(config, "budgets")))) return KV_E_INTERNAL;
    while ((text = next_item(&rest, ','))) {
        int32_t budget = 0;
        KV_TRY(kv_budget_parse(text, longest, &budget));
        KV_TRY(add_row(plan, &model, run, budget));
    }
out:
    free(budgets);
    kv_params_free(&model.params);
    return st;
}

static void warn_unused_settings(const kv_plan *plan, const kv_config *config) {
    for (size_t i = 0; i < config->n_setting; i++) {
        bool used = false;
        for (size_t j = 0; j < plan->n_row; j++)
            used |= strcmp(plan->row[j].policy->name, config->setting[i].policy) == 0;
        if (!used)
            kv_log(KV_LOG_WARN, "plan", "%s.%s=%s has no effect: %s is not among the policies",
                   config->setting[i].policy, config->setting[i].key, config->setting[i].value,
                   config->setting[i].policy);
    }
}

kv_status kv_plan_check(const kv_config *config) {
    kv_status st = KV_OK;
    char *policies = kv_strdup(kv_config_text(config, "policies")), *rest = policies, *item;
    char *budgets = kv_strdup(kv_config_text(config, "budgets"));
    if (!policies || !budgets) KV_RAISE(KV_E_INTERNAL, "out of memory");
    while ((item = next_item(&rest, ','))) {
        kv_row row = {0};
        st = parse_policy(config, item, &row);
        kv_params_free(&row.params);
        if (st != KV_OK) goto out;
    }
    rest = budgets;
    while ((item = next_item(&rest, ','))) {
        int32_t budget;
        KV_TRY(kv_budget_parse(item, 1, &budget));
    }
out:
    free(policies);
    free(budgets);
    return st;
}

kv_status kv_plan_make(const kv_config *config, int32_t longest, kv_plan *out) {
    kv_status st = KV_OK;
    kv_run run;
    char *policies = NULL, *rest, *item;
    memset(out, 0, sizeof *out);
    KV_TRY(kv_config_run(config, &run));
    if (!(policies = rest = kv_strdup(kv_config_text(config, "policies")))) return KV_E_INTERNAL;
    while ((item = next_item(&rest, ','))) KV_TRY(add_policy(out, config, item, &run, longest));
    warn_unused_settings(out, config);
out:
    free(policies);
    if (st != KV_OK) kv_plan_free(out);
    return st;
}

kv_status kv_plan_check_decisions(const kv_plan *plan, const kv_trace_info *trace) {
    const kv_policy *file = kv_policy_find("file");
    for (size_t i = 0; i < plan->n_row; i++) {
        const kv_row *row = &plan->row[i];
        const char *path = row->policy == file ? kv_params_text(&row->params, "path") : "";
        if (path[0] == '\0') continue;
        kv_status st = kv_evict_check(path, kv_params_text(&row->params, "item"), row->run.budget,
                                      trace->n_layer, trace->n_kv_head, trace->n_token);
        if (st != KV_OK)
            return kv_error_context(st, "policy file, budget %d, trace %s", row->run.budget,
                                    trace->path);
    }
    return KV_OK;
}

bool kv_row_reads_scores(const kv_row *row) { return kv_params_int(&row->params, "scores") == 1; }

void kv_plan_free(kv_plan *plan) {
    for (size_t i = 0; i < plan->n_row; i++) kv_params_free(&plan->row[i].params);
    for (size_t i = 0; i < plan->n_weights; i++) {
        kv_tensors_free(&plan->weights[i]->tensors);
        free(plan->weights[i]->name);
        free(plan->weights[i]);
    }
    free(plan->row);
    free(plan->weights);
    memset(plan, 0, sizeof *plan);
}
