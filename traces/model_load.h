/* Model folders in Hugging Face layout: config.json plus model.safetensors or model.safetensors.index.json. */
#ifndef KV_MODEL_LOAD_H
#define KV_MODEL_LOAD_H

#include "reference/model.h"

/* Reads `dir`. KV_E_NOINPUT when files are missing; KV_E_DATA for an unsupported architecture or feature (named), missing or
 * misshapen tensors. *out is owned by the caller (kv_model_free). */
kv_status kv_model_load(const char *dir, kv_model **out);

#endif
