/* Gate and soft-masked attention of dms in double: the same code, to check its gradients by finite differences. */
#include "reference/dms.h"

#define REAL double
#define NAME(x) x##_f64
#include "reference/dms_impl.h"
