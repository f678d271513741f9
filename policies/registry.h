/* Lookup of policies by name. */
#ifndef KV_REGISTRY_H
#define KV_REGISTRY_H

#include "policies/policy.h"

const kv_policy *kv_policy_find(const char *name); /* NULL if there is none */
const kv_policy *kv_policy_at(int i);              /* NULL past the end */

#endif
