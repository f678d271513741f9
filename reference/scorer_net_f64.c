/* Scorer network in double: the same code, to check its gradients by finite differences. */
#define REAL double
#define NAME(x) x##_f64
#include "reference/scorer_net_impl.h"
