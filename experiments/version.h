/* What this binary was built from; filled in by experiments/version.sh at build time. */
#ifndef KV_EXPERIMENTS_VERSION_H
#define KV_EXPERIMENTS_VERSION_H

#include <stdbool.h>

typedef struct kv_version {
    const char *number;            /* of the release */
    const char *commit;            /* git commit, "unknown" outside a checkout */
    bool dirty;                    /* tracked files differed from the commit */
    const char *compiler, *flags;  /* as used for the host code */
    const char *sources;           /* checksum of all sources: same text, same numbers */
    const char *attention_sources; /* checksum of what computes the cached dense results */
} kv_version;

extern const kv_version kv_version_build;

const char *kv_version_text(void); /* one line for --version */

#endif
