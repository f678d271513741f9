/* Gate and soft-masked attention of dms in float: training. */
#include "reference/dms.h"

#define REAL float
#define NAME(x) x##_f32
#include "reference/dms_impl.h"
