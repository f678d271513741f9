# CUDA part of the build: compiled when nvcc and a GPU driver are found, left out otherwise (kvlab then says so when asked for
# --device gpu). CUDA=0 leaves it out, CUDA=1 insists, for a GPU elsewhere. Builds narrowed by SRC= and sanitizer builds leave it out
# unless CUDA=1 is given.
CUDA       ?= $(if $(or $(SAN),$(filter-out file,$(origin SRC))),0,auto)
CUDA_HOME  ?= /usr/local/cuda
NVCC       ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA_ARCHS ?= 90a#                 compute capabilities; 90a holds the fast path, 80 and 100 run the portable one
# 177: helpers of the wgmma kernels are unused where the target has no wgmma.
NVCC_FLAGS  = -std=c++17 -O3 -I. -diag-suppress 177 $(if $(filter 90a,$(CUDA_ARCHS)),-DKV_HOPPER) -Xptxas -warn-spills \
              $(if $(CUDA_STRICT),-Werror all-warnings -Xptxas -Werror) $(BREAK:%=-DKV_BREAK_%)
# BREAK="LSE COLUMN ATTEND ..." plants one error in each named operation, to see that `kvlab verify` finds it (another BUILD= folder).
BREAK      ?=
CUDA_SRCS  := $(wildcard kernels/*.cu)
GPU_DRIVER := $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg)

ifeq ($(CUDA)$(NVCC),1)
$(error CUDA=1, but nvcc was found neither in PATH nor in CUDA_HOME ($(CUDA_HOME)); install the CUDA toolkit or set NVCC)
endif

ifneq ($(and $(NVCC),$(or $(filter 1,$(CUDA)),$(if $(filter auto,$(CUDA)),$(GPU_DRIVER)))),)
CUDA_OBJS  := $(CUDA_SRCS:%.cu=$(BUILD)/%.cu.o) $(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/gpu_*.c))
CUDA_LIBS   = -L$(dir $(NVCC))../lib64 -lcudart_static -lstdc++ -ldl -lrt -lpthread
else
CUDA_OBJS  := $(BUILD)/kernels/no_gpu.o
CUDA_LIBS  :=
endif
-include $(CUDA_OBJS:.o=.d)

$(BUILD)/%.cu.o: %.cu | $(BUILD)/.setup
	@mkdir -p $(@D)
	$(SAY) "  NVCC $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) $(foreach a,$(CUDA_ARCHS),-gencode=arch=compute_$(a),code=sm_$(a)) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

#: make kernels-all                        compile every kernel for sm_80, sm_90a (register spills are errors) and sm_100
.PHONY: kernels-all
KERNELS_ALL := $(foreach a,80 90a 100,$(CUDA_SRCS:%.cu=$(BUILD)/sm_$(a)/%.o))
kernels-all: $(KERNELS_ALL)
$(BUILD)/sm_90a/%.o: CUDA_STRICT := 1
$(KERNELS_ALL): | $(BUILD)/.setup
	@mkdir -p $(@D)
	$(SAY) "  NVCC $@"
	$(Q)$(NVCC) $(NVCC_FLAGS) -gencode=arch=compute_$(CUDA_ONE),code=sm_$(CUDA_ONE) -c $(CUDA_FILE) -o $@
CUDA_ONE  = $(patsubst sm_%,%,$(firstword $(subst /, ,$(patsubst $(BUILD)/%,%,$@))))
CUDA_FILE = $(patsubst $(BUILD)/sm_$(CUDA_ONE)/%.o,%.cu,$@)
$(foreach a,80 90a 100,$(eval $(BUILD)/sm_$(a)/%.o: CUDA_ARCHS := $(a)))

#: make bundle                             bundle/: kvlab, its libraries, model and fixtures, for a machine with a GPU driver only
# bundle/kvlab unpacks the program and its libraries beside itself when first called. glibc and the driver come from that machine.
.PHONY: bundle bundle-files
BUNDLE_SYSTEM := libc|libm|libdl|librt|libpthread|ld-linux-x86-64|linux-vdso
bundle: setup
	$(AGAIN) CUDA=1 bundle-files
bundle-files: kvlab
	@rm -rf bundle
	@mkdir -p bundle/lib bundle/policies/weights bundle/traces bundle/tests
	$(Q)$(CC) $(LDFLAGS) -Wl,--disable-new-dtags,-rpath,'$$ORIGIN' $(BUILD)/experiments/main.o $(LIB) $(CUDA_LIBS) $(LDLIBS) -o bundle/lib/kvlab
	@ldd bundle/lib/kvlab | awk '$$3 ~ /^\// {print $$3}' | grep -vE '/($(BUNDLE_SYSTEM))\.so' | xargs -I{} cp -L {} bundle/lib/
	@strip bundle/lib/*
	@tar -C bundle -cJf bundle/lib.tar.xz lib
	@rm -r bundle/lib
	@printf '#!/bin/sh\nhere=$$(dirname "$$(readlink -f "$$0")")\n[ -x "$$here/lib/kvlab" ] || tar -C "$$here" -xJf "$$here/lib.tar.xz"\nexec "$$here/lib/kvlab" "$$@"\n' >bundle/kvlab
	@chmod +x bundle/kvlab
	@cp -r policies/weights bundle/policies/ 2>/dev/null || true
	@cp -r traces/model bundle/traces/
	@cp -r tests/fixtures bundle/tests/
	@du -sh bundle
	@test "$$(du -sm bundle | cut -f1)" -le 50 || { echo "bundle/ is larger than 50 MB" >&2; exit 1; }
