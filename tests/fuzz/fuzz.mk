# Fuzzing with libFuzzer (clang): everything that reads what others wrote. Skipped with a message where clang or its runtime is missing.
FUZZ_CC      ?= clang
FUZZ_SECONDS ?= 10
FUZZ_TARGETS := trace check safetensors params tokens
FUZZ_DIR     := $(BUILD)-fuzz
FUZZ_SRCS    := $(wildcard reference/core/*.c) reference/tensors.c traces/h5.c traces/chunks.c $(wildcard traces/trace_*.c) \
                traces/evict_file.c traces/output.c traces/safetensors.c experiments/token_file.c \
                $(wildcard experiments/inspect*.c) tests/naive/small_trace.c tests/naive/mutate_hdf5.c
FUZZ_FLAGS   := -std=c11 -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
FUZZ_OBJS    := $(FUZZ_SRCS:%.c=$(FUZZ_DIR)/%.o)

$(FUZZ_DIR)/%.o: %.c
	@mkdir -p $(@D)
	$(SAY) "  FUZZ $<"
	$(Q)$(FUZZ_CC) $(CPPFLAGS) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link $(WARN) -MMD -MP -c $< -o $@
$(FUZZ_DIR)/fuzz_%: $(FUZZ_DIR)/tests/fuzz/fuzz_%.o $(FUZZ_OBJS)
	$(Q)$(FUZZ_CC) $(FUZZ_FLAGS) -fsanitize=fuzzer $^ $(LDLIBS) -lgomp -o $@
-include $(FUZZ_OBJS:.o=.d) $(FUZZ_TARGETS:%=$(FUZZ_DIR)/tests/fuzz/fuzz_%.d)
.PRECIOUS: $(FUZZ_DIR)/%.o

.PHONY: fuzz-smoke fuzz-run
#: make fuzz-smoke [FUZZ_SECONDS=10]       fuzz every reader for some seconds each (needs clang)
fuzz-smoke: setup
	@if echo 'int LLVMFuzzerTestOneInput(const void *d, unsigned long n) { return d && n > 9; }' | \
	    $(FUZZ_CC) -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; \
	then $(MAKE) -s --no-print-directory fuzz-run; \
	else echo "fuzz-smoke: skipped, $(FUZZ_CC) with libFuzzer is missing (Debian: clang libclang-rt-14-dev)"; fi

# New inputs go to a scratch corpus in the build folder; findings lie beside it as crash-* and fail the run.
fuzz-run: $(FUZZ_TARGETS:%=$(FUZZ_DIR)/fuzz_%)
	@for t in $(FUZZ_TARGETS); do \
	    mkdir -p $(FUZZ_DIR)/corpus/$$t; seeds=tests/fuzz/seeds/$$t; [ -d $$seeds ] || seeds=; \
	    log=$(FUZZ_DIR)/$$t.log; printf '  FUZZ fuzz_%s: ' $$t; \
	    $(FUZZ_DIR)/fuzz_$$t -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
	        -artifact_prefix=$(FUZZ_DIR)/ -detect_leaks=0 $(FUZZ_DIR)/corpus/$$t $$seeds >$$log 2>&1 || \
	        { echo "failed ($$log)"; tail -40 $$log; exit 1; }; \
	    sed -n 's/^stat::number_of_executed_units: */inputs without a fault: /p' $$log; \
	done
