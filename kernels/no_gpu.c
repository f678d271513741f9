/* Stands in for the CUDA kernels in a build without them. */
#include "kernels/kernels.h"

kv_status kv_gpu_ops(const kv_ops **out) {
    *out = &kv_ops_cpu;
    return KV_FAIL(KV_E_UNAVAILABLE,
                   "--device gpu: this kvlab was built without CUDA (no nvcc in PATH or "
                   "/usr/local/cuda when `make` ran, or CUDA=0); install the CUDA toolkit, run "
                   "`make clean` and `make`, or leave out --device");
}
