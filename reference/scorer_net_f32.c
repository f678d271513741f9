/* Scorer network in float: training. */
#define REAL float
#define NAME(x) x##_f32
#include "reference/scorer_net_impl.h"
