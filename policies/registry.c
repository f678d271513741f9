/* All policies of policies.def, by name. */
#include "policies/registry.h"

#include <string.h>

#define KV_POLICY(id) extern const kv_policy kv_policy_##id;
#include "policies/policies.def"
#undef KV_POLICY

#define KV_POLICY(id) &kv_policy_##id,
static const kv_policy *const all[] = {
#include "policies/policies.def"
};
#undef KV_POLICY

enum { N_POLICY = sizeof all / sizeof *all };

const kv_policy *kv_policy_at(int i) { return i >= 0 && i < N_POLICY ? all[i] : NULL; }

const kv_policy *kv_policy_find(const char *name) {
    for (int i = 0; i < N_POLICY; i++)
        if (strcmp(all[i]->name, name) == 0) return all[i];
    return NULL;
}
