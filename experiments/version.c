/* The build's identity. */
#include "experiments/version.h"

#include <stdio.h>

#include "kv_build.h" /* generated */

const kv_version kv_version_build = {
    .number = "0.1.0",
    .commit = KV_BUILD_COMMIT,
    .dirty = KV_BUILD_DIRTY,
#ifdef __clang__
    .compiler = __VERSION__,
#else
    .compiler = "gcc " __VERSION__,
#endif
    .flags = KV_BUILD_FLAGS,
    .sources = KV_BUILD_SOURCES,
    .attention_sources = KV_BUILD_ATTENTION_SOURCES,
};

const char *kv_version_text(void) {
    static char text[256];
    const kv_version *v = &kv_version_build;
    snprintf(text, sizeof text, "kvlab %s (commit %.12s%s, %s)", v->number, v->commit,
             v->dirty ? " with local changes" : "", v->compiler);
    return text;
}
