/* Short forms for the tables of training settings. */
#ifndef KV_EXPERIMENTS_TRAIN_PARAMS_H
#define KV_EXPERIMENTS_TRAIN_PARAMS_H

#include "reference/core/param.h"

#define KV_NUMBER(NAME, DEFAULT, MIN, MAX, HELP) \
    { \
        .name = NAME, .help = HELP, .type = KV_PARAM_REAL, .default_value = DEFAULT, .min = MIN, \
        .max = MAX \
    }
#define KV_COUNT(NAME, DEFAULT, MIN, MAX, HELP) \
    { \
        .name = NAME, .help = HELP, .type = KV_PARAM_INT, .default_value = DEFAULT, .min = MIN, \
        .max = MAX \
    }
#define KV_CHOICE(NAME, WORDS, HELP) \
    { .name = NAME, .help = HELP, .type = KV_PARAM_CHOICE, .choices = WORDS }

#endif
